# The kernels for GPUs, on the CPU.
const THERE = all(name -> Base.identify_package(name) !== nothing, ("DiffEqGPU", "KernelAbstractions"))
THERE || @info "DiffEqGPU and KernelAbstractions are not there: EnsembleGPU* is not tested."

THERE && @testset "$place" for place in ("EnsembleGPUKernel", "EnsembleGPUArray")
    for (adaptive, dt) in ((true, 0.1), (false, 0.01))
        options = (; place, adaptive, dt, NUMBERS...)
        @test right(solved(linear(), N; options...), i -> [1.0]; rtol = 1e-6)
        @test right(solved(linear(), N; start = true, options...), i -> [0.0, 1.0]; rtol = 1e-6)
        for times in ([0.25, 0.5, 1.0], [0.0, 0.3, 0.7], [0.0, 0.0, 0.5, 0.5])
            out = solved(linear(), N; mode = "times", times, options...)
            @test right(out, i -> times; rtol = 1e-5)
        end
        # One alone runs on the CPU.
        out = solved(linear(), 1; options..., u0 = NUMBERS.u0[:, 1:1], own = OWN[:, 1:1])
        @test out.u[:, 1, 1] ≈ exact(1, 1.0) rtol = 1e-6
    end
    # Spans of their own, and backwards.
    t0, t1 = [0.0, -1.0, 0.5, 0.0, 0.25], [1.0, 0.5, 2.0, 0.75, 1.0]
    own_spans() = solved(linear(), N; place, t0, t1, dt = 0.1, NUMBERS...)
    backwards() = solved(linear(), N; place, t1 = -1, dt = 0.1, NUMBERS...)
    if place == "EnsembleGPUKernel"
        @test right(own_spans(), i -> [t1[i]]; t0 = i -> t0[i], rtol = 1e-6)
        @test_throws "forwards in time only" backwards()
    else
        @test_throws "over one tspan" own_spans()
        @test right(backwards(), i -> [-1.0]; rtol = 1e-6)
    end
    single = (; T = Float32, abstol = 1e-6, reltol = 1e-6, dt = 0.1)
    times = [0.1, 0.7, 1.0]
    out = solved(linear(Float32), N; place, mode = "times", times, single..., NUMBERS...)
    @test right(out, i -> times; rtol = 1e-4)
    # Many parameters that are shared.
    field = described(; f = replace(LINEAR, "p.shared[1]" => "p.shared[100]"))
    out = solved(field, N; place, dt = 0.1, NUMBERS..., shared = [zeros(99); 0.5])
    @test right(out, i -> [1.0]; rtol = 1e-6)
end

THERE && @testset "a trajectory that fails" begin
    options = (; place = "EnsembleGPUKernel", dt = 0.01, adaptive = false, NUMBERS...)
    field = described(; f = replace(LINEAR, "k = " => "k = Primitives.sqrt(p.own[2] - t) * "))
    own = [OWN; 9.0 0.6 9.0 9.0 9.0]  # the square root ends at 0.6 in the second
    for saved in ((; start = true), (; mode = "times", times = [0.5, 0.8]))
        both = [solved(field, N; options..., saved..., own = x) for x in (own, [OWN; fill(9.0, 1, N)])]
        @test both[1].codes[2] in (UNSTABLE, FAILURE) && both[1].lengths[2] == 1
        @test all(isnan, both[1].u[:, 2, 2])
        others = [1, 3, 4, 5]
        @test both[1].u[:, :, others] == both[2].u[:, :, others]
        @test all(==(SUCCESS), both[2].codes) && both[1].codes[others] == both[2].codes[others]
    end
end

THERE && @testset "a method that DiffEqGPU has not" begin
    place = Dict("name" => "EnsembleGPUKernel", "backend" => "CPU")
    arrays = merge(read_by_solve(Float64, 2; u0 = [1.0, 2.0]), written_by_solve(Float64, 2, 2, 1, "ends"))
    answer = ask("solve", arrays; field = linear(), mode = "ends", start = false, maxiters = 1000,
                 trajectories = 2, method = named("DP5"), place)
    @test occursin("EnsembleGPUKernel has no DP5; it has", answer["error"])
    @test occursin("Tsit5", answer["error"])
end
