"""
    Place(name; workers, threads, backend)

Where trajectories run: the name of SciML's ensemble algorithm, the number of worker processes, the
threads of each worker, and the backend of GPU kernels.
"""
Base.@kwdef struct Place
    name::Symbol
    workers::Int = 0
    threads::Int = 0
    backend::String = ""
end

is_distributed(place::Place) = place.name in (:EnsembleDistributed, :EnsembleSplitThreads)
is_kernel(place::Place) = place.name === :EnsembleGPUKernel
is_gpu(place::Place) = place.name in (:EnsembleGPUArray, :EnsembleGPUKernel)

const ALGORITHMS = Dict(
    :EnsembleSerial => EnsembleSerial,
    :EnsembleThreads => EnsembleThreads,
    :EnsembleDistributed => EnsembleDistributed,
    :EnsembleSplitThreads => EnsembleSplitThreads,
)

"""SciML's ensemble algorithm; the extension has DiffEqGPU's algorithms."""
ensemble_algorithm(place::Place) =
    is_gpu(place) ? gpu_ensemble_algorithm(place) : ALGORITHMS[place.name]()

function gpu_ensemble_algorithm end
function gpu_method end

"""The number of a trajectory: SciMLBase 3 passes a context, SciMLBase 2 the number itself."""
index(ctx) = ctx.sim_id
index(i::Integer) = i

struct ProblemOf{F}
    make::F
end
(p::ProblemOf)(prob, ctx) = p.make(index(ctx))
(p::ProblemOf)(prob, i, repeat) = p.make(i)

struct OutputOf{F}
    keep::F
end
(o::OutputOf)(sol, ctx) = (o.keep(sol, index(ctx)), false)

"""
    Interruptible(stop)

A check at each step, which ends the solve where the state has a NaN, or where the number at the
address `stop` is no longer zero because the user has interrupted.
"""
struct Interruptible
    stop::Ptr{Int32}
end
(check::Interruptible)(dt, u, p, t) =
    any(isnan, u) || (check.stop != C_NULL && unsafe_load(check.stop) != 0)

"""
The value of `verbose` that silences SciML's warnings, which repeat the return codes: an object
since OrdinaryDiffEq 7, and `false` before.
"""
function quiet()
    id = Base.PkgId(Base.UUID("2b5f629d-d688-5b77-993f-72d75c75574e"), "DiffEqBase")
    base = get(Base.loaded_modules, id, SciMLBase)
    isdefined(base, :DEVerbosity) || return false
    return base.DEVerbosity(base.SciMLLogging.None())
end

"""
    solve_ensemble!(out, ens, field, method, place, n; stop, callbacks, noise, common...)

Solve `n` trajectories with SciML, and write what is kept of each solution to `out`.
"""
function solve_ensemble!(
    out::Outputs, ens::Trajectories, field::Field, method, place::Place, n; stop = C_NULL,
    callbacks = nothing, noise = nothing, common...
)
    # DiffEqGPU solves a single trajectory on the CPU, and supports fewer options there.
    place = is_gpu(place) && n == 1 ? Place(; name = :EnsembleSerial) : place
    is_gpu(place) && check_spans(ens, place)
    kind = Kind(ens, field; isbits = is_gpu(place))
    shared = shared_numbers(ens, kind)
    f = ode_function(field, mass_matrix(ens, kind))
    norm = get(common, :internalnorm, root_mean_square)
    own_options = has_own_options(ens, kind)
    function problem(i)
        u0, span, p = start(ens, kind, field, shared, i, happened(callbacks, ens))
        if is_inconsistent(f, u0, p, span[1], tolerance(ens.abstol, kind, i), norm)
            # The trajectory ends where it starts.
            p.happened.code, span = INITIAL_FAILURE, (span[1], span[1])
        end
        own = own_options ? options(ens, kind, i) : (;)
        noise === nothing && return ODEProblem(f, u0, span, p; own...)
        return stochastic_problem(f, field.g, noise, u0, span, p, i; own...)
    end
    mode, first, rows = out.mode, out.start, size(out.u, 2)
    remote = is_distributed(place)
    keep = remote ? (sol, i) -> Record(mode, first, rows, ens, sol, i) :
           (sol, i) -> write!(out, ens, sol, i)
    # With given times `keep!` skips the saved times that were not asked for.
    saving = (; save_everystep = mode === :steps, save_start = first || mode === :times)
    check = Interruptible(remote || is_gpu(place) ? C_NULL : Ptr{Int32}(stop))
    checks = is_gpu(place) ? (;) : (; unstable_check = check, verbose = quiet(), dense = false)
    acting = callbacks === nothing ? (;) : (; callback = callbacks.set)
    # Python has made the starts consistent, where that was asked for.
    initial = is_singular(ens.mass) ? (; initializealg = SciMLBase.NoInit()) : (;)
    records = solve_each(
        problem, keep, method, place, n;
        options(ens, kind)..., saving..., checks..., acting..., initial..., common...,
    )
    remote && foreach(i -> write!(out, records[i], i), 1:n)
    return nothing
