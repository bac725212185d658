# Python asks in one TOML text, whose arrays are addresses in its memory (or, of a process of its
# own, places in memory that both have), and is answered in TOML.

"""
    handle(text) -> text

Do what is asked for. What goes wrong is the answer, too: `error`, with what Julia says of it.
"""
function handle(text::AbstractString)
    answer = try
        request = TOML.parse(text)
        # What is defined or loaded on the way is newer than this call.
        Base.invokelatest(OPERATIONS[request["operation"]], request)
    catch e
        cause = unwrapped(e)
        Dict("error" => sprint(showerror, cause), "kind" => string(nameof(typeof(cause))))
    end
    return sprint(TOML.print, answer)
end

unwrapped(e::CompositeException) = unwrapped(first(e.exceptions))
unwrapped(e::TaskFailedException) = unwrapped(first(first(Base.current_exceptions(e.task))))
unwrapped(e::Distributed.RemoteException) = unwrapped(e.captured)
unwrapped(e::CapturedException) = unwrapped(e.ex)
unwrapped(e) = e

"""The arrays of a request, by name."""
struct Arrays
    described::Dict{String,Any}
    memory::Ptr{UInt8}
end

const TYPES = Dict(
    string(T) => T for T in (
        Bool, Float16, Float32, Float64, Int8, Int16, Int32, Int64, UInt8, UInt16, UInt32, UInt64
    )
)

function Base.getindex(arrays::Arrays, name)
    d = arrays.described[name]
    place = haskey(d, "offset") ? arrays.memory + d["offset"] : Ptr{UInt8}(UInt(d["address"]))
    dims = Tuple(Int.(d["dims"]))
    return unsafe_wrap(Array, Ptr{TYPES[d["type"]]}(place), dims)
end
Base.get(arrays::Arrays, name, default) = haskey(arrays.described, name) ? arrays[name] : default

function with_arrays(fn, request)
    haskey(request, "memory") || return fn(Arrays(request["arrays"], C_NULL))
    memory = open(io -> Mmap.mmap(io, Vector{UInt8}), request["memory"], "r+")
    GC.@preserve memory fn(Arrays(request["arrays"], pointer(memory)))
end

"""A function of a request, which these processes have then."""
function translated(d, processes)
    define(d["name"], get(d, "source", nothing), processes)
    return Base.invokelatest(getproperty, Fields, Symbol(d["name"]))
end

function field(description, processes)
    functions, work = Dict{Symbol,Any}(), Dict{Symbol,Any}()
    for role in (:f, :jac, :tgrad)
        d = get(description, string(role), nothing)
        functions[role] = nothing
        d === nothing && continue
        functions[role] = translated(d, processes)
        sizes = zip(d["work_types"], d["work_sizes"])
        work[role] = Tuple((TYPES[type], Int(n)) for (type, n) in sizes)
    end
    in_place = description["in_place"]
    return Field(functions[:f], functions[:jac], functions[:tgrad], in_place, (; work...))
end

function place(description)
    chosen = Place(;
        name = Symbol(description["name"]),
        workers = get(description, "workers", 0),
        threads = get(description, "threads", 0),
        backend = get(description, "backend", ""),
    )
    IN_USE[] = is_distributed(chosen) ? start_workers(chosen.workers, max(1, chosen.threads)) :
               Int[]
    is_gpu(chosen) && load_gpu(chosen.backend)
    return chosen, [Distributed.myid(); IN_USE[]]
end

const BACKENDS = ("CPU", "CUDA", "AMDGPU", "oneAPI", "Metal")

function load_gpu(backend)
    backend in BACKENDS || error("backend must be one of $(join(BACKENDS, ", ")), got $backend.")
    # (Any kind of GPU brings what the kernels need on the CPU.)
    option = "--gpu=" * (backend == "CPU" ? "CUDA" : backend)
    needed = ["DiffEqGPU", "KernelAbstractions"]
    backend == "CPU" || push!(needed, backend)
    foreach(package -> load(package, option), needed)
    return nothing
end

function trajectories(arrays::Arrays)
    of(name) = get(arrays, name, nothing)
    return Trajectories(;
        u0 = arrays["u0"], own = arrays["own"], shared = arrays["shared"],
        t0 = arrays["t0"], t1 = arrays["t1"], times = of("times"), counts = of("counts"),
        abstol = arrays["abstol"], reltol = arrays["reltol"], dt = of("dt"),
        dtmin = of("dtmin"), dtmax = of("dtmax"), tstops = of("tstops"),
        d_discontinuities = of("d_discontinuities"),
    )
end

function common(request)
    given = Pair{Symbol,Any}[:maxiters => request["maxiters"]]
    haskey(request, "adaptive") && push!(given, :adaptive => request["adaptive"])
    haskey(request, "controller") && append!(given, pairs(control(request["controller"])))
    norm = get(request, "norm", "") == "MaxNorm" ? largest : nothing
    if haskey(request, "controlled")
        # (That of OrdinaryDiffEq is the root mean square.)
        norm = OfFirst(something(norm, root_mean_square), Val(request["controlled"]))
    end
    norm === nothing || push!(given, :internalnorm => norm)
    return (; given...)
end

largest(u, t) = maximum(abs, u)
root_mean_square(u, t) = sqrt(sum(abs2, u) / length(u))

