// Vectors of lanes, functions of them, and the fields of limits.cpp.

#include <cmath>
#include <cstdint>
#include <type_traits>

#ifdef SINGLE
typedef float real;
#else
typedef double real;
#endif
#if defined(SCALAR)
constexpr int BYTES = sizeof(real);
#elif defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif
constexpr int L = BYTES / sizeof(real);
typedef real V __attribute__((vector_size(BYTES)));
typedef std::conditional_t<sizeof(real) == 8, int64_t, int32_t> whole;
typedef whole I __attribute__((vector_size(BYTES)));
typedef float F __attribute__((vector_size(4 * L)));
typedef int32_t J __attribute__((vector_size(4 * L)));

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 64")

//
// Functions, those of libmvec where there is one
//

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__AVX__) && !defined(SCALAR)
#if defined(__AVX512F__) && defined(SINGLE)
#define VECTOR(name) _ZGVeN16v_##name##f
#elif defined(__AVX512F__)
#define VECTOR(name) _ZGVeN8v_##name
#elif defined(SINGLE)
#define VECTOR(name) _ZGVdN8v_##name##f
#else
#define VECTOR(name) _ZGVdN4v_##name
#endif
#define FUNCTION(name)                                                                             \
    extern "C" V VECTOR(name)(V);                                                                  \
    static INLINE V vector_##name(V x) { return VECTOR(name)(x); }
#else
#define FUNCTION(name)                                                                             \
    static INLINE V vector_##name(V x) {                                                           \
        for (int i = 0; i < L; i++) x[i] = std::name(x[i]);                                        \
        return x;                                                                                  \
    }
#endif
FUNCTION(sin)
FUNCTION(cos)
FUNCTION(exp)
FUNCTION(log)

static INLINE V spread(real x) { return x - V{}; }
static INLINE V maximum(V a, V b) { return a > b ? a : b; }
static INLINE V minimum(V a, V b) { return a < b ? a : b; }
static INLINE V absolute(V a) { return a < 0 ? -a : a; }
static INLINE V root(V x) {
    UNROLL for (int i = 0; i < L; i++) x[i] = std::sqrt(x[i]);
    return x;
}
static INLINE bool any(I mask) {
    whole found = 0;
    UNROLL for (int i = 0; i < L; i++) found |= mask[i];
    return found != 0;
}

//
// Fields: `f(y, p, t, dy)`, and `vjp(y, p, t, l, gy, gp)`, which sets `gy` and adds to `gp`
//

static const real *shared;  // numbers that all trajectories have in common

struct Lorenz {
    static constexpr int n = 3, np = 1, ns = 0;
    static INLINE void f(const V *y, const V *p, V, V *d) {
        d[0] = real(10) * (y[1] - y[0]);
        d[1] = y[0] * (p[0] - y[2]) - y[1];
        d[2] = y[0] * y[1] - real(8.0 / 3.0) * y[2];
    }
    static INLINE void vjp(const V *y, const V *p, V, const V *l, V *g, V *gp, V *) {
        g[0] = real(-10) * l[0] + (p[0] - y[2]) * l[1] + y[1] * l[2];
        g[1] = real(10) * l[0] - l[1] + y[0] * l[2];
        g[2] = -y[0] * l[1] - real(8.0 / 3.0) * l[2];
        gp[0] += y[0] * l[1];
    }
};

struct Pendulum {
    static constexpr int n = 2, np = 1, ns = 0;
    static INLINE void f(const V *y, const V *p, V, V *d) {
        d[0] = y[1];
        d[1] = -vector_sin(y[0]) - p[0] * y[1];
    }
    static INLINE void vjp(const V *y, const V *p, V, const V *l, V *g, V *gp, V *) {
        g[0] = -vector_cos(y[0]) * l[1];
        g[1] = l[0] - p[0] * l[1];
        gp[0] -= y[1] * l[1];
    }
};

struct VanDerPol {
    static constexpr int n = 2, np = 1, ns = 0;
    static INLINE void f(const V *y, const V *p, V, V *d) {
        d[0] = y[1];
        d[1] = p[0] * (real(1) - y[0] * y[0]) * y[1] - y[0];
    }
    static INLINE void vjp(const V *y, const V *p, V, const V *l, V *g, V *gp, V *) {
        V a = real(1) - y[0] * y[0];
        g[0] = (real(-2) * p[0] * y[0] * y[1] - real(1)) * l[1];
        g[1] = l[0] + p[0] * a * l[1];
        gp[0] += a * y[1] * l[1];
    }
};

