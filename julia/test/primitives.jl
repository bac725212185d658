using EnsembleODE.Primitives: Primitives

const P = Primitives

"""Whether two numbers are of one type and equal, or both NaN."""
same(x, y) = typeof(x) === typeof(y) && isequal(x, y)
near(x, y; rtol = 16eps(y)) = typeof(x) === typeof(y) && isapprox(x, y; rtol, nans = true)

# Each function with numbers inside of its domain, where Julia's result is the same, and outside.
const ALL = (-Inf, -1e4, -2.5, -1.0, -0.3, -0.0, 0.0, 1e-7, 0.5, 1.0, 2.0, 30.0, 1e9, Inf, NaN)
const FUNCTIONS = (
    (:sin, filter(!isinf, ALL), (-Inf, Inf)),
    (:cos, filter(!isinf, ALL), (-Inf, Inf)),
    (:tan, filter(!isinf, ALL), (-Inf, Inf)),
    (:sqrt, filter(>=(0), ALL), (-1e-30, -2.0, -Inf, NaN)),
    (:log, filter(>=(0), ALL), (-1e-30, -2.0, -Inf, NaN)),
    (:log2, filter(>=(0), ALL), (-1e-30, -2.0, -Inf, NaN)),
    (:log1p, filter(>=(-1), ALL), (-1.5, -Inf, NaN)),
    (:asin, filter(x -> abs(x) <= 1, ALL), (-1.5, 1.001, Inf, NaN)),
    (:acos, filter(x -> abs(x) <= 1, ALL), (-1.5, 1.001, Inf, NaN)),
    (:acosh, filter(>=(1), ALL), (0.9, -3.0, -Inf, NaN)),
    (:atanh, filter(x -> abs(x) <= 1, ALL), (-1.5, 1.001, Inf, NaN)),
    ((f, ALL, ()) for f in (:abs, :asinh, :atan, :cbrt, :ceil, :cosh, :exp, :exp2, :expm1, :floor,
                            :nextfloat, :sign, :sinh, :tanh))...,
)

@testset "$name of $T" for T in (Float32, Float64), (name, inside, outside) in FUNCTIONS
    f, base = getproperty(P, name), getproperty(Base, name)
    @test all(x -> same(f(T(x)), base(T(x))), inside)
    @test all(x -> same(f(T(x)), T(NaN)), outside)
end

@testset "arithmetic of $T" for T in (Float32, Float64)
    for x in T.(ALL), y in T.(ALL)
        @test same(P.max(x, y), max(x, y)) && same(P.min(x, y), min(x, y))
        @test same(P.atan2(y, x), atan(y, x))
        @test same(P.rem(x, y), isinf(x) || iszero(y) ? T(NaN) : rem(x, y))
        @test same(P.div(x, y), x / y)
    end
    for x in T.(ALL)
        @test same(P.rsqrt(x), x >= 0 ? 1 / sqrt(x) : T(NaN))
        @test same(P.square(x), x * x)
        @test same(P.one_minus_square(x), (1 - x) * (1 + x))
        @test same(P.is_finite(x), isfinite(x))
        @test near(P.logistic(x), 1 / (1 + exp(-x)))
        @test same(P.clamp(T(-1), x, T(2)), isnan(x) ? x : clamp(x, T(-1), T(2)))
    end
    @test P.clamp(T(3), T(2), T(1)) === T(1)
    @test P.round.(T[0.5, 1.5, -0.5, 2.5, -0.2, 1e9], Val(0)) == T[1, 2, -1, 3, 0, 1e9]
    @test P.round.(T[0.5, 1.5, -0.5, 2.5, -0.2, 1e9], Val(1)) == T[0, 2, 0, 2, 0, 1e9]
    @test P.round(prevfloat(T(0.5)), Val(0)) === T(0)
    @test all(k -> isnan(P.round(T(NaN), Val(k))) && P.round(T(-Inf), Val(k)) === T(-Inf), (0, 1))
    @test P.nextafter(T(1), T(2)) === nextfloat(T(1))
    @test P.nextafter(T(0), T(-1)) === -nextfloat(T(0))
    @test P.nextafter(T(Inf), T(0)) === floatmax(T)
    @test same(P.nextafter(T(0), T(-0.0)), T(-0.0))
    @test isnan(P.nextafter(T(NaN), T(1))) && isnan(P.nextafter(T(1), T(NaN)))
    @test P.eq_to(T(NaN), T(NaN)) && !P.eq_to(T(0), T(-0.0))
    @test P.lt_to(T(-0.0), T(0)) && P.lt_to(T(Inf), T(NaN)) && !P.lt_to(T(NaN), T(NaN))
    @test P.le_to(T(1), T(1)) && !P.le_to(T(0), T(-0.0)) && !P.le_to(T(NaN), T(Inf))
