// What limits.py holds the engines against: the same ensembles, written by hand in C++.
//
// Compiled for one field and one precision (-DFIELD=Lorenz, -DSINGLE). Lanes are the entries of
// a vector register; `M` registers of trajectories take turns within a step, so that the latency of
// one is hidden by the others. An adaptive lane has its own step, and takes the next trajectory
// when it has finished one. No return codes, no limit of steps, no other times than the end.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "limits_fields.hpp"

//
// Methods
//

struct RK4 {
    static constexpr int s = 4;
    static constexpr real c[4] = {0, .5, .5, 1};
    static constexpr real b[4] = {1. / 6, 1. / 3, 1. / 3, 1. / 6};
    static constexpr real a[4][4] = {{}, {.5}, {0, .5}, {0, 0, 1}};
};

// Tsitouras, "Runge-Kutta pairs of order 5(4) satisfying only the first column simplifying
// assumption" (2011).
struct Tsit5 {
    static constexpr int s = 6;
    static constexpr real c[6] = {0, 0.161, 0.327, 0.9, 0.9800255409045097, 1};
    static constexpr real a[6][6] = {
        {},
        {0.161},
        {-0.008480655492356989, 0.335480655492357},
        {2.8971530571054935, -6.359448489975075, 4.3622954328695815},
        {5.325864828439257, -11.748883564062828, 7.4955393428898365, -0.09249506636175525},
        {5.86145544294642, -12.92096931784711, 8.159367898576159, -0.071584973281401,
         -0.028269050394068383}};
    static constexpr real b[6] = {0.09646076681806523, 0.01, 0.4798896504144996,
                                  1.379008574103742, -3.290069515436081, 2.324710524099774};
    static constexpr real e[7] = {-0.00178001105222577714, -0.0008164344596567469,
                                  0.007880878010261995, -0.1447110071732629,
                                  0.5823571654525552, -0.45808210592918697, 0.015151515151515152};
};

template <class Method>
static INLINE void stages(const V *y, const V *p, V t, V h, V (*k)[n], V *y2) {
    UNROLL for (int i = 1; i < Method::s; i++) {
        V at[n];
        UNROLL for (int x = 0; x < n; x++) {
            V sum = Method::a[i][i - 1] * k[i - 1][x];
            UNROLL for (int j = 0; j < i - 1; j++)
                if (Method::a[i][j] != 0) sum += Method::a[i][j] * k[j][x];
            at[x] = y[x] + h * sum;
        }
        Field::f(at, p, t + h * Method::c[i], k[i]);
    }
    UNROLL for (int x = 0; x < n; x++) {
        V sum = Method::b[0] * k[0][x];
        UNROLL for (int j = 1; j < Method::s; j++) sum += Method::b[j] * k[j][x];
        y2[x] = y[x] + h * sum;
    }
}

// Pulls `l` back through a step, to what it was at its start, and adds to the parameters'.
template <class Method>
static INLINE void pull(const V *y, const V *p, V t, V h, V *l, V *gp, V *gs) {
    constexpr int s = Method::s;
    V at[s][n], k[s][n], lk[s][n];
    UNROLL for (int i = 0; i < s; i++) {
        UNROLL for (int x = 0; x < n; x++) {
            V sum = V{};
            UNROLL for (int j = 0; j < i; j++)
                if (Method::a[i][j] != 0) sum += Method::a[i][j] * k[j][x];
            at[i][x] = y[x] + h * sum;
        }
        if (i < s - 1) Field::f(at[i], p, t + h * Method::c[i], k[i]);
    }
    UNROLL for (int i = 0; i < s; i++)
        UNROLL for (int x = 0; x < n; x++) lk[i][x] = h * Method::b[i] * l[x];
    UNROLL for (int i = s - 1; i >= 0; i--) {
        V g[n];
        Field::vjp(at[i], p, t + h * Method::c[i], lk[i], g, gp, gs);
        UNROLL for (int x = 0; x < n; x++) {
            l[x] += g[x];
            UNROLL for (int j = 0; j < i; j++)
                if (Method::a[i][j] != 0) lk[j][x] += h * Method::a[i][j] * g[x];
        }
    }
}

