# A ball that falls from a height of 5 with an acceleration of 10 lands after 1, at a speed of 10.
const FALL = described(; f = "NAME(u, p, t) = SVector{2, Float64}(u[2], -p.own[1])")
const FALL_IN_PLACE = described(;
    in_place = true, f = "NAME(out, u, p, t) = (out[1] = u[2]; out[2] = -p.own[1]; nothing)"
)
const FALLING = (; u0 = [5.0, 0.0], own = [10.0 40.0], t1 = 2.5)

# The height stays as it was found. With a height of exactly zero, which may differ from that by
# more than the callback's `abstol`, SciML would take the condition to have no sign as the next step
# begins, and see no crossing in that step.
bounce(; ends = 0.0) =
    (; which = 3, condition = "(u[1],)", down = "(u[1], -u[2] / 2, $ends)")

for (how, field) in (("static", FALL), ("in place", FALL_IN_PLACE)),
    place in ("EnsembleSerial", "EnsembleThreads")

    @testset "what happens on the way, $how, $place" begin
        run(callbacks; options...) = solved(field, 2; place, callbacks, FALLING..., options...)
        # The ball bounces after 1 and 2, half as high each time, and in half the time where the
        # acceleration is four times as large.
        twice = (; t1 = [2.25, 1.125])
        out = run(described_callbacks(; continuous = [bounce()]); twice...)
        @test out.codes == [SUCCESS, SUCCESS] && out.event_count == [2, 2]
        @test out.event_t[1:2, 1] ≈ [1, 2] && out.event_t[1:2, 2] ≈ [0.5, 1]
        @test all(==(3), out.event_which[1:2, :]) && all(==(-1), out.event_which[3:4, :])
        @test all(==(-1), out.event_crossed[1, 1:2, :])
        @test out.event_before[2, 1:2, 1] ≈ [-10, -5] && out.event_after[2, 1:2, 1] ≈ [5, 2.5]
        @test all(isnan, out.event_t[3:4, :])
        # There is room for one event.
        out = run(described_callbacks(; continuous = [bounce()], room = 1); twice...)
        @test out.codes == [7, 7] && out.event_count == [1, 1] && out.lengths == [0, 0]

        # The affect ends the trajectory (1), or does not converge (2).
        out = run(described_callbacks(; continuous = [bounce(; ends = 1.0)]); start = true)
        @test out.codes == [6, 6] && out.event_count == [1, 1] && out.lengths == [2, 2]
        @test out.u[2, 2, :] ≈ [5, 10]
        out = run(described_callbacks(; continuous = [bounce(; ends = 2.0)]))
        @test out.codes == [8, 8]

        # A callback with two conditions that cross zero at the same time.
        both = (;
            which = 0, length = 2, condition = "(u[1], u[1] + u[2] + 10.0)",
            up = "(u[1], 1.0 - mask[1], 0.0)",
        )
        out = run(described_callbacks(; continuous = [both]); t1 = 1.01)
        @test out.event_t[1, 1] ≈ 1 atol = 1e-9
        @test all(x -> x in (-1, 0), out.event_crossed[:, 1, 1])

        # Two callbacks that cross zero at the same time, of which SciML would lose one.
        other = (; which = 4, condition = "(2 * u[1],)", down = "(u[1], u[2], 0.0)")
        out = run(described_callbacks(; continuous = [bounce(), other]))
        @test out.codes == [5, 5] && out.event_count == [1, 1]

        # A discrete callback at known times, which differ by trajectory.
        at = (; which = 0, condition = "(t == 0.25 || t == p.own[1] / 100 ? 1.0 : 0.0,)",
              affect = "(u[1], u[2] + t - tprev[1], 0.0)")
        tstops = [0.25 0.25; 0.1 0.4; Inf Inf]
        out = run(described_callbacks(; discrete = [at]); tstops)
        @test out.event_t[1:2, :] == [0.1 0.25; 0.25 0.4]
        @test all(==(2), out.event_count) && all(==(1), out.event_crossed[1, 1:2, :])
        @test all(out.event_after[2, 1:2, :] .> out.event_before[2, 1:2, :])

        # A continuous callback acts before discrete ones, which act in their order.
        first = (; which = 1, condition = "(u[1] < 1.0 ? 1.0 : 0.0,)", affect = "(7.0, 0.0, 0.0)")
        second = (; which = 2, condition = "(u[1] == 7.0 ? 1.0 : 0.0,)", affect = "(7.0, 0.0, 1.0)")
        set = described_callbacks(; continuous = [bounce()], discrete = [first, second])
        out = run(set; method = "Vern7")
        @test out.event_which[1:3, :] == [3 3; 1 1; 2 2] && out.codes == [6, 6]
    end
