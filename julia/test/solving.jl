const FIELDS = (("out of place", linear()), ("in place", linear_in_place()))

@testset "what is saved, $how" for (how, field) in FIELDS
    @test right(solved(field, N; NUMBERS...), i -> [1.0])
    @test right(solved(field, N; start = true, NUMBERS...), i -> [0.0, 1.0])
    for times in ([0.5], [0.0, 0.3, 1.0], [0.25, 0.25, 0.75], [0.0, 0.0, 1.0, 1.0], [0.0], zeros(0))
        out = solved(field, N; mode = "times", times, NUMBERS...)
        @test right(out, i -> times)
    end
    # Times that differ by trajectory; those after the first `counts` repeat the last.
    counts = [3, 1, 2, 3, 1]
    times = hcat(([0.1i, 0.5, 1.0][min.(1:3, counts[i])] for i in 1:N)...)
    out = solved(field, N; mode = "times", times, counts, NUMBERS...)
    @test right(out, i -> times[1:counts[i], i])
    # Shared times, of which one is also the start of some trajectories.
    t0 = [0.0, 0.25, -0.5, 0.25, 0.0]
    out = solved(field, N; mode = "times", times = [0.25, 0.5], t0, NUMBERS...)
    @test right(out, i -> [0.25, 0.5]; t0 = i -> t0[i])

    out = solved(field, N; mode = "steps", start = true, rows = 40, NUMBERS...)
    for i in 1:N
        steps = out.t[1:out.lengths[i], i]
        @test first(steps) == 0 && last(steps) == 1 && issorted(steps) && allunique(steps)
        @test out.lengths[i] == out.naccept[i] + 1
        @test all(isnan, out.t[(out.lengths[i]+1):end, i])
    end
    @test right(out, i -> out.t[1:out.lengths[i], i])
    later = solved(field, N; mode = "steps", rows = 40, NUMBERS...)
    @test later.lengths == out.lengths .- 1
    @test isequal(later.u[:, 1:39, :], out.u[:, 2:40, :])
    # Where there is room for fewer steps, the first steps are kept.
    few = solved(field, N; mode = "steps", start = true, rows = 3, NUMBERS...)
    @test all(==(3), few.lengths) && few.u == out.u[:, 1:3, :]
end

@testset "spans, tolerances and steps, $how" for (how, field) in FIELDS
    t0, t1 = [0.0, -1.0, 0.5, 0.0, 0.25], [1.0, 0.5, 2.0, 0.75, 1.0]
    out = solved(field, N; start = true, t0, t1, NUMBERS...)
    @test right(out, i -> [t0[i], t1[i]]; t0 = i -> t0[i])
    # Backwards in time, for all trajectories and for some.
    out = solved(field, N; mode = "times", times = [0.5, 0.0, -1.0], t0 = 0.5, t1 = -1, NUMBERS...)
    @test right(out, i -> [0.5, 0.0, -1.0]; t0 = i -> 0.5)
    t1 = [1.0, -1.0, 0.5, -0.5, 1.0]
    out = solved(field, N; t1, NUMBERS...)
    @test right(out, i -> [t1[i]])
    out = solved(field, N; mode = "steps", start = true, t1 = -1, NUMBERS...)
    @test right(out, i -> out.t[1:out.lengths[i], i])

    # Over an empty span, for all trajectories and for some.
    for options in ((;), (; adaptive = false, dt = 0.01)), t1 in (0.0, [1.0, 0.0, 1.0, 0.0, 1.0])
        out = solved(field, N; start = true, t1, options..., NUMBERS...)
        @test right(out, i -> [0.0, t1[min(i, end)]])
    end

    # Tolerances differ by trajectory, and tighter tolerances take more steps.
    reltol = reshape([1e-3, 1e-5, 1e-7, 1e-9, 1e-11], 1, N)
    numbers = (; NUMBERS..., own = fill(-1.0, 1, N), u0 = [2.0, 3.0])
    out = solved(field, N; abstol = reltol, reltol, t1 = 10, numbers...)
    @test issorted(out.naccept) && allunique(out.naccept)
    tolerances = (; abstol = 1e-7, reltol = 1e-7)
    one = solved(field, 1; tolerances..., t1 = 10, numbers..., own = [-1.0;;])
    @test one.u[:, 1, 1] == out.u[:, 1, 3] && one.naccept[1] == out.naccept[3]
    for abstol in ([1e-9, 1e-3], repeat([1e-9, 1e-3], 1, N))
        @test right(solved(field, N; abstol, NUMBERS...), i -> [1.0]; rtol = 1e-4)
    end

    # Fixed steps of 1, 1/2, 1/3, ..., also backwards in time.
    dt = 1 ./ (1:N)
    for t1 in (1.0, -1.0)
        out = solved(field, N; adaptive = false, dt, t1, NUMBERS...)
        @test out.naccept == 1:N && all(==(SUCCESS), out.codes)
        @test all(==(6), diff(out.nf))
        out = solved(field, N; adaptive = false, dt = 0.01, t1, NUMBERS...)
        @test all(==(100), out.naccept) && right(out, i -> [t1])
    end
    t1 = [1.0, -1.0, 1.0, -1.0, 1.0]
    out = solved(field, N; adaptive = false, dt = 0.01, t1, NUMBERS...)
    @test all(==(100), out.naccept) && right(out, i -> [t1[i]])
