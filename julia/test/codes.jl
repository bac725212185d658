using EnsembleODE: keep!

# u' = p u^2: with p = 1 and u(0) = 1 the solution goes to infinity at t = 1.
squared() = described(; f = "NAME(u, p, t) = SVector{1, Float64}(p.own[1] * u[1] * u[1])")
const THREE = (; u0 = [1.0], own = [0.5 1.0 -1.0], t1 = 1.5)

@testset "a solution that blows up, $place" for place in ("EnsembleSerial", "EnsembleThreads")
    for options in ((; start = true), (; mode = "times", times = [0.5, 1.0, 1.5]),
                    (; mode = "steps", start = true))
        out = solved(squared(), 3; place, options..., THREE...)
        @test out.codes[2] in (UNSTABLE, DT_LESS_THAN_MIN)
        @test out.codes[[1, 3]] == [SUCCESS, SUCCESS]
        for i in 1:3
            @test all(isfinite, out.u[:, 1:out.lengths[i], i])
            @test all(isnan, out.u[:, (out.lengths[i]+1):end, i])
            alone = solved(squared(), 1; options..., THREE..., own = THREE.own[:, i:i])
            @test all(isequal(getproperty(alone, k), selectdim(x, ndims(x), i:i))
                      for (k, x) in pairs(out))
        end
    end
    out = solved(squared(), 3; place, mode = "times", times = [0.5, 1.0, 1.5], THREE...)
    @test out.lengths == [3, 1, 3] || out.lengths == [3, 2, 3]
    @test out.u[1, 1, 2] ≈ 2
    # With both ends saved, the trajectory that fails has only its start.
    out = solved(squared(), 3; place, start = true, THREE...)
    @test out.lengths == [2, 1, 2] && out.u[1, 1, 2] == 1
    @test solved(squared(), 3; place, THREE...).lengths == [1, 0, 1]
end

@testset "too many steps" begin
    options = (; mode = "times", times = [0.0, 0.01, 40.0], maxiters = 20)
    out = solved(described(; f = LORENZ), 2; u0 = [1.0, 0, 0], own = [20.0 28.0],
                 shared = [10.0, 8 / 3], t1 = 40, options...)
    @test all(==(MAX_ITERS), out.codes) && all(==(2), out.lengths)
    @test all(out.naccept .+ out.nreject .<= 21)
    @test all(isfinite, out.u[:, 1:2, :]) && all(isnan, out.u[:, 3, :])
end

@testset "NaN in one trajectory" begin
    f = "SVector{2, Float64}(p.own[1] * u[1], Primitives.sqrt(p.own[2] - t))"
    field = described(; f = "NAME(u, p, t) = $f")
    own = [1.0 1.0 1.0; 2.0 0.5 2.0]  # the square root ends at 0.5 in the second
    for options in ((; mode = "times", times = [0.25, 0.75, 1.0]), (; mode = "steps"))
        both = [solved(field, n; u0 = [1.0, 0.0], own = own[:, which], options...)
                for (n, which) in ((3, [1, 2, 3]), (2, [1, 3]))]
        @test both[1].codes[2] in (UNSTABLE, DT_LESS_THAN_MIN)
        @test all(isfinite, both[1].u[:, 1:both[1].lengths[2], 2])
        @test all(isnan, both[1].u[:, (both[1].lengths[2]+1):end, 2])
        @test isequal(both[1].u[:, :, [1, 3]], both[2].u)
        @test both[1].codes[[1, 3]] == both[2].codes == [SUCCESS, SUCCESS]
    end
    # With a NaN among the parameters the start is kept; with a NaN in the start nothing is.
    out = solved(field, 3; u0 = [1.0, 0.0], own = [1.0 NaN 1.0; 2.0 2.0 2.0], start = true)
    @test out.lengths == [2, 1, 2] && out.codes == [SUCCESS, UNSTABLE, SUCCESS]
    u0 = [1.0 NaN 1.0; 0.0 0.0 0.0]
    out = solved(field, 3; u0, own = [1.0 1.0 1.0; 2.0 2.0 2.0], start = true)
    @test out.lengths == [2, 0, 2] && out.codes[[1, 3]] == [SUCCESS, SUCCESS]
end

@testset "what is kept of a solution" begin
    prob = (; p = (; happened = nothing))
    solution(u...; retcode = ReturnCode.Success, t = float.(eachindex(u))) =
        (; t = collect(t), u = collect(SVector.(u)), retcode, stats = nothing, prob)
    function kept(sol, mode; rows = 4, first = true, times = nothing, counts = nothing)
        u, t = fill(77.0, 1, rows), mode === :steps ? fill(77.0, rows) : nothing
        length, code = keep!(u, t, mode, first, (; times, counts), sol, 1)
        @test length isa Int32 && code isa Int32 && all(isnan, u[(length+1):end])
        @test t === nothing || isequal(isnan.(t), isnan.(vec(u)))
        return u[1:length], code
    end
    @test kept(solution(5.0, 6.0, 7.0), :steps) == ([5, 6, 7], SUCCESS)
    @test kept(solution(5.0, Inf, 7.0), :steps) == ([5], UNSTABLE)
    @test kept(solution(5.0, 6.0, NaN), :steps) == ([5, 6], UNSTABLE)
    @test kept(solution(5.0, NaN; retcode = ReturnCode.MaxIters), :steps) == ([5], MAX_ITERS)
    @test kept(solution(NaN, 1.0), :ends) == ([], UNSTABLE)
    @test kept(solution(1.0, Inf), :ends) == ([1], UNSTABLE)
    @test kept(solution(1.0, 2.0), :ends; first = false) == ([2], SUCCESS)
    # A failed solution also has the state at which it ended.
    failed = solution(1.0, 2.0, 3.0; retcode = ReturnCode.DtLessThanMin)
    @test kept(failed, :times; times = [1.0, 2.0, 4.0]) == ([1, 2], DT_LESS_THAN_MIN)
    @test kept(failed, :times; times = [1.0, 1.0, 3.0, 3.0]) == ([1, 1, 3, 3], DT_LESS_THAN_MIN)
    @test kept(failed, :times; times = [1.0, 2.0, 4.0], counts = [1]) == ([1], DT_LESS_THAN_MIN)
    # A solution that lacks a requested time counts as failed.
    @test kept(solution(1.0, 2.0), :times; times = [1.0, 1.5, 2.0]) == ([1], FAILURE)
    for (retcode, number) in (
        (ReturnCode.Terminated, 6), (ReturnCode.DtNaN, UNSTABLE),
        (ReturnCode.Unstable, UNSTABLE), (ReturnCode.ConvergenceFailure, FAILURE),
        (ReturnCode.Failure, FAILURE),
    )
        @test EnsembleODE.code(retcode) == number
    end
end

@testset "counts that are too large" begin
    stats = (; naccept = 5, nreject = 0, nf = 2^40, njacs = 0, nw = 0, nsolve = 0)
    found = EnsembleODE.counts((; stats))
    @test (found.naccept, found.nf) === (Int32(5), typemax(Int32))
    @test EnsembleODE.counts((; stats = nothing)).nf === Int32(0)
end