// Trajectories from `first` on as vectors, the last one in lanes beyond.
template <int K>
static INLINE void gathered(V *v, const real *from, long first, long count) {
    for (int l = 0; l < L; l++) {
        long i = first + l < count ? first + l : count - 1;
        for (int x = 0; x < K; x++) v[x][l] = from[i * K + x];
    }
}
template <int K>
static INLINE void scattered(const V *v, real *to, long first, long count) {
    for (int l = 0; l < L && first + l < count; l++)
        for (int x = 0; x < K; x++) to[(first + l) * K + x] = v[x][l];
}

//
// Fixed steps
//

template <int M>
static void fixed(long count, const real *u0, const real *p0, real t1, long steps, real *out) {
    V y[M][n], p[M][P1];
    const real h = t1 / steps;
    for (long first = 0; first < count; first += M * L) {
        for (int m = 0; m < M; m++) {
            gathered<n>(y[m], u0, first + m * L, count);
            gathered<NP>(p[m], p0, first + m * L, count);
        }
        for (long i = 0; i < steps; i++) {
            UNROLL for (int m = 0; m < M; m++) {
                V k[RK4::s][n], y2[n];
                V t = spread(i * h);
                Field::f(y[m], p[m], t, k[0]);
                stages<RK4>(y[m], p[m], t, spread(h), k, y2);
                UNROLL for (int x = 0; x < n; x++) y[m][x] = y2[x];
            }
        }
        for (int m = 0; m < M; m++) scattered<n>(y[m], out, first + m * L, count);
    }
}

// Of half the sum of the squares of the end states.
static void fixed_gradient(
    long count, const real *u0, const real *p0, real t1, long steps, real *out, real *gu, real *gp,
    real *gs) {
    const real h = t1 / steps;
    std::vector<V> record(steps * n);
    V to_shared[S1] = {};
    for (long first = 0; first < count; first += L) {
        V y[n], p[P1], l[n], lp[P1] = {};
        gathered<n>(y, u0, first, count);
        gathered<NP>(p, p0, first, count);
        for (long i = 0; i < steps; i++) {
            V k[RK4::s][n], y2[n];
            for (int x = 0; x < n; x++) record[i * n + x] = y[x];
            Field::f(y, p, spread(i * h), k[0]);
            stages<RK4>(y, p, spread(i * h), spread(h), k, y2);
            for (int x = 0; x < n; x++) y[x] = y2[x];
        }
        scattered<n>(y, out, first, count);
        for (int x = 0; x < n; x++)
            for (int i = 0; i < L; i++) l[x][i] = first + i < count ? y[x][i] : 0;
        for (long i = steps - 1; i >= 0; i--)
            pull<RK4>(&record[i * n], p, spread(i * h), spread(h), l, lp, to_shared);
        scattered<n>(l, gu, first, count);
        scattered<NP>(lp, gp, first, count);
    }
    for (int x = 0; x < NS; x++)
        for (int i = 0; i < L; i++) gs[x] += to_shared[x][i];
}

//
// Adaptive steps: the controller of ensembleode/solvers/step_size.py, with one power less
//

static INLINE V logarithm(V error) {
    F x = __builtin_convertvector(error, F);
    J bits = (J)x;
    J half = (bits & 0x00400000) != 0;
    F s = (F)((bits & 0x007FFFFF) | (half ? J{} + 0x3F000000 : J{} + 0x3F800000)) - 1.0f;
    F w = __builtin_convertvector(((bits >> 23) & 0xFF) - (half ? J{} + 126 : J{} + 127), F);
    return __builtin_convertvector(w + s * (0.338953f * s + 2.198599f) / (s + 1.523692f), V);
}
static INLINE V power(V exponent) {
    F x = __builtin_convertvector(exponent, F);
    x = x < -126.0f ? F{} - 126.0f : x > 126.0f ? F{} + 126.0f : x;
    J w = __builtin_convertvector(x + 127.5f, J) - 127;  // to the nearest
    F r = x - __builtin_convertvector(w, F);
    F v = F{} + 1.5252733e-5f;
    const float c[] = {1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 0.24022651f,
                       0.69314718f, 1.0f};
    UNROLL for (int i = 0; i < 7; i++) v = v * r + c[i];
    return __builtin_convertvector(v * (F)((w + 127) << 23), V);
}

