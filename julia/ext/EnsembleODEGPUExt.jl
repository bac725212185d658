"""DiffEqGPU's ensemble algorithms: CUDA, the others by the same argument, or the CPU to test."""
module EnsembleODEGPUExt

using DiffEqGPU: DiffEqGPU
using EnsembleODE: EnsembleODE, Place, load
using KernelAbstractions: KernelAbstractions

# What each package calls its backend.
const BACKENDS = Dict(
    "CUDA" => :CUDABackend,
    "AMDGPU" => :ROCBackend,
    "oneAPI" => :oneAPIBackend,
    "Metal" => :MetalBackend,
)

function backend(name)
    name == "CPU" && return KernelAbstractions.CPU()
    return Base.invokelatest(getproperty(load(name), BACKENDS[name]))
end

function EnsembleODE.gpu_ensemble_algorithm(place::Place)
    # All on the device: a part for the CPU would be solved by another method.
    make = getproperty(DiffEqGPU, place.name)
    return make(backend(place.backend), 0.0)
end

"""The method of the same name that runs inside a kernel."""
function EnsembleODE.gpu_method(method)
    name = Symbol("GPU", nameof(typeof(method)))
    isdefined(DiffEqGPU, name) && return getproperty(DiffEqGPU, name)()
    there = filter(n -> startswith(string(n), "GPU"), names(DiffEqGPU))
    return error(
        "EnsembleGPUKernel has no $(nameof(typeof(method))); it has " *
        join(replace.(string.(there), "GPU" => ""), ", ") * ".",
    )
end

end