"""
    OfFirst(norm, Val(N))

The norm of the first `N` components: step-size control does not look at the others.
"""
struct OfFirst{N,F} <: Function
    norm::F
    OfFirst(norm::F, ::Val{N}) where {N,F} = new{N,F}(norm)
end
(x::OfFirst)(u::Number, t) = abs(u)  # (of a time)
(x::OfFirst{N})(u::SVector, t) where {N} = x.norm(SVector(ntuple(k -> u[k], Val(N))), t)
(x::OfFirst{N})(u, t) where {N} = x.norm(view(u, 1:N), t)

"""
The options of a solve by the step-size controller of `Dict("name" => "PIController", "arguments" =>
[0.14, 0.08], "options" => Dict("gamma" => 0.9))`.
"""
function control(description)
    name, arguments = Symbol(description["name"]), description["arguments"]
    name in (:PIController, :IController, :PIDController) || error("$name is not a controller.")
    kind = getproperty(load("OrdinaryDiffEqCore"), name)
    constants = (; (Symbol(k) => v for (k, v) in description["options"])...)
    # They are the controller's own since OrdinaryDiffEq 7, and before that options of the solve.
    is_own = name === :PIDController || hasfield(kind, :gamma)
    is_own && return (; controller = Base.invokelatest(kind, arguments...; constants...))
    # (That of the first step is fixed there.)
    constants = Base.structdiff(constants, NamedTuple{(:qmax_first_step,)})
    return (; controller = Base.invokelatest(kind, arguments...), constants...)
end

function operation_solve(request)
    chosen, processes = place(request["place"])
    right_hand_side = field(request["field"], processes)
    algorithm = method(request["method"])
    acting = callbacks(get(request, "callbacks", nothing), processes)
    with_arrays(request) do arrays
        out = Outputs(;
            mode = Symbol(request["mode"]), start = request["start"],
            u = arrays["u"], t = get(arrays, "t", nothing), lengths = arrays["lengths"],
            codes = arrays["codes"], counts = counted(arrays), events = events(arrays),
        )
        in_one_thread(chosen) do
            Base.invokelatest(
                solve_ensemble!, out, trajectories(arrays), right_hand_side, algorithm, chosen,
                request["trajectories"]; stop = pointer(arrays["stop"]), callbacks = acting,
                common(request)...,
            )
        end
    end
    return Dict{String,Any}()
end

"""Where the counts go that are kept."""
function counted(arrays::Arrays)
    kept = filter(name -> haskey(arrays.described, string(name)), keys(COUNTS))
    return NamedTuple{kept}(map(name -> arrays[string(name)], kept))
end

"""Where the events of all trajectories go; nothing where none are kept."""
function events(arrays::Arrays)
    haskey(arrays.described, "event_t") || return nothing
    names = (:t, :which, :crossed, :before, :after, :count)
    return (; (name => arrays["event_$name"] for name in names)...)
end

function operation_adjoint(request)
    chosen, processes = place(request["place"])
    right_hand_side = field(request["field"], processes)
    adjoint = field(request["adjoint"], processes)
    algorithm = method(request["method"])
    with_arrays(request) do arrays
        in_one_thread(chosen) do
            Base.invokelatest(
                solve_adjoint!, arrays["gradient"], trajectories(arrays), arrays["rows"],
                arrays["cotangents"], right_hand_side, adjoint, algorithm, chosen,
                request["trajectories"]; stop = pointer(arrays["stop"]), common(request)...,
            )
        end
    end
    return Dict{String,Any}()
end

"""BLAS has no threads of its own, where trajectories have."""
function in_one_thread(fn, place::Place)
    place.name === :EnsembleThreads || return fn()
    threads = BLAS.get_num_threads()
    BLAS.set_num_threads(1)
    try
        return fn()
    finally
        BLAS.set_num_threads(threads)
    end
end

function operation_status(request)
    workers = intersect(first(WORKERS[]), Distributed.workers())
    ids = filter(>(0), map(process_id, workers))
    return Dict{String,Any}(
        "version" => string(VERSION),
        "threads" => Threads.nthreads(),
        "workers" => length(ids),
        "worker_pids" => ids,
        "scimlbase" => string(pkgversion(SciMLBase)),
        "project" => something(Base.active_project(), ""),
    )
end

"""Have the processes of a distributed ensemble: their process ids are needed to interrupt them."""
function operation_workers(request)
    place(request["place"])
    return operation_status(request)
end

function operation_stop_workers(request)
    stop_workers()
    return Dict{String,Any}()
end

const OPERATIONS = Dict(
    "solve" => operation_solve,
    "adjoint" => operation_adjoint,
    "status" => operation_status,
    "workers" => operation_workers,
    "stop_workers" => operation_stop_workers,
)

"""
    serve(requests, answers)

Answer one request after the other, until there are no more: the loop of a process of its own. A
text goes with its length in bytes on a line before it.
"""
function serve(requests::IO = stdin, answers::IO = stdout)
    # What is printed on the way must not come between the answers.
    redirect_stdout(stderr)
    println(answers, "ready")
    flush(answers)
    while !eof(requests)
        text = String(read(requests, parse(Int, readline(requests))))
        answer = handle(text)
        println(answers, ncodeunits(answer))
        print(answers, answer)
        flush(answers)
    end
    return nothing
end
