# The noise of stochastic problems. Fixed steps take the numbers that all engines take: functions of
# the trajectory's key, of the step and of the component (see `ensembleode/solvers/philox.py`).
# Adaptive steps take SciML's own, with a seed that is a function of the key.

"""
    Noise(; kind, size, draws, adaptive, key, index, repeat, factor, times, W, Z)

The noise of an ensemble. The last axis of numbers that differ by trajectory is the trajectory.

- `kind`: `:diagonal`, `:scalar` or `:general`; `size`: the number of its components.
- `draws`: the number of processes, `W` alone or also `Z`; `adaptive`: whether steps adapt.
- `key [2]`, `index`, `repeat`: the key of all trajectories; which trajectory, and which run of it.
- `factor [noise, component]`: what increments are multiplied by, transposed; or nothing.
- `times [grid]`, `W`, `Z`, `[noise, grid]`: given paths, linear between the times; or nothing.
"""
Base.@kwdef struct Noise{F,Times,Path,Second}
    kind::Symbol
    size::Int
    draws::Int
    adaptive::Bool
    key::Vector{UInt32}
    index::Vector{UInt32}
    repeat::Vector{UInt32}
    factor::F = nothing
    times::Times = nothing
    W::Path = nothing
    Z::Second = nothing
end

"""The numbers of trajectory `i`, of an array that may have a last axis for trajectories."""
own(x::AbstractArray{T,N}, ::Val{N}, i) where {T,N} = x
own(x::AbstractArray{T,M}, ::Val{N}, i) where {T,M,N} = selectdim(x, M, i)
own(::Nothing, ::Val, i) = nothing

#
# Random numbers
#

# The streams of a trajectory's run, and those that are in use here.
const STREAMS, STREAM_OF_INCREMENTS, STREAM_OF_SEEDS = UInt32(8), UInt32(0), UInt32(3)
# The largest number of normal numbers of a step with which steps share blocks of four.
const MOST_SHARED = 5

"""The four words of Philox 4x32-10 for a counter of four words."""
function philox((k0, k1), (c0, c1, c2, c3))
    for turn in 1:10
        if turn > 1
            k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
        end
        a, b = widemul(0xD2511F53, c0), widemul(0xCD9E8D57, c2)
        c0, c1, c2, c3 = upper(b) ⊻ c1 ⊻ k0, lower(b), upper(a) ⊻ c3 ⊻ k1, lower(a)
    end
    return c0, c1, c2, c3
end
upper(x::UInt64) = (x >> 32) % UInt32
lower(x::UInt64) = x % UInt32

"""Two normal numbers from two words, by Box and Muller's method."""
function box_muller(::Type{T}, radius::UInt32, angle::UInt32) where {T}
    length = sqrt(-2 * log((T(radius) + T(0.5)) * T(2)^-32))
    s, c = sincospi(angle * 2.0^-31)
    return length * T(c), length * T(s)
end

"""Fill `z` with the normal numbers of a step."""
function draw!(z::Vector{T}, key, step, index, stream) where {T}
    each = length(z)
    group = each <= MOST_SHARED ? 4 ÷ gcd(4, each) : 1
    first, block = step % group * each, -1
    numbers = ntuple(_ -> zero(T), 4)
    for k in 1:each
        number = first + k - 1
        if number >> 2 != block
            block = number >> 2
            words = philox(key, (UInt32(step ÷ group), UInt32(block), index, stream))
            numbers = (box_muller(T, words[1], words[2])..., box_muller(T, words[3], words[4])...)
        end
        z[k] = numbers[number&3+1]
    end
    return z
end

#
# Increments
#

"""
    Increments(noise, i, T)

The increments of the noise of trajectory `i`, as SciML asks for them: those of `W` in a step, and
after these those of `Z`, if there is such a process. `z`: the normal numbers of the step.
"""
mutable struct Increments{T,F,Times,Path,Second}
    const size::Int
    const draws::Int
    const key::NTuple{2,UInt32}
    const index::UInt32
    const stream::UInt32
    const factor::F
    const times::Times
    const paths::Tuple{Path,Second}
    const z::Vector{T}
    is_second::Bool
end

