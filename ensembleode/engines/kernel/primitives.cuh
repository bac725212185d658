// The operations of JAX, for the device and, in tests, for the host. NaN goes through as it does in
// JAX, and nothing traps.

#ifdef __CUDACC_RTC__
#define DEVICE __device__ __forceinline__
#define APART __device__ __noinline__
#define KERNEL(block) extern "C" __global__ void __launch_bounds__(block)
#define TABLE __device__ const
#else
#include <cmath>
#include <cstddef>
#define DEVICE static inline
#define APART static
#define KERNEL(block) extern "C" void
#define TABLE static const
#define __restrict__ __restrict
#endif

typedef signed char int8;
typedef short int16;
typedef int int32;
typedef long long int64;
typedef unsigned char uint8;
typedef unsigned short uint16;
typedef unsigned int uint32;
typedef unsigned long long uint64;
typedef float float32;
typedef double float64;

template <typename To, typename From> DEVICE To bitcast(From x) {
  union { From from; To to; } both;
  both.from = x;
  return both.to;
}

DEVICE float infinity(float) { return bitcast<float>(0x7f800000u); }
DEVICE double infinity(double) { return bitcast<double>(0x7ff0000000000000ull); }
template <typename T> DEVICE T nan_of(T) { return infinity(T(0)) - infinity(T(0)); }

template <typename T> DEVICE bool is_nan(T x) { return x != x; }
template <typename T> DEVICE bool is_finite(T x) { return x - x == 0; }

// Functions of the C library, which have a name for each precision.
#define ONE(name, single, twice) \
  DEVICE float name(float x) { return single(x); } \
  DEVICE double name(double x) { return twice(x); }
#define TWO(name, single, twice) \
  DEVICE float name(float x, float y) { return single(x, y); } \
  DEVICE double name(double x, double y) { return twice(x, y); }

ONE(do_abs, fabsf, fabs)
ONE(do_acos, acosf, acos)
ONE(do_acosh, acoshf, acosh)
ONE(do_asin, asinf, asin)
ONE(do_asinh, asinhf, asinh)
ONE(do_atan, atanf, atan)
ONE(do_atanh, atanhf, atanh)
ONE(do_cbrt, cbrtf, cbrt)
ONE(do_ceil, ceilf, ceil)
ONE(do_cos, cosf, cos)
ONE(do_cosh, coshf, cosh)
ONE(do_erf, erff, erf)
ONE(do_erfc, erfcf, erfc)
ONE(do_exp, expf, exp)
ONE(do_exp2, exp2f, exp2)
ONE(do_expm1, expm1f, expm1)
ONE(do_floor, floorf, floor)
ONE(do_lgamma, lgammaf, lgamma)
ONE(do_log, logf, log)
ONE(do_log10, log10f, log10)
ONE(do_log1p, log1pf, log1p)
ONE(do_log2, log2f, log2)
ONE(do_rint, rintf, rint)
ONE(do_round_away, roundf, round)
ONE(do_sin, sinf, sin)
ONE(do_sinh, sinhf, sinh)
ONE(do_sqrt, sqrtf, sqrt)
ONE(do_tan, tanf, tan)
ONE(do_tanh, tanhf, tanh)
TWO(do_atan2, atan2f, atan2)
TWO(do_fmod, fmodf, fmod)
TWO(do_nextafter, nextafterf, nextafter)

template <typename T> DEVICE T do_abs(T x) { return x < 0 ? T(-x) : x; }
DEVICE bool do_ceil(bool x) { return x; }
DEVICE bool do_floor(bool x) { return x; }
template <typename T> DEVICE bool do_is_finite(T x) { return is_finite(x); }
template <typename T> DEVICE T do_logistic(T x) { return 1 / (1 + do_exp(-x)); }
template <typename T> DEVICE T do_one_minus_square(T x) { return (1 - x) * (1 + x); }
template <typename T> DEVICE T do_rsqrt(T x) { return 1 / do_sqrt(x); }
template <typename T> DEVICE T do_square(T x) { return x * x; }
template <typename T> DEVICE T do_sign(T x) { return x > 0 ? T(1) : x < 0 ? T(-1) : x; }
DEVICE bool do_sign(bool x) { return x; }

template <typename T> DEVICE T do_max(T x, T y) { return x > y || is_nan(x) ? x : y; }
template <typename T> DEVICE T do_min(T x, T y) { return x < y || is_nan(x) ? x : y; }
template <typename T> DEVICE T do_clamp(T low, T x, T high) { return do_min(do_max(x, low), high); }

// An integer power, by multiplication.
template <int n, typename T> DEVICE T do_integer_pow(T x) {
  if constexpr (n < 0) {
    return 1 / do_integer_pow<-n>(x);
  } else if constexpr (n == 0) {
    return T(1);
  } else {
    const T half = do_integer_pow<n / 2>(x);
    return n % 2 ? T(x * half * half) : T(half * half);
  }
}

