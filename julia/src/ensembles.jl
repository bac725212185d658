"""
    Place(name; workers, threads, backend)

Where trajectories run: the name of SciML's ensemble algorithm, and what it needs.
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

"""SciML's ensemble algorithm; those of DiffEqGPU are in the extension."""
ensemble_algorithm(place::Place) =
    is_gpu(place) ? gpu_ensemble_algorithm(place) : ALGORITHMS[place.name]()

function gpu_ensemble_algorithm end
function gpu_method end

"""The trajectory that SciML speaks of: in version 3 by a context, in version 2 by its number."""
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

A check at each step: for a state that is NaN, and for `stop`, the address of a number that is not
zero once the user has interrupted.
"""
struct Interruptible
    stop::Ptr{Int32}
end
(check::Interruptible)(dt, u, p, t) =
    any(isnan, u) || (check.stop != C_NULL && unsafe_load(check.stop) != 0)

"""
Say nothing: what SciML warns of is a return code. (An object since OrdinaryDiffEq 7, before that
`false`.)
"""
function quiet()
    id = Base.PkgId(Base.UUID("2b5f629d-d688-5b77-993f-72d75c75574e"), "DiffEqBase")
    base = get(Base.loaded_modules, id, SciMLBase)
    isdefined(base, :DEVerbosity) || return false
    return base.DEVerbosity(base.SciMLLogging.None())
end

"""
    solve_ensemble!(out, ens, field, method, place, n; stop, callbacks, common...)

Solve `n` trajectories with SciML, and write what is kept of them to `out`.
"""
function solve_ensemble!(
    out::Outputs, ens::Trajectories, field::Field, method, place::Place, n; stop = C_NULL,
    callbacks = nothing, common...
)
    # One alone DiffEqGPU does not solve on a GPU, and on the CPU not with all options.
    place = is_gpu(place) && n == 1 ? Place(; name = :EnsembleSerial) : place
    is_gpu(place) && check_spans(ens, place)
    kind = Kind(ens, field; isbits = is_gpu(place))
    shared = shared_numbers(ens, kind)
    f = ode_function(field)
    own_options = has_own_options(ens, kind)
    function problem(i)
        u0, span, p = start(ens, kind, field, shared, i, happened(callbacks, ens))
        own_options || return ODEProblem(f, u0, span, p)
        return ODEProblem(f, u0, span, p; options(ens, kind, i)...)
    end
    mode, first, rows = out.mode, out.start, size(out.u, 2)
    remote = is_distributed(place)
    keep = remote ? (sol, i) -> Record(mode, first, rows, ens, sol, i) :
           (sol, i) -> write!(out, ens, sol, i)
    # Where times are given, those that were saved besides them are passed over.
    saving = (; save_everystep = mode === :steps, save_start = first || mode === :times)
    check = Interruptible(remote || is_gpu(place) ? C_NULL : Ptr{Int32}(stop))
    checks = is_gpu(place) ? (;) : (; unstable_check = check, verbose = quiet(), dense = false)
    acting = callbacks === nothing ? (;) : (; callback = callbacks.set)
    records = solve_each(
        problem, keep, method, place, n;
        options(ens, kind)..., saving..., checks..., acting..., common...,
    )
    remote && foreach(i -> write!(out, records[i], i), 1:n)
    return nothing
end

"""What DiffEqGPU would solve otherwise, or not at all."""
function check_spans(ens::Trajectories, place::Place)
    if is_kernel(place)
        all(ens.t0 .<= ens.t1) || error("EnsembleGPUKernel solves forwards in time only.")
    elseif !(allequal(ens.t0) && allequal(ens.t1))
        error("EnsembleGPUArray solves all trajectories over one tspan; use EnsembleGPUKernel.")
    end
    return nothing
end

"""`keep(solution, i)` of each trajectory, whose problem is `problem(i)`."""
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

"""The processes that are given work, and how many threads each has."""
const WORKERS = Ref((Int[], 0))

"""Those of them that have work in the request that is being answered."""
const IN_USE = Ref(Int[])

"""
The id of a worker's process; 0 where it does not answer: it has died (by an interrupt, where it was
idle, or of memory), or is busy with what nobody waits for any more.
"""
function process_id(worker)
    asked = @async Distributed.remotecall_fetch(getpid, worker)
    waited = timedwait(() -> istaskdone(asked), 2.0; pollint = 0.001)
    return waited === :ok && !istaskfailed(asked) ? Int(fetch(asked)) : 0
end

"""Have this many processes with this many threads, and nothing else but what they need loaded."""
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

"""End this process when that one has ended: killed, it can't say so, and a worker may wait on."""
function end_with(process)
    Sys.isunix() || return nothing
    Timer(2; interval = 2) do _
        ccall(:kill, Cint, (Cint, Cint), process, 0) == 0 || ccall(:_exit, Cvoid, (Cint,), 1)
    end
    return nothing
end
