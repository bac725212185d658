# Requests as Python makes them: a TOML text, and arrays by their addresses.

"""The definition of a function: NAME in its source becomes a name with a hash of the source."""
function definition(source; work = ())
    name = "f_" * string(hash(source); base = 16)
    types, sizes = [string(first(w)) for w in work], [last(w) for w in work]
    source = replace(source, "NAME" => name)
    return Dict("name" => name, "source" => source, "work_types" => types, "work_sizes" => sizes)
end

"""The description of a field in a request; `functions` are sources or definitions."""
function described(; in_place = false, functions...)
    define(x) = x isa String ? definition(x) : x
    return Dict{String,Any}(
        "in_place" => in_place, (string(role) => define(x) for (role, x) in functions)...
    )
end

"""The function of a definition, defined in this process."""
function defined(d::AbstractDict)
    EnsembleODE.define(d["name"], d["source"], [1])
    return Base.invokelatest(getproperty, EnsembleODE.Fields, Symbol(d["name"]))
end
defined(source::String) = defined(definition(source))

const PACKAGES = Dict(
    "Tsit5" => "OrdinaryDiffEqTsit5",
    "Vern7" => "OrdinaryDiffEqVerner",
    "Rosenbrock23" => "OrdinaryDiffEqRosenbrock",
    "Rodas4" => "OrdinaryDiffEqRosenbrock",
    "Rodas5P" => "OrdinaryDiffEqRosenbrock",
    "KenCarp4" => "OrdinaryDiffEqSDIRK",
    "DP5" => "OrdinaryDiffEqLowOrderRK",
)
named(name) = Dict("name" => name, "package" => PACKAGES[name])

at_address(x::Array) = Dict("address" => Int(UInt(pointer(x))))

"""The text of a request; `placed(array)` describes the place of an array in memory."""
function text(operation, arrays = Dict(); placed = at_address, more...)
    described = Dict(
        name => Dict("type" => string(eltype(x)), "dims" => collect(size(x)), placed(x)...)
        for (name, x) in arrays
    )
    options = Dict(string(k) => v for (k, v) in more if v !== nothing)
    request = Dict{String,Any}("operation" => operation, "arrays" => described, options...)
    return sprint(TOML.print, request)
end

"""The answer to a request."""
ask(operation, arrays = Dict(); more...) =
    GC.@preserve arrays TOML.parse(EnsembleODE.handle(text(operation, arrays; more...)))

"""
The description of callbacks in a request; their parts are expressions of `u, p, t, uprev, tprev,
mask`.
"""
function described_callbacks(; continuous = [], discrete = [], room = 4)
    part(x) = definition("NAME(u, p, t, uprev, tprev, mask) = $x")
    parts = (:condition, :up, :down, :affect)
    made(; which, parts_and_options...) = Dict{String,Any}(
        "which" => which, "kept" => true, "save_positions" => [false, false],
        (string(k) => k in parts ? part(x) : x for (k, x) in pairs(parts_and_options))...
    )
    found(; length = 1, rootfind = "LeftRootFind", options...) = made(;
        length, is_vector = length > 1, rootfind, interp_points = 10, repeat_nudge = 0.01,
        dtrelax = 1.0, options...
    )
    longest = maximum(x -> get(x, :length, 1), continuous; init = 1)
    return Dict(
        "room" => room, "longest" => longest, "continuous" => [found(; x...) for x in continuous],
        "discrete" => [made(; x...) for x in discrete],
    )
end

listed(x::AbstractArray) = collect(x)
listed(x::Number) = [x]

"""The arrays that a solve of `n` trajectories reads, without those given as `nothing`."""
function read_by_solve(
    T, n; u0, own = zeros(T, 0, n), shared = T[], t0 = 0, t1 = 1, times = nothing,
    counts = nothing, abstol = 1e-9, reltol = 1e-9, dt = nothing, tstops = nothing,
    d_discontinuities = nothing, mass = nothing
)
    given = (; u0, own, shared, t0, t1, times, abstol, reltol, dt, tstops, d_discontinuities, mass)
    arrays = Dict{String,Any}(
        string(k) => T.(listed(x)) for (k, x) in pairs(given) if x !== nothing
    )
    counts === nothing || (arrays["counts"] = Int32.(counts))
    arrays["stop"] = Int32[0]
    return arrays
end

"""The arrays that a solve of `n` trajectories writes, filled with 77, which must not remain."""
function written_by_solve(T, n, size, rows, mode; room = 0, longest = 1)
    arrays = Dict{String,Any}("u" => fill(T(77), size, rows, n))
    mode == "steps" && (arrays["t"] = fill(T(77), rows, n))
    for name in ("lengths", "codes", "naccept", "nreject", "nf")
        arrays[name] = fill(Int32(77), n)
    end
    room == 0 && return arrays
    for (name, dims) in (("t", (room, n)), ("before", (size, room, n)), ("after", (size, room, n)))
        arrays["event_$name"] = fill(T(77), dims)
    end
    for (name, dims) in (("which", (room, n)), ("crossed", (longest, room, n)), ("count", (n,)))
        arrays["event_$name"] = fill(Int32(77), dims)
    end
    return arrays
end

"""
Solve `n` trajectories of a described field, and return the written arrays by name. `rows`: how many
saved times there is room for.
"""
function solved(
    field, n; T = Float64, u0, method = "Tsit5", place = "EnsembleSerial", workers = nothing,
    threads = nothing, mode = "ends", start = false, times = nothing, rows = nothing,
    maxiters = 100_000, adaptive = nothing, stop = nothing, callbacks = nothing, numbers...
)
    arrays = read_by_solve(T, n; u0, times, numbers...)
    stop === nothing || (arrays["stop"] = stop)
    if rows === nothing
        rows = mode == "times" ? size(times, 1) : mode == "ends" ? 1 + start : 1000
    end
    acting = something(callbacks, Dict("room" => 0, "longest" => 1))
    written = written_by_solve(
        T, n, size(u0, 1), rows, mode; room = acting["room"], longest = acting["longest"]
    )
    backend = startswith(place, "EnsembleGPU") ? "CPU" : nothing
    where = (; name = place, workers, threads, backend)
    answer = ask(
        "solve", merge(arrays, written);
        field, mode, start, maxiters, adaptive, callbacks, trajectories = n,
        method = method isa String ? named(method) : method,
        place = Dict(string(k) => v for (k, v) in pairs(where) if v !== nothing),
    )
    haskey(answer, "error") && error(answer["kind"] * ": " * answer["error"])
    return (; (Symbol(k) => x for (k, x) in written)...)
end

const SUCCESS, MAX_ITERS, DT_LESS_THAN_MIN, UNSTABLE, FAILURE = 1:5