DEVICE float do_pow(float x, float y) { return powf(x, y); }
DEVICE double do_pow(double x, double y) { return pow(x, y); }
// To a whole number, by multiplication.
template <typename T, typename I> DEVICE T do_pow(T x, I n) {
  const bool is_negative = n < 0;
  T power = 1;
  for (uint64 left = is_negative ? -uint64(n) : uint64(n); left; left >>= 1, x *= x)
    if (left & 1) power *= x;
  return is_negative ? T(1) / power : power;
}

// By a total order, in which -0 is less than 0, and NaN is last.
DEVICE int64 rank(float x) {
  const int32 bits = is_nan(x) ? 0x7fc00000 : bitcast<int32>(x);
  return bits < 0 ? int64(-1) - (bits & 0x7fffffff) : int64(bits);
}
DEVICE int64 rank(double x) {
  const int64 bits = is_nan(x) ? 0x7ff8000000000000ll : bitcast<int64>(x);
  return bits < 0 ? int64(-1) - (bits & 0x7fffffffffffffffll) : bits;
}
template <typename T> DEVICE T rank(T x) { return x; }
template <typename T> DEVICE bool do_eq_to(T x, T y) { return rank(x) == rank(y); }
template <typename T> DEVICE bool do_le_to(T x, T y) { return rank(x) <= rank(y); }
template <typename T> DEVICE bool do_lt_to(T x, T y) { return rank(x) < rank(y); }

// Whole numbers: a division by zero is -1, its remainder the number itself.
template <typename T> DEVICE T do_div(T x, T y) {
  if (y == 0) return T(-1);
  return T(-1) < T(0) && y == T(-1) ? T(uint64(0) - uint64(x)) : T(x / y);
}
template <typename T> DEVICE T do_rem(T x, T y) {
  if (y == 0) return x;
  return T(-1) < T(0) && y == T(-1) ? T(0) : T(x % y);
}
DEVICE float do_rem(float x, float y) { return do_fmod(x, y); }
DEVICE double do_rem(double x, double y) { return do_fmod(x, y); }

// To the whole number of this type towards zero: the nearest there is; 0 for NaN.
template <typename To, typename From> DEVICE To truncated(From x) {
  const bool is_signed = To(-1) < To(0);
  const To most = is_signed ? To((uint64(1) << (8 * sizeof(To) - 1)) - 1) : To(-1);
  const To least = is_signed ? To(-most - 1) : To(0);
  if (is_nan(x)) return To(0);
  if (x >= From(most)) return most;
  if (x <= From(least)) return least;
  return To(x);
}

template <typename T> DEVICE T do_population_count(T x) {
  uint64 bits = uint64(x) & (~uint64(0) >> (64 - 8 * sizeof(T)));
  T count = 0;
  for (; bits; bits &= bits - 1) ++count;
  return count;
}
template <typename T> DEVICE T do_clz(T x) {
  const uint64 bits = uint64(x) & (~uint64(0) >> (64 - 8 * sizeof(T)));
  T count = 0;
  for (int i = 8 * sizeof(T) - 1; i >= 0 && !(bits >> i & 1); --i) ++count;
  return count;
}
template <typename T> DEVICE bool shifts_out(T n) { return n < 0 || n >= T(8 * sizeof(T)); }
template <typename T> DEVICE T do_shift_left(T x, T n) {
  return shifts_out(n) ? T(0) : T(uint64(x) << int(n));
}
template <typename T> DEVICE T do_shift_right_logical(T x, T n) {
  const uint64 bits = uint64(x) & (~uint64(0) >> (64 - 8 * sizeof(T)));
  return shifts_out(n) ? T(0) : T(bits >> int(n));
}
// (The first bit is the sign, also of those without one.)
template <typename T> DEVICE T do_shift_right_arithmetic(T x, T n) {
  const int empty = 64 - 8 * sizeof(T);
  const int by = shifts_out(n) ? 8 * sizeof(T) - 1 : int(n);
  return T((int64(uint64(x) << empty) >> empty) >> by);
}

#ifdef __CUDACC_RTC__
ONE(do_erf_inv, erfinvf, erfinv)
#else
// Halley's method, from the logarithmic approximation of Winitzki.
DEVICE double do_erf_inv(double x) {
  if (!(do_abs(x) < 1)) return x == 1 || x == -1 ? x * infinity(x) : nan_of(x);
  const double log_term = log1p(-x * x), a = 4.33 + 0.5 * log_term;
  double y = copysign(sqrt(sqrt(a * a - log_term / 0.147) - a), x);
  for (int i = 0; i < 4; ++i) {
    const double left = x > 0 ? (1 - x) - erfc(y) : erfc(-y) - (1 + x);
    const double step = left * 0.88622692545275801365 * exp(y * y);
    y -= step / (1 + y * step);
  }
  return y;
}
DEVICE float do_erf_inv(float x) { return float(do_erf_inv(double(x))); }
#endif
