# Callbacks whose conditions and affects are translated functions `(u, p, t, uprev, tprev, mask)`,
# with `tprev` a tuple of one number. The log of a trajectory's events is one of its parameters.

"""
    Happened{T}(state, room, longest)

The log of a trajectory's events, with room for `room` of them:

- `t [event]`: the time; `which [event]`: the number of the callback.
- `crossed [condition, event]`: how each of the callback's conditions, at most `longest`, crossed
  zero.
- `before`, `after`, `[component, event]`: the states before and after the affect.
- `count`: the number of logged events; `code`: the return code with which an affect or an
  inconsistent start ended the trajectory, or 0; `acted`: the time of the last affect, or NaN.
"""
mutable struct Happened{T}
    const t::Vector{T}
    const which::Vector{Int32}
    const crossed::Matrix{Int32}
    const before::Matrix{T}
    const after::Matrix{T}
    count::Int32
    code::Int32
    acted::T
end

Happened{T}(state, room, longest) where {T} = Happened{T}(
    fill(T(NaN), room), fill(Int32(-1), room), zeros(Int32, longest, room),
    fill(T(NaN), state, room), fill(T(NaN), state, room), 0, 0, NaN,
)

"""
    Callbacks(set, room, longest)

The callbacks of an ensemble, as SciML's `set`. `room`: how many events of a trajectory are logged
at most; `longest`: the largest number of conditions of a callback.
"""
struct Callbacks{S}
    set::S
    room::Int
    longest::Int
end

happened(callbacks::Callbacks, ens::Trajectories{T}) where {T} =
    Happened{T}(size(ens.u0, 1), callbacks.room, callbacks.longest)
# Without callbacks, a log without room for events has the code of a start that is inconsistent.
happened(::Nothing, ens::Trajectories{T}) where {T} =
    is_singular(ens.mass) ? Happened{T}(size(ens.u0, 1), 0, 0) : nothing

"""Whether the trajectory had more events than there is room for, so that callbacks stop acting."""
is_full(integrator) = integrator.p.happened.code == MAX_EVENTS

#
# Conditions
#

"""The conditions of the continuous callback with the number `which`."""
struct Condition{F}
    part::F
    which::Int32
    Condition(part::F, which) where {F} = new{F}(part, which)
end
(c::Condition)(u, t, integrator) = c.part(u, integrator.p, t, (), (), ())[1]
function (c::Condition)(out, u, t, integrator)
    copyto!(out, c.part(u, integrator.p, t, (), (), ()))
    return nothing
end

"""The condition of a discrete callback; before its evaluation `limit` may shorten the next step."""
struct Asked{F,L}
    part::F
    limit::L
end
function (asked::Asked)(u, t, integrator)
    is_full(integrator) && return false
    hold!(integrator, asked.limit)
    return asked.part(u, integrator.p, t, integrator.uprev, (integrator.tprev,), ())[1] > 0
end

#
# Affects
#

"""
    Affect(part, which, is_kept, sign, asked = ())

The affect of the callback with the number `which`. `is_kept`: whether its events are logged;
`sign`: how its condition crosses zero, for callbacks with one condition; `asked`: the conditions of
all continuous callbacks, if this is one.
"""
struct Affect{F,A}
    part::F
    which::Int32
    is_kept::Bool
    sign::Int32
    asked::A
    Affect(part::F, which, is_kept, sign, asked::A = ()) where {F,A} =
        new{F,A}(part, which, is_kept, sign, asked)
end
(affect::Affect)(integrator) = affect(integrator, (affect.sign,))
function (affect::Affect)(integrator, crossed)
    log, t = integrator.p.happened, integrator.t
    if affect.is_kept && log.count == length(log.t)
        log.code = MAX_EVENTS
        return terminate!(integrator)
    end
    loses = loses_others(integrator, affect, crossed)
    given = integrator.uprev, (integrator.tprev,), map(eltype(integrator.u), crossed)
    found = affect.part(integrator.u, integrator.p, t, given...)
    if affect.is_kept
        log.count += 1
        log.t[log.count], log.which[log.count] = t, affect.which
        log.crossed[eachindex(crossed), log.count] .= crossed
        log.before[:, log.count] .= integrator.u
    end
    integrator.u = changed(integrator.u, found)
    affect.is_kept && (log.after[:, log.count] .= integrator.u)
    log.acted = t
    outcome = last(found)
    if outcome > GOES_ON
        log.code = outcome > TERMINATES ? NOT_CONVERGED : TERMINATED
        terminate!(integrator)
    elseif is_inconsistent(integrator)
        log.code = INITIAL_FAILURE
        terminate!(integrator)
    elseif loses
        log.code = FAILURE
        terminate!(integrator)
    end
    return nothing