function Increments(noise::Noise, i, ::Type{T}) where {T}
    key, index, stream = counter(noise, i, STREAM_OF_INCREMENTS)
    paths = own(noise.W, Val(2), i), own(noise.Z, Val(2), i)
    about = own(noise.factor, Val(2), i), own(noise.times, Val(1), i), paths
    z = Vector{T}(undef, noise.size * noise.draws)
    return Increments(noise.size, noise.draws, key, index, stream, about..., z, false)
end

"""The key, and the last two words of the counters, of one of the streams of trajectory `i`."""
counter(noise::Noise, i, stream) =
    (noise.key[1], noise.key[2]), entry(noise.index, i), entry(noise.repeat, i) * STREAMS + stream

"""The seed of SciML's own generator for trajectory `i`."""
function seed(noise::Noise, i)
    key, index, stream = counter(noise, i, STREAM_OF_SEEDS)
    words = philox(key, (UInt32(0), UInt32(0), index, stream))
    return max(UInt64(words[1]) << 32 | words[2], UInt64(1))  # (0 would be no seed)
end

function (x::Increments{T})(dW, W, dt, u, p, t, rng) where {T}
    is_second = x.is_second
    x.is_second = x.draws > 1 && !is_second
    if x.times === nothing && !is_second
        draw!(x.z, x.key, W.iter, x.index, x.stream)
    end
    return filled(k -> increment(x, is_second, k, T(W.curt), T(dt)), dW)
end

filled(of, ::T) where {T<:Number} = T(of(1))
filled(of, ::SVector{N,T}) where {N,T} = SVector{N,T}(ntuple(of, Val(N)))
filled(of, out::AbstractVector) = (foreach(k -> out[k] = of(k), eachindex(out)); nothing)

function increment(x::Increments, is_second, k, t, dt)
    if x.times !== nothing
        path = x.paths[is_second+1]
        return between(x.times, path, k, t + dt) - between(x.times, path, k, t)
    end
    first = is_second ? x.size : 0
    x.factor === nothing && return sqrt(dt) * x.z[first+k]
    return sqrt(dt) * sum(x.factor[j, k] * x.z[first+j] for j in 1:x.size)
end

"""Component `k` of a path at the time `t`, linear between the given times."""
function between(times, path, k, t)
    i = clamp(searchsortedlast(times, t), 1, length(times) - 1)
    part = clamp((t - times[i]) / (times[i+1] - times[i]), 0, 1)
    return path[k, i] + part * (path[k, i+1] - path[k, i])
end

#
# Problems
#

# The extension has these, by DiffEqNoiseProcess.
function noise_process end
function wiener_process end

"""The problem of trajectory `i`."""
function stochastic_problem(f, g, noise::Noise, u0, span, p, i; own...)
    T = eltype(u0)
    whole = sde_function(f, g)
    about = noise.kind === :general ? (; noise_rate_prototype = matrix(u0, noise.size)) : (;)
    start = start_of(noise, u0)
    if !noise.adaptive
        second = noise.draws > 1 ? zero(start) : nothing
        in_place = start isa Vector
        process = noise_process(Val(in_place), span[1], start, second, Increments(noise, i, T))
        return SDEProblem(whole, u0, span, p; noise = process, about..., own...)
    end
    if noise.kind === :scalar
        process = wiener_process(span[1], start, noise.draws > 1 ? zero(start) : nothing)
        about = (; about..., noise = process)
    end
    return SDEProblem(whole, u0, span, p; seed = seed(noise, i), about..., own...)
end

sde_function(f::ODEFunction, g) =
    SDEFunction{SciMLBase.isinplace(f),SciMLBase.FullSpecialize}(f.f, g)

"""Zeros like the noise."""
function start_of(noise::Noise, u0)
    noise.kind === :scalar && return zero(eltype(u0))
    noise.kind === :diagonal && return zero(u0)
    return u0 isa SVector ? zero(SVector{noise.size,eltype(u0)}) : zeros(eltype(u0), noise.size)
end

matrix(u0::SVector{N,T}, m) where {N,T} = zero(SMatrix{N,m,T})
matrix(u0, m) = zeros(eltype(u0), length(u0), m)
