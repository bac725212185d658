"""
    Numbers(own, shared, work, happened)

The parameters of a translated function: the trajectory's own parameters, the parameters that all
trajectories share, and scratch memory; with callbacks, also the log of the trajectory's events.
"""
struct Numbers{O,S,W,H}
    own::O
    shared::S
    work::W
    happened::H
end

"""
    Trajectories(; u0, own, shared, t0, t1, times, counts, abstol, reltol, dt, dtmin, dtmax,
                 tstops, d_discontinuities, mass)

An ensemble as arrays. The last axis of numbers that differ by trajectory is the trajectory:

- `u0`: `[state]` or `[state, trajectory]`; `own`: `[parameter, trajectory]`; `shared`:
  `[parameter]`.
- `t0`, `t1`: `[1]` or `[trajectory]`.
- `times`: the times to save, `[time]` or `[time, trajectory]`, or nothing; `counts`: how many of
  the times, from the first on, each trajectory has.
- `abstol`, `reltol`: `[1]` or `[state]`, or with the trajectory as a second axis; `dt`, `dtmin`,
  `dtmax`: `[1]`, `[trajectory]`, or nothing.
- `tstops`, `d_discontinuities`: the times that the solver steps onto, padded with infinite times,
  `[time]` or `[time, trajectory]`; or nothing.
- `mass`: the mass matrix that all trajectories share, `[equation, state]`; or nothing.
"""
Base.@kwdef struct Trajectories{T,P,Times,Counts,Step,Least,Most,Stops,Jumps,M}
    u0::VecOrMat{T}
    own::Matrix{P}
    shared::Vector{P}
    t0::Vector{T}
    t1::Vector{T}
    times::Times
    counts::Counts
    abstol::VecOrMat{T}
    reltol::VecOrMat{T}
    dt::Step
    dtmin::Least = nothing
    dtmax::Most = nothing
    tstops::Stops = nothing
    d_discontinuities::Jumps = nothing
    mass::M = nothing
end

column(x::AbstractMatrix, i) = view(x, :, i)
column(x::AbstractVector, i) = x
entry(x::AbstractVector, i) = length(x) == 1 ? x[1] : x[i]
entry(::Nothing, i) = nothing

# Longer static vectors are copied wherever the parameters go, and take long to compile.
const LARGEST_STATIC = 64

static(x, ::Val{N}) where {N} = SVector{N,eltype(x)}(x)

"""
    Kind(trajectories, field; isbits = false)

How the state and the parameters are held: the sizes of static vectors, as types, or `nothing` for
vectors in memory. With `isbits` all vectors are static, as in a GPU kernel.
"""
struct Kind{U,O,S}
    u::U
    own::O
    shared::S
end

function Kind(ens::Trajectories, field::Field; isbits::Bool = false)
    small(n) = isbits || (!field.in_place && n <= LARGEST_STATIC) ? Val(n) : nothing
    u = field.in_place ? nothing : Val(size(ens.u0, 1))
    return Kind(u, small(size(ens.own, 1)), small(length(ens.shared)))
end

held(x, n::Val) = static(x, n)
held(x, ::Nothing) = Vector(x)

"""The parameters that all trajectories share."""
shared_numbers(ens::Trajectories, kind::Kind) =
    kind.shared === nothing ? ens.shared : static(ens.shared, kind.shared)

"""The state, the span and the parameters with which trajectory `i` starts."""
function start(ens::Trajectories, kind::Kind, field::Field, shared, i, happened = nothing)
    u0 = held(column(ens.u0, i), kind.u)
    span = (entry(ens.t0, i), entry(ens.t1, i))
    own = held(column(ens.own, i), kind.own)
    work = field.in_place ? scratch(field) : nothing
    return u0, span, Numbers(own, shared, work, happened)
end

# A tolerance is one number, or a vector with a number for each component of the state.
tolerance(x::AbstractVector, kind, i) = length(x) == 1 ? x[1] : held(x, kind.u)
tolerance(x::AbstractMatrix, kind, i) = size(x, 1) == 1 ? x[1, i] : held(view(x, :, i), kind.u)

"""The finite times of trajectory `i`, each once and in the given order."""
known(times, i) = filter!(isfinite, unique(column(times, i)))

"""Whether numbers differ by trajectory, and so are options of each problem."""
differs(x::AbstractMatrix) = true
differs(x::AbstractVector) = false
differs(::Nothing) = false

"""The options of the solve that all trajectories share; with `i`, the trajectory's own options."""
function options(ens::Trajectories, kind::Kind, i = nothing)
    is_own = i !== nothing
    at = is_own ? i : 1
    given = Pair{Symbol,Any}[]
    for (name, x) in (
        :saveat => ens.times, :tstops => ens.tstops, :d_discontinuities => ens.d_discontinuities
    )
        x === nothing || differs(x) != is_own || push!(given, name => known(x, at))
    end
    for (name, x) in (:abstol => ens.abstol, :reltol => ens.reltol)
        differs(x) == is_own && push!(given, name => tolerance(x, kind, at))
    end
    for (name, x) in (:dtmin => ens.dtmin, :dtmax => ens.dtmax)
        x === nothing || (length(x) > 1) != is_own || push!(given, name => entry(x, at))
    end
    # The step has the sign of the span, and so differs by trajectory where spans do.
    own_step = ens.dt !== nothing && (length(ens.dt) > 1 || length(ens.t0) + length(ens.t1) > 2)
    if ens.dt !== nothing && own_step == is_own
        # An empty span counts as forwards: a step must not be zero.
        direction = entry(ens.t1, at) < entry(ens.t0, at) ? -1 : 1
        push!(given, :dt => abs(entry(ens.dt, at)) * direction)
    end
    return (; given...)
end

"""Whether trajectories have options of their own."""
has_own_options(ens::Trajectories, kind::Kind) = !isempty(options(ens, kind, 1))