end

"""Raise an error for time spans that DiffEqGPU would replace by others, or can't solve."""
function check_spans(ens::Trajectories, place::Place)
    if is_kernel(place)
        all(ens.t0 .<= ens.t1) || error("EnsembleGPUKernel solves forwards in time only.")
    elseif !(allequal(ens.t0) && allequal(ens.t1))
        error("EnsembleGPUArray solves all trajectories over one tspan; use EnsembleGPUKernel.")
    end
    return nothing
end

"""Solve `problem(i)` for each trajectory `i` up to `n`; return the results of `keep(sol, i)`."""
function solve_each(problem, keep, method, place::Place, n; kwargs...)
    ens = EnsembleProblem(
        problem(1);
        prob_func = ProblemOf(problem),
        output_func = OutputOf(keep),
        safetycopy = false,
    )
    chosen = is_kernel(place) ? gpu_method(method) : method
    # SciML can't split fewer trajectories than there are processes.
    few = place.name === :EnsembleSplitThreads && n < Distributed.nworkers()
    algorithm = few ? EnsembleDistributed() : ensemble_algorithm(place)
    return solve(ens, chosen, algorithm; trajectories = n, kwargs...).u
end

#
# Processes
#

"""The worker processes, and the number of threads of each."""
const WORKERS = Ref((Int[], 0))

"""The worker processes that solve for the current request."""
const IN_USE = Ref(Int[])

"""
The id of a worker's process, or 0 where the worker does not answer: because the process has died
(by an interrupt while idle, or out of memory), or is still busy with an abandoned request.
"""
function process_id(worker)
    asked = @async Distributed.remotecall_fetch(getpid, worker)
    waited = timedwait(() -> istaskdone(asked), 2.0; pollint = 0.001)
    return waited === :ok && !istaskfailed(asked) ? Int(fetch(asked)) : 0
end

"""
The `n` worker processes with `threads` threads each and this package loaded: the running ones where
they fit, else new ones.
"""
function start_workers(n::Int, threads::Int)
    processes, have = WORKERS[]
    processes = intersect(processes, Distributed.workers())
    if length(processes) == n && have == threads && all(i -> process_id(i) > 0, processes)
        return processes
    end
    isempty(processes) || Distributed.rmprocs(processes...)
    WORKERS[] = (Int[], 0)
    n == 0 && return Int[]
    flags = `--project=$(Base.active_project()) --threads=$threads --startup-file=no`
    processes = Distributed.addprocs(n; exeflags = flags, topology = :master_worker)
    Distributed.remotecall_eval(Main, processes, :(using EnsembleODE: EnsembleODE))
    foreach(i -> Distributed.remotecall_wait(end_with, i, getpid()), processes)
    foreach(i -> delete!(DEFINED, i), processes)
    WORKERS[] = (processes, threads)
    return processes
end

stop_workers() = start_workers(0, 0)

"""End this process after `process` has ended: a killed process can't stop its workers itself."""
function end_with(process)
    Sys.isunix() || return nothing
    Timer(2; interval = 2) do _
        ccall(:kill, Cint, (Cint, Cint), process, 0) == 0 || ccall(:_exit, Cvoid, (Cint,), 1)
    end
    return nothing
end
