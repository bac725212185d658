"""
    AdjointNumbers(own, shared, work, forward)

The parameters of an adjoint's right-hand side: those of the forward field, scratch memory, and the
forward solution as a function of the time.
"""
struct AdjointNumbers{O,S,W,F}
    own::O
    shared::S
    work::W
    forward::F
end

"""The forward solution, interpolated by the method's own polynomial."""
struct Forward{S,C}
    sol::S
    cache::C
end
(f::Forward{S,Nothing})(t) where {S} = f.sol(t)
(f::Forward)(t) = (f.sol(f.cache, t); f.cache)

"""
The cotangents of the states at the saved times. The backward solve adds the cotangents of a row to
the adjoint state when it reaches the row's time. `next`, the next row to add, counts down.
"""
mutable struct Jumps{T}
    const times::Vector{T}
    const cotangents::Matrix{T}
    next::Int
end
(jumps::Jumps)(u, t, integrator) = jumps.next >= 1 && t == jumps.times[jumps.next]

"""Add the cotangents of all rows at the integrator's time to the adjoint state."""
function (jumps::Jumps)(integrator)
    integrator.u = jumped(integrator.u, jumps, integrator.t)
    return nothing
end

function jumped(z::SVector{N,T}, jumps::Jumps, t) where {N,T}
    while jumps.next >= 1 && jumps.times[jumps.next] == t
        row = jumps.next
        z += SVector{N,T}(ntuple(k -> cotangent(jumps, k, row), Val(N)))
        jumps.next -= 1
    end
    return z
end

function jumped(z::Vector, jumps::Jumps, t)
    while jumps.next >= 1 && jumps.times[jumps.next] == t
        for k in axes(jumps.cotangents, 1)
            z[k] += jumps.cotangents[k, jumps.next]
        end
        jumps.next -= 1
    end
    return z
end

cotangent(jumps::Jumps{T}, k, row) where {T} =
    k <= size(jumps.cotangents, 1) ? jumps.cotangents[k, row] : zero(T)

"""
    solve_adjoint!(gradient, ens, times, cotangents, field, adjoint, method, place, n; stop, common)

The continuous adjoint of `n` trajectories: solve forwards, then backwards for
`z = [lambda; integral of the parameters' gradient]` along the interpolated forward solution.

- `gradient [state + parameters, trajectory]`: the result is written here.
- `ens`: without `times`, so that the forward solution can be interpolated everywhere.
- `times [time]` or `[time, trajectory]`: the times of the saved states.
- `cotangents [state, time, trajectory]`: the cotangents of the saved states.
- `adjoint`: the right-hand side of `z`, which reads the forward state by `p.forward(t)`.

A trajectory whose forward solve fails has a gradient of zero; where the backward solve fails, the
gradient is NaN.
"""
function solve_adjoint!(
    gradient::Matrix{T}, ens::Trajectories{T}, times, cotangents::Array{T,3}, field::Field,
    adjoint::Field, method, place::Place, n; stop = C_NULL, common...
) where {T}
    kind = Kind(ens, field)
    shared = shared_numbers(ens, kind)
    forward_function, adjoint_function = ode_function(field), ode_function(adjoint)
    total = size(gradient, 1)
    check = Interruptible(is_distributed(place) ? C_NULL : Ptr{Int32}(stop))
    shared_options = (; common..., unstable_check = check, verbose = quiet())
    static_adjoint = adjoint.in_place ? nothing : Val(total)
    function problem(i)
        u0, span, p = start(ens, kind, field, shared, i)
        steps = (; options(ens, kind)..., options(ens, kind, i)...)
        tolerances = scalar_tolerances(steps)
        forward = solve(
            ODEProblem(forward_function, u0, span, p), method; steps..., shared_options...
        )
        failed = code(forward.retcode) != SUCCESS
        cache = field.in_place ? copy(u0) : nothing
        work = adjoint.in_place ? scratch(adjoint) : nothing
        numbers = AdjointNumbers(p.own, p.shared, work, Forward(forward, cache))
        # Rows in the order in which the solution reaches them. Python gives a row that was not
        # reached the start as its time, and cotangents of zero.
        rows = column(times, i)
        order = failed ? Int[] : sortperm(rows; by = t -> abs(t - span[1]))
        jumps = Jumps(Vector{T}(rows[order]), cotangents[:, order, i], length(order))
        from = isempty(order) ? span[1] : jumps.times[end]
        z = jumped(held(zeros(T, total), static_adjoint), jumps, from)
        callback = DiscreteCallback(jumps, jumps; save_positions = (false, false))
        return ODEProblem(
            adjoint_function, z, (from, span[1]), numbers;
            callback, stops_back(steps, jumps.times[1:jumps.next], from, span[1])..., tolerances...,
            step_back(steps)...,
        )
    end
    function keep(sol, i)
        z = Vector{T}(sol.u[end])
        return code(sol.retcode) == SUCCESS ? z : fill!(z, NaN)
    end
    columns = solve_each(
        problem, keep, method, place, n;
        save_everystep = false, save_start = false, dense = false, shared_options...,
    )
    foreach(i -> gradient[:, i] = columns[i], 1:n)
    return nothing
end

# Tolerances by component of the state don't fit the adjoint state: the smallest one is used.
scalar_tolerances(steps) =
    (; (k => minimum(steps[k]) for k in (:abstol, :reltol) if haskey(steps, k))...)

"""
The times that the backward solve steps onto between `from` and `to`: the times of the cotangents,
and the forward solve's known times. The field after a discontinuity holds from the next number on,
so the backward solve steps onto that number, the last before the field changes back.
"""
function stops_back(steps, times, from, to)
    backwards(t) = min(to, from) < t < max(to, from)
    tstops = filter(backwards, [times; get(steps, :tstops, [])])
    after = to < from ? nextfloat : prevfloat
    jumps = filter(backwards, map(after, get(steps, :d_discontinuities, empty(tstops))))
    return (; tstops = unique(tstops), d_discontinuities = jumps)
end

# A given step is as long in the backward solve, with the opposite sign.
step_back(steps) = haskey(steps, :dt) ? (; dt = -steps.dt) : (;)
