// What sde.py holds the engine against: Euler-Maruyama steps, written by hand in C++.
//
// `L` trajectories take their steps together, in loops over arrays that the compiler turns into
// vectors. The noise is a function of the seed, the trajectory and the step: a block of Philox
// 4x32-10 for each step (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), and
// Box and Muller's method, whose logarithm, cosine and sine are those of libmvec.

#include <algorithm>
#include <cmath>
#include <cstdint>

constexpr int L = 32;

using Words = std::uint32_t[4][L];

// The words of the counters (step, 0, trajectory, 0).
static inline void philox(std::uint32_t step, std::uint32_t first, std::uint64_t seed, Words c) {
    constexpr std::uint64_t m0 = 0xD2511F53, m1 = 0xCD9E8D57;
    for (int l = 0; l < L; l++) c[0][l] = step, c[1][l] = 0, c[2][l] = first + l, c[3][l] = 0;
    std::uint32_t k0 = seed, k1 = seed >> 32;
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9, k1 += 0xBB67AE85)
        for (int l = 0; l < L; l++) {
            std::uint64_t a = m0 * c[0][l], b = m1 * c[2][l];
            std::uint32_t x = (b >> 32) ^ c[1][l] ^ k0, y = (a >> 32) ^ c[3][l] ^ k1;
            c[0][l] = x, c[1][l] = b, c[2][l] = y, c[3][l] = a;
        }
}

// The normal numbers of two words.
template <class T>
static inline void normals(const std::uint32_t *radius, const std::uint32_t *angle, T *x, T *y) {
    constexpr T unit = T(1) / T(4294967296.0), turn = T(6.283185307179586) * unit;
    T length[L], at[L];
    for (int l = 0; l < L; l++) {
        length[l] = std::sqrt(T(-2) * std::log((T(radius[l]) + T(0.5)) * unit));
        at[l] = T(std::int32_t(angle[l])) * turn;
    }
    // (In one loop, compilers take cosine and sine together, which libmvec has no vectors of.)
    for (int l = 0; l < L; l++) x[l] = length[l] * std::cos(at[l]);
    for (int l = 0; l < L; l++) y[l] = length[l] * std::sin(at[l]);
}

// Lorenz's equations, with noise in proportion to each component; `p` is rho.
struct Lorenz {
    static constexpr int d = 3, m = 3;
    template <class T>
    static void step(T (*u)[L], const T *p, const T (*dw)[L], T h, int l) {
        T x = u[0][l], y = u[1][l], z = u[2][l], s = T(0.3);
        u[0][l] = x + h * (T(10) * (y - x)) + s * x * dw[0][l];
        u[1][l] = y + h * (x * (p[l] - z) - y) + s * y * dw[1][l];
        u[2][l] = z + h * (x * y - T(8.0 / 3.0) * z) + s * z * dw[2][l];
    }
};

// A geometric Brownian motion of the rate `p`, and the path of its noise.
struct Growth {
    static constexpr int d = 2, m = 1;
    template <class T>
    static void step(T (*u)[L], const T *p, const T (*dw)[L], T h, int l) {
        u[0][l] += h * p[l] * u[0][l] + T(0.5) * u[0][l] * dw[0][l];
        u[1][l] += dw[0][l];
    }
};

template <class Problem, class T>
static void solve(long n, long steps, T h, std::uint64_t seed, const T *ps, const T *u0, T *ends) {
    constexpr int d = Problem::d;
    T root = std::sqrt(h);
    for (long first = 0; first < n; first += L) {
        T u[d][L], p[L], z[4][L];
        Words words;
        for (int l = 0; l < L; l++) {
            long i = std::min(first + l, n - 1);
            p[l] = ps[i];
            for (int k = 0; k < d; k++) u[k][l] = u0[i * d + k];
        }
        for (long step = 0; step < steps; step++) {
            philox(step, first, seed, words);
            normals<T>(words[0], words[1], z[0], z[1]);
            if (Problem::m > 2) normals<T>(words[2], words[3], z[2], z[3]);
            for (int k = 0; k < Problem::m; k++)
                for (int l = 0; l < L; l++) z[k][l] *= root;
            for (int l = 0; l < L; l++) Problem::template step<T>(u, p, z, h, l);
        }
        for (int l = 0; l < L && first + l < n; l++)
            for (int k = 0; k < d; k++) ends[(first + l) * d + k] = u[k][l];
    }
}

extern "C" {
#define SOLVE(name, Problem, T)                                                                     \
    void name(long n, long steps, T h, std::uint64_t seed, const T *p, const T *u0, T *ends) {      \
        solve<Problem, T>(n, steps, h, seed, p, u0, ends);                                          \
    }
SOLVE(lorenz_float32, Lorenz, float)
SOLVE(lorenz_float64, Lorenz, double)
SOLVE(growth_float32, Growth, float)
SOLVE(growth_float64, Growth, double)
}