end

@testset "powers of $T" for T in (Float32, Float64)
    for x in T.(ALL), n in (-3, -2, -1, 0, 1, 2, 3, 7)
        @test near(P.integer_pow(x, Val(n)), x^n; rtol = 8eps(T))
        @test near(P.pow(x, T(n)), x^n; rtol = 8eps(T))
        @test near(P.pow(x, Int32(n)), x^n; rtol = 8eps(T))
    end
    for x in T[0, 0.5, 1, 3, Inf, NaN], y in T[-Inf, -1.5, 0.5, 2.5, Inf, NaN]
        @test same(P.pow(x, y), x^y)
    end
    @test all(y -> isnan(P.pow(T(-2), T(y))), (-1.5, 0.5, 1e-3))
    # As in C, the base's sign is ignored for an infinite power, and for an infinite base to a
    # fractional power.
    @test P.pow.(T[-1, -2, -2, -0.5, -Inf, -Inf], T[Inf, Inf, -Inf, Inf, 1.5, -1.5]) ==
          T[1, Inf, 0, 0, Inf, 0]
    @test isnan(P.pow(T(-1), T(NaN))) && isnan(P.pow(T(NaN), T(2))) && P.pow(T(NaN), T(0)) == 1
    @test P.pow(3, 4) === 81 && P.pow(Int32(3), Int32(-1)) === Int32(0)
end

@testset "whole numbers: $T" for T in (Int8, Int16, Int32, Int64, UInt8, UInt32, UInt64)
    bits = 8 * sizeof(T)
    numbers = T[typemin(T), typemin(T) + 1, 0, 1, 2, 3, 7, 100, typemax(T)-1, typemax(T)]
    T <: Signed && append!(numbers, T[-1, -2, -7])
    for x in numbers, y in numbers
        wrapped(z) = z % T
        @test P.div(x, y) === (y == 0 ? wrapped(-1) : wrapped(div(big(x), big(y))))
        @test P.rem(x, y) === (y == 0 ? x : wrapped(rem(big(x), big(y))))
        # The count is unsigned: a negative count is beyond the width.
        n = Int(min(unsigned(y), bits))
        @test P.shift_left(x, y) === wrapped(big(x) << n)
        @test P.shift_right_logical(x, y) === wrapped(big(unsigned(x)) >> n)
        @test P.shift_right_arithmetic(x, y) === wrapped(big(signed(x)) >> n)
    end
    for x in numbers
        @test P.population_count(x) === T(count_ones(x))
        @test P.clz(x) === T(leading_zeros(x))
        @test P.abs(x) === abs(x) && P.sign(x) === sign(x)
        @test P.integer_pow(x, Val(3)) === x * x * x
        @test P.eq_to(x, x) && P.le_to(x, x) && !P.lt_to(x, x)
    end
    for F in (Float16, Float32, Float64)
        whole(x) = P.truncated(T, F(x))
        @test whole(NaN) === T(0)
        @test whole(Inf) === typemax(T) && whole(-Inf) === typemin(T)
        @test whole(2.9) === T(2) && whole(100.5) === T(100) && whole(0.0) === T(0)
        @test whole(-0.5) === T(0) && whole(-2.9) === (T <: Signed ? T(-2) : T(0))
        @test whole(typemax(T)) === typemax(T) && whole(typemin(T)) === typemin(T)
        @test whole(4 * F(typemax(T))) === typemax(T)
        @test whole(-4 * F(typemax(T))) === typemin(T)
    end
end

