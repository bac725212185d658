# A request of Python is one TOML text, and so is the answer. The text gives arrays by their
# addresses in memory or, to a separate Julia process, by their offsets in a file that both map.

"""
    handle(text) -> text

Answer a request. The answer to a request that fails has Julia's message as `error`, and the type of
the exception as `kind`.
"""
function handle(text::AbstractString)
    answer = try
        request = TOML.parse(text)
        # The request may define functions and load packages, of a newer world age than this call.
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

"""A function of a request, after its definition in the given processes."""
function translated(d, processes)
    define(d["name"], get(d, "source", nothing), processes)
    return Base.invokelatest(getproperty, Fields, Symbol(d["name"]))
end

function field(description, processes)
    functions, work = Dict{Symbol,Any}(), Dict{Symbol,Any}()
    for role in (:f, :jac, :tgrad, :g)
        d = get(description, string(role), nothing)
        functions[role] = nothing
        d === nothing && continue
        functions[role] = translated(d, processes)
        sizes = zip(d["work_types"], d["work_sizes"])
        work[role] = Tuple((TYPES[type], Int(n)) for (type, n) in sizes)
    end
    in_place = description["in_place"]
    made = map(role -> functions[role], (:f, :jac, :tgrad, :g))
    return Field(made..., in_place, (; work...))
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
    # The installer's option for any kind of GPU adds the packages for kernels on the CPU, too.
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
        d_discontinuities = of("d_discontinuities"), mass = of("mass"),
    )
end

"""The noise of a stochastic problem, or nothing."""
function noise(request, arrays::Arrays)
    haskey(request, "noise") || return nothing
    d = request["noise"]
    numbers(name) = get(arrays, "noise_$name", nothing)
    return Noise(;
        kind = Symbol(d["kind"]), size = d["size"], draws = d["draws"], adaptive = d["adaptive"],
        key = numbers("key"), index = numbers("index"), repeat = numbers("repeat"),
        factor = numbers("factor"), times = numbers("t"), W = numbers("W"), Z = numbers("Z"),
    )
end

function common(request)
    given = Pair{Symbol,Any}[:maxiters => request["maxiters"]]
    haskey(request, "adaptive") && push!(given, :adaptive => request["adaptive"])
    haskey(request, "controller") && append!(given, pairs(control(request["controller"])))
    norm = get(request, "norm", "") == "MaxNorm" ? largest : nothing
    if haskey(request, "controlled")
        # OrdinaryDiffEq's default norm is the root mean square.
        norm = OfFirst(something(norm, root_mean_square), Val(request["controlled"]))
    end
    norm === nothing || push!(given, :internalnorm => norm)
    return (; given...)
end

largest(u, t) = maximum(abs, u)
root_mean_square(u, t) = sqrt(sum(abs2, u) / length(u))

"""
    OfFirst(norm, Val(N))

The norm of the first `N` components, so that step-size control ignores the other components.
"""
struct OfFirst{N,F} <: Function
    norm::F
    OfFirst(norm::F, ::Val{N}) where {N,F} = new{N,F}(norm)
end
(x::OfFirst)(u::Number, t) = abs(u)  # the norm of a time
(x::OfFirst{N})(u::SVector, t) where {N} = x.norm(SVector(ntuple(k -> u[k], Val(N))), t)
(x::OfFirst{N})(u, t) where {N} = x.norm(view(u, 1:N), t)

"""
The options of a solve with the step-size controller that is described by `Dict("name" =>
"PIController", "arguments" => [0.14, 0.08], "options" => Dict("gamma" => 0.9))`.
"""
function control(description)
    name, arguments = Symbol(description["name"]), description["arguments"]
    name in (:PIController, :IController, :PIDController) || error("$name is not a controller.")
    # The methods' packages have loaded it, and the project need not name it.
    core = Base.PkgId(Base.UUID("bbf590c4-e513-4bbe-9b18-05decba2e5d8"), "OrdinaryDiffEqCore")
    kind = getproperty(Base.loaded_modules[core], name)
    constants = (; (Symbol(k) => v for (k, v) in description["options"])...)
    # The constants belong to the controller since OrdinaryDiffEq 7, and to the solve before.
    is_own = name === :PIDController || any(x -> hasfield(kind, x), (:gamma, :basic))
    is_own && return (; controller = Base.invokelatest(kind, arguments...; constants...))
    # Before OrdinaryDiffEq 7 the value of `qmax_first_step` can't be changed.
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
                noise = noise(request, arrays), common(request)...,
            )
        end
    end
    return Dict{String,Any}()
end

"""The arrays to which the kept counts are written, by name."""
function counted(arrays::Arrays)
    kept = filter(name -> haskey(arrays.described, string(name)), keys(COUNTS))
    return NamedTuple{kept}(map(name -> arrays[string(name)], kept))
end

"""The arrays to which events are written; `nothing` where no events are kept."""
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

"""Call `fn`, with a single BLAS thread where trajectories run in several threads."""
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

"""Start the workers of a distributed ensemble: Python needs their process ids to interrupt them."""
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

Answer requests until their stream ends: the main loop of a separate Julia process. Each text, of a
request or an answer, follows a line with its length in bytes.
"""
function serve(requests::IO = stdin, answers::IO = stdout)
    # Whatever right-hand sides print must not come between the answers.
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
