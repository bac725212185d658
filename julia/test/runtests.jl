# Run with two threads or more. The arguments name the parts to run; by default all parts run. The
# part "gpu" needs DiffEqGPU and KernelAbstractions, and runs on the CPU.

using Distributed: Distributed
using EnsembleODE: EnsembleODE
using Mmap: Mmap
using SciMLBase: SciMLBase, ReturnCode
using SpecialFunctions: SpecialFunctions
using StaticArrays: SMatrix, SVector
using Test
using TOML: TOML

include("asking.jl")
include("problems.jl")

const PARTS = (
    "primitives", "fields", "solving", "codes", "callbacks", "mass_matrices", "adjoints", "noise",
    "places", "requests", "gpu", "code",
)

@testset verbose = true "EnsembleODE" begin
    for name in (isempty(ARGS) ? PARTS : ARGS)
        @testset "$name" begin
            include("$(name).jl")
        end
    end
end
