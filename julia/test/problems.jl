# Fields as Python prints them, and the solutions of the linear one.

const LORENZ = """
function NAME(u, p, t)
    x1 = u[1] * (p.own[1] - u[3])
    return SVector{3, Float64}(p.shared[1] * (u[2] - u[1]), x1 - u[2], (u[1] * u[2]) - (p.shared[2] * u[3]))
end
"""

# u' = own * shared * (u - t): with a solution to compare with, time-dependent, and with parameters
# of both kinds.
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

"""The solution at `t` of what starts with `u0` at `t0`, with `k = own * shared`."""
exact(k, u0, t0, t) = t + 1 / k .+ (u0 .- t0 .- 1 / k) .* exp(k * (t - t0))

const N = 5
const OWN = reshape(collect(range(-1.0, 0.6, N)), 1, N)
const NUMBERS = (; u0 = [1.0 + 0.1j + i for i in 1:2, j in 1:N], own = OWN, shared = [0.5])
rate(i) = 0.5 * OWN[i]
exact(i, t; t0 = 0.0) = exact(rate(i), NUMBERS.u0[:, i], t0, t)

"""Whether the rows of each trajectory are at these times, and NaN after them."""
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
    tgrad = "NAME(u, p, t) = SVector{2, Float64}(-(p.own[1] * p.shared[1]), -(p.own[1] * p.shared[1]))",
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
