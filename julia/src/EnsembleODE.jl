"""
Ensembles of differential equations whose right-hand sides were written in JAX.

Python traces the right-hand side and sends its translation; from then on Julia solves alone, with
the arrays that Python shares. Each request of Python is one TOML text (`requests.jl`).

- `primitives.jl`: JAX's operations, with JAX's results also where Julia's functions differ.
- `fields.jl`: the translated functions, and the processes that have them.
- `methods.jl`: the methods by name.
- `trajectories.jl`: the problem of each trajectory, from columns of arrays.
- `mass_matrices.jl`: mass matrices, and whether algebraic equations hold.
- `callbacks.jl`: callbacks, and the log of a trajectory's events.
- `noise.jl`: the noise of stochastic problems.
- `records.jl`: what is kept of each solution.
- `ensembles.jl`: where trajectories run.
- `adjoints.jl`: gradients by the continuous adjoint.
- `requests.jl`: the requests of Python, and the loop that answers them in a separate process.
"""
module EnsembleODE

using Distributed: Distributed
using LinearAlgebra: LinearAlgebra, BLAS, Diagonal
using Mmap: Mmap
using SciMLBase:
    SciMLBase,
    CallbackSet,
    ContinuousCallback,
    DiscreteCallback,
    EnsembleDistributed,
    EnsembleProblem,
    EnsembleSerial,
    EnsembleSplitThreads,
    EnsembleThreads,
    ODEFunction,
    ODEProblem,
    ReturnCode,
    SDEFunction,
    SDEProblem,
    VectorContinuousCallback,
    get_proposed_dt,
    set_proposed_dt!,
    solve,
    terminate!
using StaticArrays: SMatrix, SVector
using TOML: TOML

using OrdinaryDiffEqRosenbrock: OrdinaryDiffEqRosenbrock
using OrdinaryDiffEqTsit5: OrdinaryDiffEqTsit5
using OrdinaryDiffEqVerner: OrdinaryDiffEqVerner

include("primitives.jl")
include("fields.jl")
include("methods.jl")
include("trajectories.jl")
include("mass_matrices.jl")
include("callbacks.jl")
include("noise.jl")
include("records.jl")
include("ensembles.jl")
include("adjoints.jl")
include("requests.jl")

end
