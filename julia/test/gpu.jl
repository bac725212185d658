# Tests of the kernels for GPUs, which run on the CPU here.
using Base.CoreLogging: NullLogger, with_logger

is_there(package) = Base.identify_package(package) !== nothing
const THERE = is_there("DiffEqGPU") && is_there("KernelAbstractions")
"""A solve without the warning that it runs on the CPU."""
quietly(args...; more...) = with_logger(() -> solved(args...; more...), NullLogger())

THERE || @info "DiffEqGPU and KernelAbstractions are not there: EnsembleGPU* is not tested."

THERE && @testset "$place" for place in ("EnsembleGPUKernel", "EnsembleGPUArray")
    for (adaptive, dt) in ((true, 0.1), (false, 0.01))
        options = (; place, adaptive, dt, NUMBERS...)
        @test right(quietly(linear(), N; options...), i -> [1.0]; rtol = 1e-6)
        @test right(quietly(linear(), N; start = true, options...), i -> [0.0, 1.0]; rtol = 1e-6)
        for times in ([0.25, 0.5, 1.0], [0.0, 0.3, 0.7], [0.0, 0.0, 0.5, 0.5])
            out = quietly(linear(), N; mode = "times", times, options...)
            @test right(out, i -> times; rtol = 1e-5)
        end
        # A single trajectory does not run in a kernel.
        out = quietly(linear(), 1; options..., u0 = NUMBERS.u0[:, 1:1], own = OWN[:, 1:1])
        @test out.u[:, 1, 1] ≈ exact(1, 1.0) rtol = 1e-6
    end
    # Spans that differ by trajectory, and spans backwards in time.
    t0, t1 = [0.0, -1.0, 0.5, 0.0, 0.25], [1.0, 0.5, 2.0, 0.75, 1.0]
    own_spans() = quietly(linear(), N; place, t0, t1, dt = 0.1, NUMBERS...)
    backwards() = quietly(linear(), N; place, t1 = -1, dt = 0.1, NUMBERS...)
    if place == "EnsembleGPUKernel"
        @test right(own_spans(), i -> [t1[i]]; t0 = i -> t0[i], rtol = 1e-6)
        @test_throws "forwards in time only" backwards()
    else
        @test_throws "over one tspan" own_spans()
        @test right(backwards(), i -> [-1.0]; rtol = 1e-6)
    end
    single = (; T = Float32, abstol = 1e-6, reltol = 1e-6, dt = 0.1)
    times = [0.1, 0.7, 1.0]
    out = quietly(linear(Float32), N; place, mode = "times", times, single..., NUMBERS...)
    @test right(out, i -> times; rtol = 1e-4)
    # Many shared parameters.
    field = described(; f = replace(LINEAR, "p.shared[1]" => "p.shared[100]"))
    out = quietly(field, N; place, dt = 0.1, NUMBERS..., shared = [zeros(99); 0.5])
    @test right(out, i -> [1.0]; rtol = 1e-6)
end

THERE && @testset "a trajectory that fails" begin
    options = (; place = "EnsembleGPUKernel", dt = 0.01, adaptive = false, NUMBERS...)
    field = described(; f = replace(LINEAR, "k = " => "k = Primitives.sqrt(p.own[2] - t) * "))
    own = [OWN; 9.0 0.6 9.0 9.0 9.0]  # the square root ends at 0.6 in the second
    for saved in ((; start = true), (; mode = "times", times = [0.5, 0.8]))
        both = map((own, [OWN; fill(9.0, 1, N)])) do own
            quietly(field, N; options..., saved..., own)
        end
        @test both[1].codes[2] in (UNSTABLE, FAILURE) && both[1].lengths[2] == 1
        @test all(isnan, both[1].u[:, 2, 2])
        others = [1, 3, 4, 5]
        @test both[1].u[:, :, others] == both[2].u[:, :, others]
        @test all(==(SUCCESS), both[2].codes) && both[1].codes[others] == both[2].codes[others]
    end
end

THERE && @testset "a method that DiffEqGPU has not" begin
    options = (; place = "EnsembleGPUKernel", method = "DP5", dt = 0.1, NUMBERS...)
    @test_throws r"EnsembleGPUKernel has no DP5; it has .*Tsit5" solved(linear(), N; options...)
end