@testset "special functions of $T" for T in (Float32, Float64)
    S, rtol = SpecialFunctions, 64eps(T)
    wide(f, xs...) = T(f(Float64.(xs)...))
    for x in T.(ALL)
        @test near(P.erf(x), wide(S.erf, x); rtol)
        @test near(P.erfc(x), wide(S.erfc, x); rtol = 1e3rtol)
        @test near(P.erf_inv(x), abs(x) <= 1 ? wide(S.erfinv, x) : T(NaN); rtol)
        for (order, f) in ((0, P.bessel_i0e), (1, P.bessel_i1e))
            scaled(a) = a > 1e4 ? 1 / sqrt(2π * a) : S.besselix(order, a)
            value = isnan(x) ? NaN : scaled(abs(Float64(x)))
            @test near(f(x), T(order == 1 ? sign(x) * value : value); rtol = max(rtol, 1e-9))
        end
        gamma = isinf(x) || x <= 0 && isinteger(x) ? T(Inf) : wide(first ∘ S.logabsgamma, x)
        @test near(P.lgamma(x), gamma; rtol)
        pole = isnan(x) || x == -Inf || x <= 0 && isinteger(x)
        @test near(P.digamma(x), pole ? T(NaN) : wide(S.digamma, x); rtol)
        for n in (0, 2)
            outside = pole || isinf(x)
            @test near(P.polygamma(T(n), x), outside ? T(NaN) : T(S.polygamma(n, Float64(x))); rtol)
        end
        for a in T[-1, 0.3, 2, 50, NaN]
            outside = !(a > 0 && x >= 0)
            both = outside ? (NaN, NaN) : S.gamma_inc(Float64(a), Float64(x))
            @test near(P.igamma(a, x), T(both[1]); rtol = 100rtol)
            @test isapprox(P.igammac(a, x), T(both[2]); rtol = 100rtol, atol = rtol, nans = true)
            beta = a > 0 && 0 <= x <= 1 ? S.beta_inc(Float64(a), 2.5, Float64(x))[1] : NaN
            @test near(P.regularized_incomplete_beta(a, T(2.5), x), T(beta); rtol = 100rtol)
        end
    end
    # The two forms of the scaled Bessel functions agree where the second takes over.
    for f in (P.bessel_i0e, P.bessel_i1e)
        @test f(prevfloat(T(1e8))) ≈ f(T(1e8)) rtol = 2eps(T)
        @test f(T(Inf)) === T(0)
    end
    @test P.bessel_i1e(T(-1e10)) === -P.bessel_i1e(T(1e10))
    @test P.zeta(T(2), T(1)) ≈ T(π^2 / 6) && P.zeta(T(2), T(1)) isa T
    @test P.zeta(T(2), T(-1.5)) ≈ T(9.37924664498912)
    @test P.zeta(T(1), T(2)) === T(Inf)
    @test all(isnan, (P.zeta(T(s), T(q)) for (s, q) in
                      ((0.5, 1), (2.5, -1.5), (3, -2), (NaN, 1), (2, NaN), (Inf, 2), (-1, 1))))
    @test all(isnan, (P.polygamma(T(n), T(x)) for (n, x) in
                      ((1.5, 1), (-1, 1), (NaN, 1), (1, 0), (2, -3), (1, NaN), (Inf, 1))))
end

@testset "no domain error anywhere" begin
    extremes(T) = T[-Inf, -floatmax(T), -1e17, -1e10, -2, -nextfloat(T(0)), 0, nextfloat(T(0)),
                    floatmin(T), 1e10, 1e17, floatmax(T), Inf, NaN]
    one_number = Symbol.(split("""abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt
        ceil cos cosh digamma erf erf_inv erfc exp exp2 expm1 floor lgamma log log1p log2 logistic
        one_minus_square rsqrt sign sin sinh sqrt square tan tanh"""))
    two = (:atan2, :igamma, :igammac, :max, :min, :nextafter, :polygamma, :pow, :rem, :zeta)
    for T in (Float32, Float64), x in extremes(T)
        @test all(f -> getproperty(P, f)(x) isa T, one_number)
        @test all(getproperty(P, f)(x, y) isa T for f in two, y in extremes(T))
        @test all(P.regularized_incomplete_beta(x, y, T(0.5)) isa T for y in extremes(T))
    end
end

# The primitives that a printed function may call.
const CALLED = setdiff(split("""
    abs acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz cos cosh
    digamma div eq_to erf erf_inv erfc exp exp2 expm1 floor igamma igammac integer_pow is_finite
    le_to lgamma log log1p log2 logistic lt_to max min nextafter one_minus_square polygamma
    population_count pow regularized_incomplete_beta rem round rsqrt shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square tan tanh truncated zeta
"""), ("",))

@testset "every name that is printed" begin
    @test all(name -> isdefined(P, Symbol(name)), CALLED)
    python = joinpath(@__DIR__, "..", "..", "ensembleode")
    if isfile(joinpath(python, "fields", "equations.py"))
        equations = read(joinpath(python, "fields", "equations.py"), String)
        elementwise = split(match(r"ELEMENTWISE = \"\"\"([^\"]*)\"\"\"", equations)[1])
        printer = read(joinpath(python, "engines", "julia", "source.py"), String)
        table = match(r"_INFIX = \{\n(.*?)\n\}"s, printer)[1]
        infix = [m[1] for m in eachmatch(r"\"(\w+)\": \"", table)]
        operators = setdiff([infix; "neg"; "not"; "select_n"], ["div"])
        @test Set(CALLED) == Set([setdiff(elementwise, operators); "truncated"])
    end
end
