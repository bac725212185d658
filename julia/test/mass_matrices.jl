# x' = -p z with 0 = x^2 + z^2 - 1, whose solution is x = sin(a - p t), z = cos(a - p t).
const CIRCLE = described(;
    f = "NAME(u, p, t) = SVector{2, Float64}(-p.own[1] * u[2], u[1]^2 + u[2]^2 - 1.0)",
    jac = "NAME(u, p, t) = SMatrix{2, 2, Float64}(0.0, 2.0 * u[1], -p.own[1], 2.0 * u[2])",
    tgrad = "NAME(u, p, t) = SVector{2, Float64}(0.0, 0.0)",
)
const CIRCLE_IN_PLACE = described(;
    in_place = true,
    f = "NAME(out, u, p, t) = (out[1] = -p.own[1] * u[2]; out[2] = u[1]^2 + u[2]^2 - 1.0; nothing)",
    jac = """
    function NAME(out, u, p, t)
        out[1], out[2], out[3], out[4] = 0.0, 2.0 * u[1], -p.own[1], 2.0 * u[2]
        return nothing
    end
    """,
    tgrad = "NAME(out, u, p, t) = (out[1] = out[2] = 0.0; nothing)",
)
const ANGLES, SPEEDS = [0.9, 0.5, 0.2], [1.3 0.7 0.4]
on_circle(t) = [(sin, cos)[k](ANGLES[i] - SPEEDS[i] * t) for k in 1:2, i in 1:3]
const ON_CIRCLE = (; u0 = on_circle(0), own = SPEEDS, mass = [1.0 0.0; 0.0 0.0])

const CIRCLES = (("static", CIRCLE), ("in place", CIRCLE_IN_PLACE))

@testset "algebraic equations, $how, $method" for (how, field) in CIRCLES,
    method in ("Rosenbrock23", "Rodas4", "Rodas5P")

    loose = method == "Rosenbrock23"
    options = (; method, ON_CIRCLE..., (loose ? (; abstol = 1e-6, reltol = 1e-6) : (;))...)
    for place in ("EnsembleSerial", "EnsembleThreads")
        out = solved(field, 3; place, options...)
        @test out.codes == fill(SUCCESS, 3)
        @test out.u[:, 1, :] ≈ on_circle(1) atol = (loose ? 1e-4 : 1e-7)
        # The start of the second trajectory is not consistent. The others keep their bits.
        u0 = ON_CIRCLE.u0 .+ [0.0 0.0 0.0; 0.0 1e-3 0.0]
        failed = solved(field, 3; place, options..., u0, start = true)
        @test failed.codes == [SUCCESS, 9, SUCCESS] && failed.lengths == [2, 1, 2]
        @test failed.u[:, 1, :] == u0 && all(isnan, failed.u[:, 2, 2])
        @test failed.u[:, 2, [1, 3]] == out.u[:, 1, [1, 3]]
        tolerant = solved(field, 3; place, options..., u0, abstol = 1e-2, reltol = 1e-2)
        @test tolerant.codes == fill(SUCCESS, 3)
    end
end

@testset "after an affect, $how" for (how, field) in CIRCLES
    options = (; method = "Rodas4", ON_CIRCLE..., tstops = [0.5])
    moved(to) = described_callbacks(;
        discrete = [(; which = 0, condition = "(t == 0.5 ? 1.0 : 0.0,)", affect = "($to, 0.0)")]
    )
    out = solved(field, 3; callbacks = moved("0.0, 1.0"), options...)
    @test out.codes == fill(SUCCESS, 3)
    @test out.u[1, 1, :] ≈ sin.(-0.5 .* vec(SPEEDS)) atol = 1e-7
    out = solved(field, 3; callbacks = moved("0.0, 0.5"), options...)
    @test out.codes == fill(9, 3) && out.event_t[1, :] == fill(0.5, 3)
end

@testset "matrices that are not singular" begin
    # M u' = M A u with the eigenvalues -1 and -3 of A.
    mass, a = [2.0 1.0; 0.5 1.5], [-2.0 1.0; 1.0 -2.0]
    entries(m) = join(vec(m), ", ")
    source = "SMatrix{2, 2, Float64}($(entries(mass * a)))"
    field = described(; f = "NAME(u, p, t) = $source * u", jac = "NAME(u, p, t) = $source",
                      tgrad = "NAME(u, p, t) = SVector{2, Float64}(0.0, 0.0)")
    exact = [exp(-1) + exp(-3), exp(-1) - exp(-3)]
    for method in ("Rodas4", "Rodas5P")
        out = solved(field, 1; method, u0 = [2.0, 0.0], mass)
        @test out.u[:, 1, 1] ≈ exact atol = 1e-7
    end
    @test_throws "diagonal" solved(field, 1; method = "Rosenbrock23", u0 = [2.0, 0.0], mass)
end