end

@testset "single precision" begin
    out = solved(linear(Float32), N; T = Float32, mode = "times", times = [0.1, 0.7, 1.0],
                 abstol = 1e-6, reltol = 1e-6, NUMBERS...)
    @test out.u isa Array{Float32}
    @test right(out, i -> [0.1, 0.7, 1.0]; rtol = 1e-5)
end

@testset "by $method" for method in ("DP5", "Vern7", "Rodas5P")
    stiff = method == "Rodas5P"
    options = (; method, mode = "times", times = [0.0, 0.4, 0.9], NUMBERS...)
    field = stiff ? described(; f = LINEAR, LINEAR_DERIVATIVES...) : linear()
    @test right(solved(field, N; options...), i -> [0.0, 0.4, 0.9])
    derivatives = stiff ? LINEAR_DERIVATIVES_IN_PLACE : (;)
    field = described(; in_place = true, f = LINEAR_IN_PLACE, derivatives...)
    @test right(solved(field, N; options...), i -> [0.0, 0.4, 0.9])
end

# Robertson's problem, which is stiff.
const ROBERTSON = "SVector{3, Float64}(-(0.04 * u[1]) + (1.0e4 * u[2] * u[3]),
    (0.04 * u[1]) - (1.0e4 * u[2] * u[3]) - (p.own[1] * u[2] * u[2]), p.own[1] * u[2] * u[2])"
const ROBERTSON_JACOBIAN = "SMatrix{3, 3, Float64}(-0.04, 0.04, 0.0, 1.0e4 * u[3],
    -(1.0e4 * u[3]) - (2.0 * p.own[1] * u[2]), 2.0 * p.own[1] * u[2], 1.0e4 * u[2],
    -(1.0e4 * u[2]), 0.0)"
const NO_TGRAD = "SVector{3, Float64}(0.0, 0.0, 0.0)"
returning(x) = "NAME(u, p, t) = $x"
storing(x) = "NAME(out, u, p, t) = (copyto!(out, $x); nothing)"
robertson(form; in_place = form === storing) = described(;
    in_place, f = form(ROBERTSON), jac = form(ROBERTSON_JACOBIAN), tgrad = form(NO_TGRAD)
)

@testset "stiff: $method" for method in ("Rosenbrock23", "KenCarp4")
    # The solution by Rodas5P with tolerances of 1e-13.
    reference = [0.617234928, 0.000006153591, 0.382758918]
    results = map((returning, storing)) do form
        out = solved(robertson(form), 2; method, u0 = [1.0, 0.0, 0.0], own = [3e7 3e7], t1 = 100,
                     abstol = [1e-8, 1e-12, 1e-8], reltol = 1e-6)
        @test all(==(SUCCESS), out.codes)
        @test out.u[:, 1, 1] == out.u[:, 1, 2]
        @test sum(out.u[:, 1, 1]) ≈ 1
        @test out.u[:, 1, 1] ≈ reference rtol = 1e-4
        return out
    end
    @test results[1].u ≈ results[2].u rtol = 1e-5
end

@testset "step-size controllers" begin
    function steps(controller)
        numbers = merge(read_by_solve(Float64, N; NUMBERS..., t1 = 5),
                        written_by_solve(Float64, N, 2, 1, "ends"))
        answer = ask("solve", numbers; field = linear(), controller, mode = "ends", start = false,
                     maxiters = 10_000, trajectories = N, method = named("Tsit5"),
                     place = Dict("name" => "EnsembleSerial"))
        @test isempty(answer)
        return numbers["naccept"], numbers["nreject"]
    end
    described_controller(name, arguments; options...) = Dict(
        "name" => name, "arguments" => arguments,
        "options" => Dict(string(k) => v for (k, v) in pairs(options)),
    )
    constants = (; gamma = 0.9, qmin = 0.2, qmax = 10.0, qmax_first_step = 1e4, qsteady_min = 1.0,
                 qsteady_max = 1.0)
    pi(more) =
        described_controller("PIController", [0.14, 0.08]; constants..., qoldinit = 1e-4, more...)
    @test steps(pi((;))) == steps(nothing)
    @test all(steps(pi((; gamma = 0.5)))[1] .> steps(nothing)[1])
    @test steps(described_controller("IController", []; constants...)) != steps(nothing)
    pid = described_controller("PIDController", [0.7, -0.4, 0.0]; accept_safety = 0.81)
    @test steps(pid) != steps(nothing)
end
