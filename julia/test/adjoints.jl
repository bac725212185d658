# Of u' = own * shared * (u - t): the derivatives of u(t) = t + 1/k + (u0 - t0 - 1/k) e^(k (t - t0))
# with respect to u0 and to both parameters, k = own * shared.
const LINEAR_ADJOINT = """
function NAME(z, p, t)
    u = p.forward(t)
    k = p.own[1] * p.shared[1]
    x1 = (z[1] * (u[1] - t)) + (z[2] * (u[2] - t))
    return SVector{4, Float64}(-(k * z[1]), -(k * z[2]), -(p.shared[1] * x1), -(p.own[1] * x1))
end
"""
# Its time derivative: also of the forward solution, that goes on at k (u - t).
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
"""The same in place: with its result, and with a number in scratch memory."""
in_place(source) = replace(
    source, "NAME(z, p, t)\n" => "NAME(out, z, p, t)\n    (work1,) = p.work.f\n",
    r"x1 = (.*)\n" => s"work1[1] = \1\n    x1 = work1[1]\n",
    r"return (SVector\{\d, Float64\}\(.*\))\n" => s"copyto!(out, \1)\n    return nothing\n",
)

"""The gradients `[state + parameters, trajectory]`, and those by the closed form."""
function gradients(field, adjoint, rows, cotangents; n = N, method = "Tsit5", place = "EnsembleSerial",
                   workers = nothing, threads = nothing, t0 = 0, t1 = 1, maxiters = 100_000,
                   adaptive = nothing, numbers...)
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
# At the start, at the end, inside, several times the same, and none.
const ROWS = (
    [1.0], [0.0], [0.0, 1.0], [0.3, 0.8], [0.0, 0.25, 0.5, 1.0], [0.0, 0.0, 0.5, 0.5, 1.0, 1.0],
    [0.0, 0.0], Float64[],
)
const WORK = ((Float64, 1),)
const ADJOINTS = (
    ("static", linear(), described(; f = LINEAR_ADJOINT)),
    ("in place", linear_in_place(),
     described(; in_place = true, f = definition(in_place(LINEAR_ADJOINT); work = WORK))),
    ("in place of a static one", linear(),
     described(; in_place = true, f = definition(in_place(LINEAR_ADJOINT); work = WORK))),
    ("static of one in place", linear_in_place(), described(; f = LINEAR_ADJOINT)),
)

@testset "$how" for (how, field, adjoint) in ADJOINTS
    for rows in ROWS
        c = cotangents_of(rows)
        @test gradients(field, adjoint, rows, c) ≈ by_closed_form(rows, c) rtol = 1e-6
    end
    # Rows of each trajectory; those that were not reached are said to be at the start.
    rows, c = [0.1 0.2 0.3 0.4 0.5; 0.6 0.6 0.9 1.0 0.0; 1.0 0.0 1.0 0.0 0.0], ones(2, 3, N)
    c[:, 2:3, 5] .= 0
    c[:, 3, [2, 4]] .= 0
    @test gradients(field, adjoint, rows, c) ≈ by_closed_form(rows, c) rtol = 1e-6
    # Backwards, from other times, and by fixed steps.
    rows = [0.5, 0.25, -1.0]
    c = cotangents_of(rows)
    want = by_closed_form(rows, c; t0 = i -> 0.5)
    @test gradients(field, adjoint, rows, c; t0 = 0.5, t1 = -1) ≈ want rtol = 1e-6
    fixed = (; adaptive = false, dt = 0.01)
    @test gradients(field, adjoint, rows, c; t0 = 0.5, t1 = -1, fixed...) ≈ want rtol = 1e-6
    t0 = [0.0, 0.1, 0.2, 0.3, 0.4]
    rows = [t0'; fill(0.7, 1, N); fill(1.0, 1, N)]
    want = by_closed_form(rows, cotangents_of(rows); t0 = i -> t0[i])
    @test gradients(field, adjoint, rows, cotangents_of(rows); t0) ≈ want rtol = 1e-6
end

@testset "methods and tolerances" begin
    rows = [0.0, 0.3, 1.0]
    c = cotangents_of(rows)
    want = by_closed_form(rows, c)
    _, field, adjoint = first(ADJOINTS)
    # Some methods interpolate with stages that they compute when they are asked for.
    for (_, field, adjoint) in ADJOINTS[1:2]
        @test gradients(field, adjoint, rows, c; method = "Vern7") ≈ want rtol = 1e-6
    end
    stiff = (
        described(; f = LINEAR, LINEAR_DERIVATIVES...),
        described(; f = LINEAR_ADJOINT, LINEAR_ADJOINT_DERIVATIVES...),
    )
    for method in ("Rodas5P", "KenCarp4")
        @test gradients(stiff..., rows, c; method, abstol = 1e-8, reltol = 1e-8) ≈ want rtol = 1e-5
    end
    # Of tolerances by component the smallest holds.
    abstol = [1e-9, 1e-2]
    @test gradients(field, adjoint, rows, c; abstol) ≈ want rtol = 1e-6
    reltol = reshape(10.0 .^ -(5:9), 1, N)
    errors = abs.(gradients(field, adjoint, rows, c; abstol = reltol, reltol) .- want)
    @test all(errors .<= 20 .* reltol .* maximum(abs, want))
end

@testset "wherever they run" begin
    rows = [0.0, 0.5, 1.0]
    c = cotangents_of(rows)
    for (_, field, adjoint) in ADJOINTS[1:2]
        serial = gradients(field, adjoint, rows, c)
        @test gradients(field, adjoint, rows, c; place = "EnsembleThreads") == serial
        @test gradients(field, adjoint, rows, c; place = "EnsembleDistributed", workers = 2) == serial
    end
    ask("stop_workers")
end

@testset "where it fails" begin
    rows = [0.0, 1.0]
    c = cotangents_of(rows)
    want = by_closed_form(rows, c)
    _, field, adjoint = first(ADJOINTS)
    # Forwards: zero, and the others as they were.
    u0 = copy(NUMBERS.u0)
    u0[1, 2] = NaN
    got = gradients(field, adjoint, rows, c; u0)
    @test all(iszero, got[:, 2]) && got[:, [1, 3, 4, 5]] ≈ want[:, [1, 3, 4, 5]]
    @test all(iszero, gradients(field, adjoint, rows, c; maxiters = 2))
    # Backwards: NaN.
    bad = described(; f = replace(LINEAR_ADJOINT, "x1 =" => "x1 = Primitives.sqrt(p.own[1] + 0.8) *"))
    got = gradients(field, bad, rows, c)
    @test all(isnan, got[:, 1]) && all(isfinite, got[:, 2:5])
end