struct KellerMiksis {
    static constexpr int n = 2, np = 8, ns = 0;
    static INLINE void f(const V *y, const V *c, V t, V *d) {
        V inverse = real(1) / y[0], angle = real(6.283185307179586) * t;
        V power = vector_exp(real(-4.2) * vector_log(y[0]));
        V moving = real(1) + c[7] * y[1];
        V above = (c[0] + c[1] * y[1]) * power - c[2] * moving - (c[3] + c[4] * y[1]) * inverse
                - (real(1.5) - real(0.5) * c[7] * y[1]) * y[1] * y[1]
                - c[5] * vector_sin(angle) * moving - c[6] * vector_cos(angle) * y[0];
        d[0] = y[1];
        d[1] = above / (y[0] - c[7] * y[0] * y[1] + c[4] * c[7]);
    }
    static INLINE void vjp(const V *, const V *, V, const V *, V *, V *, V *) {}
};

template <int N>
struct Lorenz96 {
    static constexpr int n = N, np = 1, ns = 0;
    // Calls `body(i)` for all components. Loops too long to be unrolled have their ends apart, so
    // that neighbours are at fixed distances.
    template <class Body>
    static INLINE void each(Body body) {
        if constexpr (N <= 64) {
            UNROLL for (int i = 0; i < N; i++) body(i, (i + N - 2) % N, (i + N - 1) % N, (i + 1) % N, (i + 2) % N);
        } else {
            for (int i : {0, 1, N - 2, N - 1}) body(i, (i + N - 2) % N, (i + N - 1) % N, (i + 1) % N, (i + 2) % N);
            for (int i = 2; i < N - 2; i++) body(i, i - 2, i - 1, i + 1, i + 2);
        }
    }
    static INLINE void f(const V *y, const V *p, V, V *d) {
        each([&](int i, int back2, int back, int next, int) {
            d[i] = (y[next] - y[back2]) * y[back] - y[i] + p[0];
        });
    }
    static INLINE void vjp(const V *y, const V *, V, const V *l, V *g, V *gp, V *) {
        each([&](int i, int back2, int back, int next, int next2) {
            g[i] = y[back2] * l[back] - y[next] * l[next2] + (y[next2] - y[back]) * l[next] - l[i];
            gp[0] += l[i];
        });
    }
};

struct Network {  // shared: w1 [50, 2], b1 [50], w2 [2, 50], b2 [2]
    static constexpr int H = 50, n = 2, np = 0, ns = 5 * H + 2;
    static INLINE V tanh(V x) { return real(1) - real(2) / (vector_exp(x + x) + real(1)); }
    static INLINE void f(const V *y, const V *, V, V *d) {
        V a = spread(shared[5 * H]), b = spread(shared[5 * H + 1]);
        for (int j = 0; j < H; j++) {
            V h = tanh(shared[2 * j] * y[0] + shared[2 * j + 1] * y[1] + shared[2 * H + j]);
            a += shared[3 * H + j] * h;
            b += shared[4 * H + j] * h;
        }
        d[0] = a, d[1] = b;
    }
    static INLINE void vjp(const V *y, const V *, V, const V *l, V *g, V *, V *gs) {
        V to0 = V{}, to1 = V{};
        for (int j = 0; j < H; j++) {
            real w0 = shared[2 * j], w1 = shared[2 * j + 1];
            V h = tanh(w0 * y[0] + w1 * y[1] + shared[2 * H + j]);
            V back = (shared[3 * H + j] * l[0] + shared[4 * H + j] * l[1]) * (real(1) - h * h);
            to0 += w0 * back, to1 += w1 * back;
            gs[2 * j] += back * y[0], gs[2 * j + 1] += back * y[1], gs[2 * H + j] += back;
            gs[3 * H + j] += h * l[0], gs[4 * H + j] += h * l[1];
        }
        gs[5 * H] += l[0], gs[5 * H + 1] += l[1];
        g[0] = to0, g[1] = to1;
    }
};

typedef FIELD Field;
constexpr int n = Field::n, NP = Field::np, NS = Field::ns;
constexpr int P1 = NP ? NP : 1, S1 = NS ? NS : 1;
