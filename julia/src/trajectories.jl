"""
    Numbers(own, shared, work, happened)

The parameters of a translated function: those of this trajectory, those of all, and its scratch
memory; and what has happened to the trajectory, where there are callbacks.
"""
struct Numbers{O,S,W,H}
    own::O
    shared::S
    work::W
    happened::H
end

"""
    Trajectories(; u0, own, shared, t0, t1, times, counts, abstol, reltol, dt, dtmin, dtmax,
                 tstops, d_discontinuities)

An ensemble as arrays, whose last axis is the trajectory where the numbers differ by it:

- `u0`: `[state]` or `[state, trajectory]`; `own`: `[parameter, trajectory]`; `shared`:
  `[parameter]`.
- `t0`, `t1`: `[1]` or `[trajectory]`.
- `times`: what is saved, `[time]` or `[time, trajectory]`, of which the first `counts` are meant;
  or nothing.
- `abstol`, `reltol`: `[1]` or `[state]`, or with the trajectory as a second axis; `dt`, `dtmin`,
  `dtmax`: `[1]`, `[trajectory]`, or nothing.
- `tstops`, `d_discontinuities`: what is stepped onto, `[time]` or `[time, trajectory]`, infinitely
  far where there is no more; or nothing.
"""
Base.@kwdef struct Trajectories{T,P,Times,Counts,Step,Least,Most,Stops,Jumps}
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
end

column(x::AbstractMatrix, i) = view(x, :, i)
column(x::AbstractVector, i) = x
entry(x::AbstractVector, i) = length(x) == 1 ? x[1] : x[i]
entry(::Nothing, i) = nothing

# More of them would be copied wherever the parameters go, and take long to compile.
const LARGEST_STATIC = 64

static(x, ::Val{N}) where {N} = SVector{N,eltype(x)}(x)

"""
    Kind(trajectories, field; isbits = false)

How the state and the parameters are held: the sizes of static vectors, as types; `nothing` where
they are vectors in memory. With `isbits` all are static, as in a GPU kernel.
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

"""What all trajectories share of their parameters."""
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

# A tolerance is a number, or one a component of the state.
tolerance(x::AbstractVector, kind, i) = length(x) == 1 ? x[1] : held(x, kind.u)
tolerance(x::AbstractMatrix, kind, i) = size(x, 1) == 1 ? x[1, i] : held(view(x, :, i), kind.u)

"""Of these times those of trajectory `i`, each once and in the order they come."""
known(times, i) = filter!(isfinite, unique(column(times, i)))

"""Whether a number differs by trajectory, and so is an option of each problem."""
differs(x::AbstractMatrix) = true
differs(x::AbstractVector) = false
differs(::Nothing) = false

"""The options of the solve that all trajectories share, or (`i` given) those that are one's own."""
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
    # Its sign is that of the span.
    own_step = ens.dt !== nothing && (length(ens.dt) > 1 || length(ens.t0) + length(ens.t1) > 2)
    if ens.dt !== nothing && own_step == is_own
        # Not zero where the span is empty.
        direction = entry(ens.t1, at) < entry(ens.t0, at) ? -1 : 1
        push!(given, :dt => abs(entry(ens.dt, at)) * direction)
    end
    return (; given...)
end

"""Whether there are options of each problem."""
has_own_options(ens::Trajectories, kind::Kind) = !isempty(options(ens, kind, 1))
