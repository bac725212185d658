# Saved times at the start, at the end, in between, repeated, and none.
const ROWS = (
    [1.0], [0.0], [0.0, 1.0], [0.3, 0.8], [0.0, 0.25, 0.5, 1.0], [0.0, 0.0, 0.5, 0.5, 1.0, 1.0],
    [0.0, 0.0], Float64[],
)
@testset "$how" for (how, field, adjoint) in ADJOINTS
    for rows in ROWS
        c = cotangents_of(rows)
        @test gradients(field, adjoint, rows, c) ≈ by_closed_form(rows, c) rtol = 1e-6
    end
    # Rows that differ by trajectory; a row that was not reached has the start as its time.
    rows, c = [0.1 0.2 0.3 0.4 0.5; 0.6 0.6 0.9 1.0 0.0; 1.0 0.0 1.0 0.0 0.0], ones(2, 3, N)
    c[:, 2:3, 5] .= 0
    c[:, 3, [2, 4]] .= 0
    @test gradients(field, adjoint, rows, c) ≈ by_closed_form(rows, c) rtol = 1e-6
    # Backwards in time, from another start, and by fixed steps.
    rows = [0.5, 0.25, -1.0]
    c = cotangents_of(rows)
    want = by_closed_form(rows, c; t0 = i -> 0.5)
    @test gradients(field, adjoint, rows, c; t0 = 0.5, t1 = -1) ≈ want rtol = 1e-6
    fixed = (; adaptive = false, dt = 0.01)
    @test gradients(field, adjoint, rows, c; t0 = 0.5, t1 = -1, fixed...) ≈ want rtol = 1e-6
    # Over an empty span, and from starts that differ by trajectory.
    c = cotangents_of([0.0])
    for options in ((;), fixed)
        @test gradients(field, adjoint, [0.0], c; t1 = 0, options...) == [c[:, 1, :]; zeros(2, N)]
    end
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
    # Some methods compute the stages of their interpolation only on demand.
    for (_, field, adjoint) in ADJOINTS[1:2]
        @test gradients(field, adjoint, rows, c; method = "Vern7") ≈ want rtol = 1e-6
    end
    stiff = (
        described(; f = LINEAR, LINEAR_DERIVATIVES...),
        described(; f = LINEAR_ADJOINT, LINEAR_ADJOINT_DERIVATIVES...),
    )
    @test gradients(stiff..., rows, c; method = "Rodas5P") ≈ want rtol = 1e-6
    # The smallest of the tolerances by component is used.
    abstol = [1e-9, 1e-2]
    @test gradients(field, adjoint, rows, c; abstol) ≈ want rtol = 1e-6
    reltol = reshape(10.0 .^ -(5:9), 1, N)
    errors = abs.(gradients(field, adjoint, rows, c; abstol = reltol, reltol) .- want)
    @test all(errors .<= 20 .* reltol .* maximum(abs, want))
end

@testset "where it fails" begin
    rows = [0.0, 1.0]
    c = cotangents_of(rows)
    want = by_closed_form(rows, c)
    _, field, adjoint = first(ADJOINTS)
    # In the forward solve: the gradient is zero, and the other trajectories' are as before.
    u0 = copy(NUMBERS.u0)
    u0[1, 2] = NaN
    got = gradients(field, adjoint, rows, c; u0)
    @test all(iszero, got[:, 2]) && got[:, [1, 3, 4, 5]] ≈ want[:, [1, 3, 4, 5]]
    @test all(iszero, gradients(field, adjoint, rows, c; maxiters = 2))
    # In the backward solve: the gradient is NaN.
    bad = replace(LINEAR_ADJOINT, "x1 =" => "x1 = Primitives.sqrt(p.own[1] + 0.8) *")
    got = gradients(field, described(; f = bad), rows, c)
    @test all(isnan, got[:, 1]) && all(isfinite, got[:, 2:5])
end