static INLINE V norm_squared(const V *values, const V *a, const V *b, real tol) {
    V sum = V{};
    UNROLL for (int x = 0; x < n; x++) {
        V z = values[x] / (tol + tol * maximum(absolute(a[x]), absolute(b[x])));
        sum += z * z;
    }
    return sum / real(n);
}

static void first_steps(
    long first, long count, const real *u0, const real *p0, real t1, real tol, real *h0) {
    V y[n], p[P1], k[n], k2[n], y2[n];
    gathered<n>(y, u0, first, count);
    gathered<NP>(p, p0, first, count);
    Field::f(y, p, V{}, k);
    V d0 = root(norm_squared(y, y, y, tol)), d1 = root(norm_squared(k, y, y, tol));
    V probe = (d0 < real(1e-5)) | (d1 < real(1e-5)) ? spread(1e-6) : real(0.01) * d0 / d1;
    for (int x = 0; x < n; x++) y2[x] = y[x] + probe * k[x];
    Field::f(y2, p, probe, k2);
    for (int x = 0; x < n; x++) k2[x] -= k[x];
    V most = maximum(d1, root(norm_squared(k2, y, y, tol)) / probe);
    for (int l = 0; l < L; l++) {
        real dt = std::pow(real(10), -(2 + std::log10(most[l])) / 5);
        if (most[l] <= real(1e-15)) dt = std::fmax(real(1e-6), real(1e-3) * probe[l]);
        h0[l] = std::fmin(t1, std::fmin(100 * probe[l], dt));
    }
}

struct Record {  // an accepted step: from where, and how far
    real y[n], t, h;
};

template <int M>
static long adaptive(
    long count, const real *u0, const real *p0, real t1, real tol, real *out,
    std::vector<std::vector<Record>> *records) {
    struct Lanes {
        V y[n], k[n], p[P1], t, h, memory;
        I active;
    } lanes[M];
    long index[M][L], next = 0, left = count, tries = 0;
    const real least = 0.08 * std::log2(1e-4), final = t1;
    std::vector<real> h0((count / L + 1) * L);
    for (long i = 0; i < count; i += L) first_steps(i, count, u0, p0, t1, tol, &h0[i]);
    auto take = [&](Lanes &a, int m, int l) {
        bool some = next < count;
        index[m][l] = some ? next : -1;
        long i = some ? next++ : 0;
        for (int x = 0; x < n; x++) a.y[x][l] = u0[i * n + x];
        for (int x = 0; x < NP; x++) a.p[x][l] = p0[i * NP + x];
        a.t[l] = 0, a.h[l] = h0[i], a.memory[l] = least, a.active[l] = some ? -1 : 0;
    };
    auto begin = [&](Lanes &a, I fresh) {
        V k[n];
        Field::f(a.y, a.p, a.t, k);
        for (int x = 0; x < n; x++) a.k[x] = fresh ? k[x] : a.k[x];
    };
    for (int m = 0; m < M; m++) {
        for (int l = 0; l < L; l++) take(lanes[m], m, l);
        begin(lanes[m], lanes[m].active | -1);
    }
    while (left) {
        UNROLL for (int m = 0; m < M; m++) {
            Lanes &a = lanes[m];
            V k[Tsit5::s][n], k7[n], y2[n], error[n];
            V room = final - a.t;
            I is_last = a.h >= room * real(1 - 1e-6);
            V h = is_last ? room : a.h;
            UNROLL for (int x = 0; x < n; x++) k[0][x] = a.k[x];
            stages<Tsit5>(a.y, a.p, a.t, h, k, y2);
            Field::f(y2, a.p, a.t + h, k7);
            UNROLL for (int x = 0; x < n; x++) {
                V sum = Tsit5::e[6] * k7[x];
                UNROLL for (int j = 0; j < 6; j++) sum += Tsit5::e[j] * k[j][x];
                error[x] = h * sum;
            }
            V squared = norm_squared(error, a.y, y2, tol);
            I accepted = (squared <= 1) & a.active;
            V log_error = real(0.5) * logarithm(squared);
            V exponent = real(-0.14) * log_error + (accepted ? a.memory : V{});
            V factor = real(0.9) * power(exponent);
            factor = minimum(maximum(factor, spread(0.2)), spread(10));
            if (records)
                for (int l = 0; l < L; l++)
                    if (accepted[l]) {
                        Record r;
                        for (int x = 0; x < n; x++) r.y[x] = a.y[x][l];
                        r.t = a.t[l], r.h = h[l];
                        (*records)[index[m][l]].push_back(r);
                    }
            UNROLL for (int x = 0; x < n; x++) {
                a.y[x] = accepted ? y2[x] : a.y[x];
                a.k[x] = accepted ? k7[x] : a.k[x];
            }
            a.t = accepted ? (is_last ? spread(final) : a.t + h) : a.t;
            a.memory = accepted ? maximum(real(0.08) * log_error, spread(least)) : a.memory;
            a.h = h * factor;
            I ended = accepted & is_last;
            tries += L;
            if (__builtin_expect(any(ended), 0)) {
                for (int l = 0; l < L; l++)
                    if (ended[l]) {
                        for (int x = 0; x < n; x++) out[index[m][l] * n + x] = a.y[x][l];
                        left--;
                        take(a, m, l);
                    }
                begin(a, ended);
            }
        }
    }
    return tries;
}

