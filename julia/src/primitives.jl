"""
The operations of JAX that Julia has under other terms.

Nothing here throws: outside of their domain the results are NaN, as in JAX, so that a trajectory
which goes there ends with a return code, and no other is touched.
"""
module Primitives

using SpecialFunctions: SpecialFunctions

nan(x) = oftype(x, NaN)

# Julia throws a `DomainError` outside of the domain; these stay inside, and choose afterwards.
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

# NaN goes through both, as in Julia.
@inline max(x, y) = Base.max(x, y)
@inline min(x, y) = Base.min(x, y)
@inline clamp(low, x, high) = Base.min(Base.max(x, low), high)

"""`x^y`: NaN for a negative base, unless `y` is a whole number, or one of them infinite."""
@inline function pow(x::AbstractFloat, y::AbstractFloat)
    whole = isinteger(y)
    power = ifelse(whole, x, abs(x))^y
    return ifelse((x < 0) & !(whole | isinf(x) | isinf(y)), nan(x), power)
end
@inline pow(x::AbstractFloat, y::Integer) = x^y
@inline pow(x::Integer, y::Integer) = ifelse(y >= 0, x^Base.max(y, zero(y)), zero(x))

# By a total order, in which -0 is less than 0, and NaN is last.
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

# Whole numbers, where Julia throws on a division by zero, and of the least number by -1.
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

"""To the nearest whole number; halves away from zero (0), or to the even one (1)."""
@inline round(x, ::Val{0}) = Base.round(x, RoundNearestTiesAway)
@inline round(x, ::Val{1}) = Base.round(x, RoundNearest)

"""The whole number of this type towards zero: the nearest there is; 0 for NaN."""
@inline function truncated(::Type{T}, x) where {T}
    # The first numbers on each side that T does not have.
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
    return (signed(x) >> n) % typeof(x)  # the first bit is the sign, also of those without one
end
@inline shift_right_logical(x, n) =
    ifelse((n >= 0) & (n < 8 * sizeof(x)), x >>> n, zero(x))

#
# Special functions
#

# With parameters that are larger, SpecialFunctions may throw, or never end.
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
    # Where SpecialFunctions throws, two terms are all that counts.
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
