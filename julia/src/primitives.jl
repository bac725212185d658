"""
JAX's operations, with JAX's results also where Julia's functions differ.

No operation throws: outside of its domain the result is NaN, as in JAX. A trajectory that leaves
the domain ends with a return code, and the other trajectories go on.
"""
module Primitives

using SpecialFunctions: SpecialFunctions

nan(x) = oftype(x, NaN)

# Julia throws a `DomainError` outside of the domain: evaluate at 1 instead, and select NaN after.
for (name, inside) in (
    :sin => :(isfinite(x)),
    :cos => :(isfinite(x)),
    :tan => :(isfinite(x)),
    :sqrt => :(x >= 0),
    :log => :(x >= 0),
    :log2 => :(x >= 0),
    :log1p => :(x >= -1),
    :asin => :(abs(x) <= 1),
    :acos => :(abs(x) <= 1),
    :acosh => :(x >= 1),
    :atanh => :(abs(x) <= 1),
)
    @eval @inline function $name(x)
        inside = $inside
        return ifelse(inside, Base.$name(ifelse(inside, x, one(x))), nan(x))
    end
end

for name in (
    :abs, :asinh, :atan, :cbrt, :ceil, :cosh, :exp, :exp2, :expm1, :floor, :sinh, :tanh, :nextfloat
)
    @eval @inline $name(x) = Base.$name(x)
end

@inline atan2(y, x) = Base.atan(y, x)
@inline rsqrt(x) = inv(sqrt(x))
@inline square(x) = x * x
@inline one_minus_square(x) = (one(x) - x) * (one(x) + x)
@inline logistic(x) = inv(one(x) + Base.exp(-x))
@inline is_finite(x) = isfinite(x)
@inline sign(x) = Base.sign(x)

# A NaN in either argument gives NaN, as in Julia.
@inline max(x, y) = Base.max(x, y)
@inline min(x, y) = Base.min(x, y)
@inline clamp(low, x, high) = Base.min(Base.max(x, low), high)

"""`x^y`; NaN for a negative `x`, unless `y` is a whole number, or `x` or `y` is infinite."""
@inline function pow(x::AbstractFloat, y::AbstractFloat)
    whole = isinteger(y)
    power = ifelse(whole, x, abs(x))^y
    return ifelse((x < 0) & !(whole | isinf(x) | isinf(y)), nan(x), power)
end
@inline pow(x::AbstractFloat, y::Integer) = x^y
@inline pow(x::Integer, y::Integer) = ifelse(y >= 0, x^Base.max(y, zero(y)), zero(x))

# Comparisons by a total order: -0 is less than 0, and NaN is greater than all other numbers.
@inline eq_to(x, y) = isequal(x, y)
@inline le_to(x, y) = !isless(y, x)
@inline lt_to(x, y) = isless(x, y)

"""An integer power, by multiplication."""
@inline function integer_pow(x, ::Val{Y}) where {Y}
    Y < 0 && return one(x) / integer_pow(x, Val(-Y))
    Y == 0 && return one(x)
    half = integer_pow(x, Val(Y ÷ 2))
    return isodd(Y) ? x * half * half : half * half
end

# Julia throws on integer division by zero, and on division of the least integer by -1.
@inline function div(x::T, y::T) where {T<:Integer}
    throws = iszero(y) | ((x == typemin(T)) & (y == -1))
    return ifelse(iszero(y), -one(T), Base.div(x, ifelse(throws, one(T), y)))
end
@inline div(x, y) = x / y
@inline rem(x::T, y::T) where {T<:Integer} =
    ifelse(iszero(y), x, Base.rem(x, ifelse(iszero(y), one(T), y)))
@inline function rem(x::AbstractFloat, y::AbstractFloat)
    inside = isfinite(x) & !iszero(y)
    return ifelse(inside, Base.rem(ifelse(inside, x, one(x)), ifelse(inside, y, one(y))), nan(x))
end

