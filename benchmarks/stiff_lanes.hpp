// K vectors of 8 doubles with AVX-512, masks of their lanes, and the controller's powers.

#include <immintrin.h>

#include <utility>

#define LAMBDA __attribute__((always_inline))
#define INLINE inline LAMBDA

// Unrolled by the compiler: f(0), f(1), ... with constants.
template <int N, class F>
INLINE void each(F &&f) {
    [&]<int... I>(std::integer_sequence<int, I...>) LAMBDA {
        (f(std::integral_constant<int, I>{}), ...);
    }(std::make_integer_sequence<int, N>{});
}
#define EACH(i) [&](auto i) LAMBDA

typedef double v8 __attribute__((vector_size(64), may_alias));

struct V {
    v8 x[K];
    V() = default;
    INLINE V(double a) {
        for (auto &y : x) y = v8{} + a;
    }
    INLINE double get(int lane) const { return ((const double *)x)[lane]; }
    INLINE void set(int lane, double a) { ((double *)x)[lane] = a; }
};
#define OPERATION(o)                                                                               \
    INLINE V operator o(V a, const V &b) {                                                         \
        for (int i = 0; i < K; i++) a.x[i] = a.x[i] o b.x[i];                                      \
        return a;                                                                                  \
    }                                                                                              \
    INLINE V operator o(V a, double b) {                                                           \
        for (int i = 0; i < K; i++) a.x[i] = a.x[i] o b;                                           \
        return a;                                                                                  \
    }                                                                                              \
    INLINE V operator o(double b, V a) {                                                           \
        for (int i = 0; i < K; i++) a.x[i] = b o a.x[i];                                           \
        return a;                                                                                  \
    }                                                                                              \
    INLINE V &operator o##=(V &a, const V &b) { return a = a o b; }
OPERATION(+)
OPERATION(-)
OPERATION(*)
INLINE V operator-(V a) {
    for (auto &y : a.x) y = -y;
    return a;
}
INLINE V absolute(V a) {
    for (auto &y : a.x) y = (v8)_mm512_abs_pd((__m512d)y);
    return a;
}
#define PICK(name, intrinsic)                                                                      \
    INLINE V name(V a, const V &b) {                                                               \
        for (int i = 0; i < K; i++) a.x[i] = (v8)intrinsic((__m512d)a.x[i], (__m512d)b.x[i]);      \
        return a;                                                                                  \
    }
PICK(maximum, _mm512_max_pd)
PICK(minimum, _mm512_min_pd)

// From 14 bits by Newton's iteration, which is half the time of a division: 28 bits, and all but
// the last.
INLINE V roughly_inverse(V a) {
    for (auto &y : a.x) {
        v8 r = (v8)_mm512_rcp14_pd((__m512d)y);
        y = r + r * (1.0 - y * r);
    }
    return a;
}
INLINE V inverse(V a) {
    V r = roughly_inverse(a);
    return r + r * (1.0 - a * r);
}
INLINE double inverse(double a) { return 1 / a; }

// They stay in mask registers: `bits` is for branches only.
struct Mask {
    __mmask8 m[K];
};
INLINE Mask at_most(const V &a, const V &b) {  // false for NaN
    Mask r;
    for (int i = 0; i < K; i++)
        r.m[i] = _mm512_cmp_pd_mask((__m512d)a.x[i], (__m512d)b.x[i], _CMP_LE_OQ);
    return r;
}
INLINE unsigned bits(Mask a) {
    unsigned r = 0;
    for (int i = 0; i < K; i++) r |= (unsigned)a.m[i] << 8 * i;
    return r;
}
INLINE V select(Mask m, const V &a, V b) {
    for (int i = 0; i < K; i++)
        b.x[i] = (v8)_mm512_mask_blend_pd(m.m[i], (__m512d)b.x[i], (__m512d)a.x[i]);
    return b;
}

//
// The PI controller, with the powers of FastPower.jl in single precision
//

#define F8(x) _mm256_set1_ps((float)(x))

INLINE __m256 log2_of(__m256 x) {
    __m256i u = _mm256_castps_si256(x), one = _mm256_set1_epi32(0x3f800000);
    __m256i half = _mm256_slli_epi32(_mm256_and_si256(u, _mm256_set1_epi32(0x400000)), 1);
    __m256i e = _mm256_and_si256(_mm256_srli_epi32(u, 23), _mm256_set1_epi32(255));
    __m256i m = _mm256_or_si256(_mm256_and_si256(u, _mm256_set1_epi32(0x7fffff)), one);
    e = _mm256_add_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(127)), _mm256_srli_epi32(half, 23));
    __m256 s = _mm256_castsi256_ps(_mm256_sub_epi32(m, half));
    __m256 ratio = _mm256_fmadd_ps(s, F8(.338953), F8(1.8596461)) / (s + F8(.523692));
    return _mm256_fmadd_ps(s - F8(1), ratio, _mm256_cvtepi32_ps(e));
}
INLINE __m256 exp2_of(__m256 x) {
    __m256 n = _mm256_roundscale_ps(x, 8), r = x - n, q = F8(1.53533619e-4);
    for (double c : {1.33988743e-3, 9.61843736e-3, 5.55033247e-2, .240226479, .693147203, 1.})
        q = _mm256_fmadd_ps(q, r, F8(c));
    return _mm256_scalef_ps(q, n);
}

constexpr float LEAST_LOG = -13.2877569f;  // of an error of 1e-4, by `log2_of`

// What the next step is in lengths of this one, of the square of its error. `last` is the logarithm
// of the last accepted error, and `most` by how much a step may grow.
INLINE V growth(V squared, Mask accepted, __m256 *last, __m256 *most, double beta1, double beta2) {
    V r;
    for (int i = 0; i < K; i++) {
        __m256 now = log2_of(_mm256_sqrt_ps(_mm512_cvtpd_ps((__m512d)squared.x[i])));
        __m256 before = _mm256_maskz_mov_ps(accepted.m[i], last[i]);
        __m256 g = F8(0.9) * exp2_of(_mm256_fmadd_ps(F8(beta2), before, F8(-beta1) * now));
        g = _mm256_max_ps(_mm256_min_ps(g, most[i]), F8(0.2));
        __mmask8 holds = _mm256_mask_cmp_ps_mask(accepted.m[i], g, F8(1), _CMP_LE_OQ) &
                         _mm256_cmp_ps_mask(g, F8(1 / 1.2), _CMP_GE_OQ);
        r.x[i] = (v8)_mm512_cvtps_pd(_mm256_mask_mov_ps(g, holds, F8(1)));
        last[i] = _mm256_mask_max_ps(last[i], accepted.m[i], now, F8(LEAST_LOG));
        most[i] = _mm256_mask_mov_ps(most[i], accepted.m[i], F8(10));
    }
    return r;
}