static void adaptive_gradient(
    long count, const real *u0, const real *p0, real t1, real tol, real *out, real *gu, real *gp,
    real *gs) {
    std::vector<std::vector<Record>> records(count < 256 ? count : 256);
    V to_shared[S1] = {};
    for (long start = 0; start < count; start += 256) {
        long size = count - start < 256 ? count - start : 256, next = 0, left = size, index[L];
        for (auto &x : records) x.clear();
        adaptive<1>(size, u0 + start * n, p0 + start * NP, t1, tol, out + start * n, &records);
        V y[n], p[P1], l[n], lp[P1], t, h;
        auto take = [&](int i) {
            bool some = next < size;
            index[i] = some ? next : -1;
            long j = start + (some ? next++ : 0);
            for (int x = 0; x < n; x++) l[x][i] = some ? out[j * n + x] : 0;
            for (int x = 0; x < NP; x++) p[x][i] = p0[j * NP + x], lp[x][i] = 0;
            for (int x = 0; x < n; x++) y[x][i] = u0[j * n + x];
            t[i] = h[i] = 0;
        };
        for (int i = 0; i < L; i++) take(i);
        while (left) {
            for (int i = 0; i < L; i++) {
                while (index[i] >= 0 && records[index[i]].empty()) {
                    long j = start + index[i];
                    for (int x = 0; x < n; x++) gu[j * n + x] = l[x][i];
                    for (int x = 0; x < NP; x++) gp[j * NP + x] = lp[x][i];
                    left--;
                    take(i);
                }
                if (index[i] < 0) continue;
                Record &r = records[index[i]].back();
                for (int x = 0; x < n; x++) y[x][i] = r.y[x];
                t[i] = r.t, h[i] = r.h;
                records[index[i]].pop_back();
            }
            pull<Tsit5>(y, p, t, h, l, lp, to_shared);
        }
    }
    for (int x = 0; x < NS; x++)
        for (int i = 0; i < L; i++) gs[x] += to_shared[x][i];
}

//
// For Python: `registers` is `M`, zero for the gradient; the tries, as many as lanes did
//

extern "C" long solve(
    int registers, int is_adaptive, long count, const real *u0, const real *p, const real *weights,
    double t1, double step_or_tol, real *out, real *gu, real *gp, real *gs) {
    shared = weights;
    long steps = is_adaptive ? 0 : std::lround(t1 / step_or_tol);
    if (!registers) {
        std::memset(gs, 0, S1 * sizeof(real));
        if (is_adaptive) adaptive_gradient(count, u0, p, t1, step_or_tol, out, gu, gp, gs);
        else fixed_gradient(count, u0, p, t1, steps, out, gu, gp, gs);
        return 0;
    }
    auto run = [&](auto m) -> long {
        constexpr int M = decltype(m)::value;
        if (is_adaptive) return adaptive<M>(count, u0, p, t1, step_or_tol, out, nullptr);
        fixed<M>(count, u0, p, t1, steps, out);
        return count * steps;
    };
    // (Registers of a large state are too few as it is.)
    if (registers == 1 || n > 12) return run(std::integral_constant<int, 1>());
    if (registers == 2) return run(std::integral_constant<int, 2>());
    return run(std::integral_constant<int, 4>());
}
