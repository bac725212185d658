# Fields as Python prints them, and the closed-form solutions of the linear field.

const LORENZ = """
function NAME(u, p, t)
    x1 = u[1] * (p.own[1] - u[3])
    x2 = p.shared[2] * u[3]
    return SVector{3, Float64}(p.shared[1] * (u[2] - u[1]), x1 - u[2], (u[1] * u[2]) - x2)
end
"""

# u' = own * shared * (u - t): a time-dependent field with parameters of both kinds, whose solution
# is known in closed form.
const LINEAR = """
function NAME(u, p, t)
    k = p.own[1] * p.shared[1]
    return SVector{2, Float64}(k * (u[1] - t), k * (u[2] - t))
end
"""
const LINEAR_IN_PLACE = """
function NAME(out, u, p, t)
    k = p.own[1] * p.shared[1]
    for i in 1:2
        out[i] = k * (u[i] - t)
    end
    return nothing
end
"""
linear(T = Float64) = described(; f = replace(LINEAR, "Float64" => T))
linear_in_place() = described(; in_place = true, f = LINEAR_IN_PLACE)

"""The solution at `t` that starts with `u0` at `t0`; `k = own * shared`."""
exact(k, u0, t0, t) = t + 1 / k .+ (u0 .- t0 .- 1 / k) .* exp(k * (t - t0))

const N = 5
const OWN = reshape(collect(range(-1.0, 0.6, N)), 1, N)
const NUMBERS = (; u0 = [1.0 + 0.1j + i for i in 1:2, j in 1:N], own = OWN, shared = [0.5])
rate(i) = 0.5 * OWN[i]
exact(i, t; t0 = 0.0) = exact(rate(i), NUMBERS.u0[:, i], t0, t)

"""Whether each trajectory's rows are the exact solution at `times(i)`, and NaN after these rows."""
function right(out, times; t0 = i -> 0.0, rtol = 1e-7)
    return all(1:N) do i
        at = times(i)
        reached = out.lengths[i] == length(at) && out.codes[i] == SUCCESS
        rows = all(k -> isapprox(out.u[:, k, i], exact(i, at[k]; t0 = t0(i)); rtol), eachindex(at))
        return reached && rows && all(isnan, out.u[:, (length(at)+1):end, i])
    end
end

const LINEAR_DERIVATIVES = (
    jac = "NAME(u, p, t) = SMatrix{2, 2, Float64}(p.own[1] * p.shared[1], 0.0, 0.0,
        p.own[1] * p.shared[1])",
    tgrad = "NAME(u, p, t) = SVector{2, Float64}(-(p.own[1] * p.shared[1]),
        -(p.own[1] * p.shared[1]))",
)
const LINEAR_DERIVATIVES_IN_PLACE = (
    jac = """
    function NAME(out, u, p, t)
        out[1] = out[4] = p.own[1] * p.shared[1]
        out[2] = out[3] = 0.0
        return nothing
    end
    """,
    tgrad = "NAME(out, u, p, t) = (out[1] = out[2] = -(p.own[1] * p.shared[1]); nothing)",
)

#
# Gradients
#

# The adjoint of u' = own * shared * (u - t). The gradients in closed form are the derivatives of
# u(t) = t + 1/k + (u0 - t0 - 1/k) e^(k (t - t0)), k = own * shared, with respect to u0 and to both
# parameters.
const LINEAR_ADJOINT = """
function NAME(z, p, t)
    u = p.forward(t)
    k = p.own[1] * p.shared[1]
    x1 = (z[1] * (u[1] - t)) + (z[2] * (u[2] - t))
    return SVector{4, Float64}(-(k * z[1]), -(k * z[2]), -(p.shared[1] * x1), -(p.own[1] * x1))
end
"""
# The time derivative includes that of the forward solution, u' = k (u - t).
const LINEAR_ADJOINT_DERIVATIVES = (
    jac = """
    function NAME(z, p, t)
        u = p.forward(t)
        k, a, b = p.own[1] * p.shared[1], p.shared[1], p.own[1]
        x1, x2 = u[1] - t, u[2] - t
        return SMatrix{4, 4, Float64}(-k, 0.0, -(a * x1), -(b * x1), 0.0, -k, -(a * x2), -(b * x2),
            0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    end
    """,
    tgrad = """
    function NAME(z, p, t)
        u = p.forward(t)
        k = p.own[1] * p.shared[1]
        x1 = (z[1] * (k * (u[1] - t) - 1.0)) + (z[2] * (k * (u[2] - t) - 1.0))
        return SVector{4, Float64}(0.0, 0.0, -(p.shared[1] * x1), -(p.own[1] * x1))
    end
    """,
)
"""The source of an adjoint as an in-place function, with one number in scratch memory."""
in_place(source) = replace(
    source, "NAME(z, p, t)\n" => "NAME(out, z, p, t)\n    (work1,) = p.work.f\n",
    r"x1 = (.*)\n" => s"work1[1] = \1\n    x1 = work1[1]\n",
    r"return (SVector\{\d, Float64\}\(.*\))\n" => s"copyto!(out, \1)\n    return nothing\n",
)

"""The gradients by a continuous adjoint, `[state + parameters, trajectory]`."""
function gradients(
    field, adjoint, rows, cotangents; n = N, method = "Tsit5", place = "EnsembleSerial",
    workers = nothing, threads = nothing, t0 = 0, t1 = 1, maxiters = 100_000, adaptive = nothing,
    numbers...
)
    arrays = read_by_solve(Float64, n; t0, t1, NUMBERS..., numbers...)
    gradient = fill(77.0, 4, n)
    more = Dict("rows" => rows, "cotangents" => cotangents, "gradient" => gradient)
    where = (; name = place, workers, threads)
    answer = ask(
        "adjoint", merge(arrays, more);
        field, adjoint, maxiters, adaptive, trajectories = n, method = named(method),
        place = Dict(string(k) => v for (k, v) in pairs(where) if v !== nothing),
    )
    haskey(answer, "error") && error(answer["error"])
    return gradient
end

function by_closed_form(rows, cotangents; n = N, t0 = i -> 0.0)
    gradient = zeros(4, n)
    for i in 1:n, row in axes(rows, 1)
        own, shared, u0 = OWN[i], NUMBERS.shared[1], NUMBERS.u0[:, i]
        k, s, t = own * shared, t0(i), rows[row, min(i, size(rows, 2))]
        e = exp(k * (t - s))
        dk = @. -1 / k^2 * (1 - e) + (u0 - s - 1 / k) * (t - s) * e
        c = cotangents[:, row, i]
        gradient[:, i] .+= [c .* e; sum(c .* dk) .* [shared, own]]
    end
    return gradient
end

cotangents_of(rows) = [sin(3i + 5r + 7k) for k in 1:2, r in axes(rows, 1), i in 1:N]
const WORK = ((Float64, 1),)
const ADJOINTS = (
    ("static", linear(), described(; f = LINEAR_ADJOINT)),
    ("in place", linear_in_place(),
     described(; in_place = true, f = definition(in_place(LINEAR_ADJOINT); work = WORK))),
    ("in place of a static one", linear(),
     described(; in_place = true, f = definition(in_place(LINEAR_ADJOINT); work = WORK))),
    ("static of one in place", linear_in_place(), described(; f = LINEAR_ADJOINT)),
)
