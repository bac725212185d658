using EnsembleODE: Increments, Noise, between, draw!, philox, seed
using LinearAlgebra: dot

const WORDS = UInt32.((0xA4093822, 0x299F31D0))

noise_of(; size = 2, draws = 1, n = 3, more...) = Noise(;
    kind = :diagonal, size, draws, adaptive = false, key = collect(WORDS),
    index = UInt32.(0:(n-1)), repeat = UInt32[0], more...,
)

"""What SciML's process says of its step."""
at_step(iter, t = 0.0) = (; iter, curt = t)

@testset "known answers of Random123" begin
    ones = typemax(UInt32)
    zero = UInt32(0)
    @test philox((zero, zero), (zero, zero, zero, zero)) ==
          (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    @test philox((ones, ones), (ones, ones, ones, ones)) ==
          (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    @test philox(WORDS, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)) ==
          (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)
end

@testset "normal numbers, $each in a step" for each in (1, 2, 3, 4, 5, 6, 9)
    z, of_step = zeros(each, 40_000), zeros(each)
    for i in axes(z, 2)
        z[:, i] = draw!(of_step, WORDS, i - 1, UInt32(1), UInt32(0))
    end
    root = sqrt(length(z))
    @test abs(sum(z)) < 4root
    @test abs(sum(abs2, z) - length(z)) < 4 * sqrt(2) * root
    # Neighbours, in a step and from step to step, are independent.
    line = vec(z)
    @test abs(dot(line[1:(end-1)], line[2:end])) < 4root
    @test allunique(line)
    single = draw!(zeros(Float32, each), WORDS, 7, UInt32(1), UInt32(0))
    @test single ≈ z[:, 8] rtol = 1e-5
end

@testset "increments" begin
    both = Increments(noise_of(; draws = 2), 1, Float64)
    of_w = both(SVector(0.0, 0.0), at_step(0), 0.25, nothing, nothing, 0.0, nothing)
    of_z = both(SVector(0.0, 0.0), at_step(0), 0.25, nothing, nothing, 0.0, nothing)
    @test [of_w; of_z] == 0.5 * draw!(zeros(4), WORDS, 0, UInt32(0), UInt32(0))
    # In place, and by a factor, which requests have transposed.
    out, factor = zeros(2), [1.0 0.6; 0.0 0.8]
    Increments(noise_of(; factor), 2, Float64)(out, at_step(3), 1.0, nothing, nothing, 0.0, nothing)
    @test out ≈ factor' * draw!(zeros(2), WORDS, 3, UInt32(1), UInt32(0))
    # Of a path that is given, for each trajectory.
    times, W = [0.0, 1.0, 2.0], reshape(Float64[0, 0, 2, 4, 3, 5, 0, 0, 1, 1, 1, 1], 2, 3, 2)
    path = Increments(noise_of(; times, W), 2, Float64)
    found = path(SVector(0.0, 0.0), at_step(0, 0.5), 1.0, nothing, nothing, 0.5, nothing)
    @test found ≈ SVector(0.5, 0.5)
    @test between(times, W[:, :, 1], 2, 1.5) == 4.5 && between(times, W[:, :, 1], 1, 3.0) == 3.0
end

@testset "seeds" begin
    noise = noise_of(; n = 1000)
    seeds = [seed(noise, i) for i in 1:1000]
    @test allunique(seeds) && !any(iszero, seeds)
end