end

@testset "steps that are held to what the last one foretells" begin
    decay = described(; f = "NAME(u, p, t) = SVector{1, Float64}(-100.0 * u[1])")
    held = (; which = 0, condition = "(u[1] < 0.0 ? 1.0 : 0.0,)", affect = "(0.0, 0.0)",
            limit = Dict("scalefactor" => 0.5))
    options = (; u0 = [1.0], t1 = 5, abstol = 1e-2, reltol = 1e-2, mode = "steps")
    out = solved(decay, 1; callbacks = described_callbacks(; discrete = [held]), options...)
    @test out.codes == [SUCCESS] && all(>=(0), out.u[1, 1:out.lengths[1], 1])
    # No state is below zero without the callback either, so that its affect does nothing.
    @test out.naccept[1] > solved(decay, 1; options...).naccept[1]
end

@testset "step-size control looks at the first components" begin
    more = described(; f = "NAME(u, p, t) = SVector{3, Float64}(u[2], -u[1], 1e6 * cos(1e3 * t))")
    alone = described(; f = "NAME(u, p, t) = SVector{2, Float64}(u[2], -u[1])")
    arrays(u0) = merge(read_by_solve(Float64, 1; u0, t1 = 5),
                       written_by_solve(Float64, 1, length(u0), 1, "ends"))
    function steps(field, u0, controlled)
        numbers = arrays(u0)
        answer = ask("solve", numbers; field, controlled, mode = "ends", start = false,
                     maxiters = 10_000, trajectories = 1, method = named("Tsit5"),
                     place = Dict("name" => "EnsembleSerial"))
        @test isempty(answer)
        return numbers["naccept"], numbers["nreject"], numbers["u"][1:2]
    end
    @test steps(more, [1.0, 0.0, 0.0], 2) == steps(alone, [1.0, 0.0], nothing)
    @test steps(more, [1.0, 0.0, 0.0], nothing) != steps(alone, [1.0, 0.0], nothing)
end

@testset "known times" begin
    # The derivative is 1 until t = p, and -1 from then on.
    field = described(; f = "NAME(u, p, t) = SVector{1, Float64}(t <= p.own[1] ? 1.0 : -1.0)")
    own = [0.3 0.6 0.9]
    out = solved(field, 3; u0 = [0.0], own, d_discontinuities = own, mode = "steps", rows = 40)
    @test all(i -> own[i] in out.t[:, i], 1:3)
    # The last stages of a step onto the jump may be evaluated past it, by the rounding of `t + dt`:
    # then that step is rejected once. A jump that is not known is found by rejections.
    @test all(<=(1), out.nreject)
    blind = solved(field, 3; u0 = [0.0], own, mode = "steps", rows = 400)
    @test all(>(10), blind.nreject)
    @test [out.u[1, out.lengths[i], i] for i in 1:3] ≈ 2 .* vec(own) .- 1 atol = 1e-14
    out = solved(field, 3; u0 = [0.0], own, tstops = [0.3, 0.6, 0.9], mode = "steps", rows = 400)
    @test all(i -> issubset(own, out.t[:, i]), 1:3)
end