"""Round to the nearest whole number, halves away from zero (`Val(0)`) or to even (`Val(1)`)."""
@inline round(x, ::Val{0}) = Base.round(x, RoundNearestTiesAway)
@inline round(x, ::Val{1}) = Base.round(x, RoundNearest)

"""`x` rounded towards zero and clamped to the range of the integer type `T`; 0 for NaN."""
@inline function truncated(::Type{T}, x) where {T}
    # The range of T; numbers at its bounds, which may be rounded outwards, are clamped.
    low, high = oftype(x, typemin(T)), oftype(x, typemax(T))
    inside = (x > low) & (x < high)
    whole = unsafe_trunc(T, ifelse(inside, x, zero(x)))
    outside = ifelse(x >= high, typemax(T), ifelse(x <= low, typemin(T), zero(T)))
    return ifelse(inside, whole, outside)
end

@inline function nextafter(x::T, y::T) where {T}
    towards = ifelse(y > x, nextfloat(x), ifelse(y < x, prevfloat(x), y))
    return ifelse(isnan(x) | isnan(y), nan(x), towards)
end

@inline population_count(x) = oftype(x, count_ones(x))
@inline clz(x) = oftype(x, leading_zeros(x))
@inline shift_left(x, n) = ifelse((n >= 0) & (n < 8 * sizeof(x)), x << n, zero(x))
@inline function shift_right_arithmetic(x, n)
    n = ifelse((n >= 0) & (n < 8 * sizeof(x)), n, oftype(n, 8 * sizeof(x) - 1))
    return (signed(x) >> n) % typeof(x)  # the first bit is the sign, for unsigned types too
end
@inline shift_right_logical(x, n) =
    ifelse((n >= 0) & (n < 8 * sizeof(x)), x >>> n, zero(x))

#
# Special functions
#

# SpecialFunctions may throw, or never end, for parameters larger than this.
const LARGEST = 1.0f9

@inline erf(x) = SpecialFunctions.erf(x)
@inline erfc(x) = SpecialFunctions.erfc(x)
@inline erf_inv(x) = abs(x) <= 1 ? SpecialFunctions.erfinv(x) : nan(x)
@inline lgamma(x) = isfinite(x) ? first(SpecialFunctions.logabsgamma(x)) : abs(x)
@inline function digamma(x)
    pole = (x <= 0) & isinteger(x)
    return pole || isnan(x) || x == -Inf ? nan(x) : SpecialFunctions.digamma(x)
end
@inline function polygamma(n, x)
    inside = (0 <= n <= 170) & isinteger(n) & isfinite(x) & (x > -LARGEST)
    inside &= (x > 0) | !isinteger(x)
    return inside ? oftype(x, SpecialFunctions.polygamma(Int(n), x)) : nan(x)
end
@inline function zeta(s, q)
    inside = (1 < s < LARGEST) & isfinite(q) & ((q > 0) | (isinteger(s) & !isinteger(q)))
    return inside ? oftype(q, SpecialFunctions.zeta(s, q)) : s == 1 ? oftype(q, Inf) : nan(q)
end
@inline bessel_i0e(x) = bessel_ie(0, abs(x))
@inline bessel_i1e(x) = sign(x) * bessel_ie(1, abs(x))
@inline function bessel_ie(order, x)
    # SpecialFunctions throws for large x; two terms of the asymptotic series are enough there.
    x < 1.0f8 && return oftype(x, SpecialFunctions.besselix(order, x))
    return (1 - oftype(x, 4 * order^2 - 1) / (8 * x)) / sqrt(oftype(x, 2π) * x)
end
@inline igamma(a, x) =
    0 < a < LARGEST && x >= 0 ? SpecialFunctions.gamma_inc(a, x)[1] : nan(x)
@inline igammac(a, x) =
    0 < a < LARGEST && x >= 0 ? SpecialFunctions.gamma_inc(a, x)[2] : nan(x)
@inline function regularized_incomplete_beta(a, b, x)
    inside = (0 < a < LARGEST) & (0 < b < LARGEST) & (0 <= x <= 1)
    return inside ? SpecialFunctions.beta_inc(a, b, x)[1] : nan(x)
end

end