end

"""
Whether a condition that didn't cause this event is zero to rounding, too. SciML lets one callback
act at a time, and then takes the signs of the other conditions from their roundings: events are
lost, or come twice.
"""
function loses_others(integrator, affect::Affect, crossed)
    p, roundings = integrator.p, 100eps(eltype(integrator.u))
    return any(affect.asked) do condition
        before = map(abs, condition.part(integrator.uprev, p, integrator.tprev, (), (), ()))
        now = map(abs, condition.part(integrator.u, p, integrator.t, (), (), ()))
        is_zero = map((x, y) -> x < roundings * y, now, before)
        any(condition.which == affect.which ? is_zero .& iszero.(crossed) : is_zero)
    end
end

"""The state after an affect: the first numbers of `found`."""
changed(::SVector{N,T}, found) where {N,T} = SVector{N,T}(ntuple(k -> found[k], Val(N)))
changed(u::Vector, found) = copyto!(u, 1, found, 1, length(u))

#
# Limits on the next step
#

"""
    Limit(tolerance, scalefactor)

Multiplies the next step by `scalefactor` until no component of the state at its end, extrapolated
from the last step, is below minus `tolerance`. `tolerance` is a translated function, or `nothing`
for the solve's `abstol`.
"""
struct Limit{F}
    tolerance::F
    scalefactor::Float64
end

hold!(integrator, ::Nothing) = nothing
function hold!(integrator, limit::Limit)
    u, t, p = integrator.u, integrator.t, integrator.p
    # After an affect the last step can't be extrapolated.
    p.happened.acted == t && return nothing
    least = limit.tolerance === nothing ? integrator.opts.abstol :
            limit.tolerance(u, p, t, (), (), ())
    # A component that is too low already is ignored: no step would be short enough.
    too_low(x, now, least) = x <= -least && now > -least
    proposed = get_proposed_dt(integrator)
    dt = proposed
    while t + dt != t && any(too_low.(integrator(t + dt), u, least))
        dt *= oftype(dt, limit.scalefactor)
    end
    dt == proposed || set_proposed_dt!(integrator, oftype(dt, 0.9) * dt)
    return nothing
end

#
# From a request
#

const ROOTFIND = Dict(string(x) => x for x in instances(SciMLBase.RootfindOpt))

"""The callbacks of a request; `nothing` for a request without callbacks."""
function callbacks(description, processes)
    description === nothing && return nothing
    pkgversion(SciMLBase) >= v"3" || error(
        "callbacks need SciMLBase 3, and there is $(pkgversion(SciMLBase)): update the packages " *
        "with `ensembleode julia install`, or use engine=\"compiled\".",
    )
    asked = Tuple(
        Condition(translated(x["condition"], processes), x["which"])
        for x in description["continuous"]
    )
    continuous = map((x, c) -> continuous_callback(x, c, asked, processes),
                     description["continuous"], asked)
    discrete = map(x -> discrete_callback(x, processes), description["discrete"])
    set = CallbackSet(continuous..., discrete...)
    return Callbacks(set, description["room"], description["longest"])
end

function continuous_callback(d, condition, asked, processes)
    affect(name, sign) =
        haskey(d, name) ?
        Affect(translated(d[name], processes), d["which"], d["kept"], sign, asked) : nothing
    options = (;
        save_positions = Tuple(d["save_positions"]), rootfind = ROOTFIND[d["rootfind"]],
        interp_points = d["interp_points"], repeat_nudge = d["repeat_nudge"],
        dtrelax = d["dtrelax"],
    )
    d["is_vector"] &&
        return VectorContinuousCallback(condition, affect("up", 0), d["length"]; options...)
    return ContinuousCallback(condition, affect("up", 1), affect("down", -1); options...)
end

function discrete_callback(d, processes)
    limit = get(d, "limit", nothing)
    if limit !== nothing
        tolerance = haskey(limit, "tolerance") ? translated(limit["tolerance"], processes) : nothing
        limit = Limit(tolerance, limit["scalefactor"])
    end
    condition = Asked(translated(d["condition"], processes), limit)
    affect = Affect(translated(d["affect"], processes), d["which"], d["kept"], 1)
    return DiscreteCallback(condition, affect; save_positions = Tuple(d["save_positions"]))
end
