// What stiff.py holds the engine against: Rosenbrock methods by hand, for ensembles on one core.
//
// Compiled for one field and one method (-DFIELD=ROBER, -DMETHOD=Rodas5P), with K registers of 8
// lanes a number (-DK=2). A lane is a trajectory with its own step, and takes the next when it has
// finished one. Two groups of lanes take turns, so that the controller's long chain of dependent
// operations overlaps with the other's stages. The step-size control is OrdinaryDiffEq's.
//
// M = 1 - h gamma J is factorised without pivoting, entry by entry, in an order that is found at
// compile time; its zeros are left out. No checks of the solutions, no return codes, no other times
// than the end, no field with the time in it.

#include <algorithm>
#include <cmath>

#include "stiff_lanes.hpp"

#include "stiff_fields.hpp"

constexpr int W = 8 * K, GROUPS = 2;
using P = FIELD;
constexpr int n = P::n, np = P::np;

//
// M = L U
//

// Of the factorisation: take the inverse of pivot k; scale (i, k) or (k, j) by it; update (i, j) by
// (i, k) and (k, j). Of a solution: scale entry i; subtract (i, j) times entry j.
enum Kind { Invert, ScaleL, Update, ScaleU, Scale, Subtract };
struct Operation {
    Kind kind;
    int i, j, k;
};

struct Plan {
    Operation factors[n * n * n + 9], solution[2 * n * n + 9];
    int nfactors = 0, nsolution = 0;
    bool filled[n][n] = {};

    constexpr Plan() : factors{}, solution{} {
        for (int i = 0; i < n; i++)
            for (int j = 0; j < n; j++) filled[i][j] = P::has(i, j) || i == j;
        int order[n] = {};
        bool gone[n] = {};
        for (int step = 0; step < n; step++) {  // the least product of counts first (Markowitz)
            int k = -1, least = 1 << 30;
            for (int c = 0; c < n; c++) {
                int rows = 0, columns = 0;
                for (int i = 0; i < n; i++)
                    if (!gone[i] && i != c) rows += filled[i][c], columns += filled[c][i];
                if (!gone[c] && rows * columns < least) least = rows * columns, k = c;
            }
            order[step] = k, gone[k] = true;
            factors[nfactors++] = {Invert, 0, 0, k};
            for (int i = 0; i < n; i++) {
                if (gone[i] || !filled[i][k]) continue;
                factors[nfactors++] = {ScaleL, i, 0, k};
                solution[nsolution++] = {Subtract, i, k, 0};
                for (int j = 0; j < n; j++) {
                    if (gone[j] || !filled[k][j]) continue;
                    filled[i][j] = true;
                    factors[nfactors++] = {Update, i, j, k};
                }
            }
        }
        // U has a diagonal of ones, which takes the products out of the chain of a solution.
        for (int i = 0; i < n; i++) solution[nsolution++] = {Scale, i, 0, 0};
        bool done[n] = {};
        for (int step = n - 1; step >= 0; step--) {
            int k = order[step];
            for (int j = 0; j < n; j++) {
                if (!done[j] || !filled[k][j]) continue;
                solution[nsolution++] = {Subtract, k, j, 0};
                factors[nfactors++] = {ScaleU, 0, j, k};
            }
            done[k] = true;
        }
    }
};

struct LU {
    static constexpr Plan plan{};
    V M[n][n], pivots[n];

    INLINE void factorise(const V (&J)[n][n], V hg) {
        each<n>(EACH(i) {
            each<n>(EACH(j) {
                if constexpr (P::has(i, j)) M[i][j] = double(i == j) - hg * J[i][j];
                else if constexpr (plan.filled[i][j]) M[i][j] = V(double(i == j));
            });
        });
        each<plan.nfactors>(EACH(o) {
            constexpr Operation x = plan.factors[o];
            if constexpr (x.kind == Invert) pivots[x.k] = inverse(M[x.k][x.k]);
            else if constexpr (x.kind == ScaleL) M[x.i][x.k] *= pivots[x.k];
            else if constexpr (x.kind == Update) M[x.i][x.j] -= M[x.i][x.k] * M[x.k][x.j];
            else M[x.k][x.j] *= pivots[x.k];
        });
    }
    INLINE void solve(V *b) const {
        each<plan.nsolution>(EACH(o) {
            constexpr Operation x = plan.solution[o];
            if constexpr (x.kind == Scale) b[x.i] *= pivots[x.i];
            else b[x.i] -= M[x.i][x.j] * b[x.j];
        });
    }
};

//
// Methods: a step from `u`, where the slope is `f0`, to `end`, with its error
//

// Steinebach, "Construction of Rosenbrock-Wanner method Rodas5P and numerical benchmarks within the
// Julia Differential Equations package" (2023).
struct Rodas5P {
    static constexpr int order = 5;
    static constexpr bool keeps_slope = false;
    static constexpr double beta1 = 0.14, beta2 = 0.08, g = 0.21193756319429014;
    static constexpr double a[6][5] = {
        {},
        {3.0},
        {2.849394379747939, 0.45842242204463923},
        {-6.954028509809101, 2.489845061869568, -10.358996098473584},
        {2.8029986275628964, 0.5072464736228206, -0.3988312541770524, -0.04721187230404641},
        {-7.502846399306121, 2.561846144803919, -11.627539656261098, -0.18268767659942256,
         0.030198172008377946}};
    static constexpr double c[8][7] = {
        {},
        {-14.155112264123755},
        {-17.97296035885952, -2.859693295451294},
        {147.12150275711716, -1.41221402718213, 71.68940251302358},
        {165.43517024871676, -0.4592823456491126, 42.90938336958603, -5.961986721573306},
        {24.854864614690072, -3.0009227002832186, 47.4931110020768, 5.5814197821558125,
         -0.6610691825249471},
        {30.91273214028599, -3.1208243349937974, 77.79954646070892, 34.28646028294783,
         -19.097331116725623, -28.087943162872662},
        {37.80277123390563, -3.2571969029072276, 112.26918849496327, 66.9347231244047,
         -40.06618937091002, -54.66780262877968, -9.48861652309627}};

    static INLINE void step(const V *u, const V *p, V h, const V *f0, V *end, V *error, V *) {
        V J[n][n], k[8][n], at[n], slope[n], hg = h * g;
        LU lu;
        P::jacobian(u, p, J);
        lu.factorise(J, hg);
        each<8>(EACH(s) {
            if constexpr (s == 0) {
                each<n>(EACH(i) { k[0][i] = hg * f0[i]; });
            } else {
                // (The newest last: what it waits for is long done then.)
                each<n>(EACH(i) {
                    if constexpr (s > 5) at[i] += k[s - 1][i];
                    else {
                        at[i] = u[i];
                        each<s>(EACH(j) { at[i] += a[s][j] * k[j][i]; });
                    }
                });
                P::f(at, p, slope);
                each<n>(EACH(i) {
                    V sum = (g * c[s][0]) * k[0][i];
                    each<s - 1>(EACH(j) { sum += (g * c[s][j + 1]) * k[j + 1][i]; });
                    k[s][i] = sum + hg * slope[i];
                });
            }
            lu.solve(k[s]);
        });
        each<n>(EACH(i) { error[i] = k[7][i], end[i] = at[i] + k[7][i]; });
    }
};

// Shampine and Reichelt, "The MATLAB ODE suite" (1997).
struct Rosenbrock23 {
    static constexpr int order = 2;
    static constexpr bool keeps_slope = true;
    static constexpr double beta1 = 0.35, beta2 = 0.2;
    static constexpr double g = 0.29289321881345254, e32 = 7.414213562373095;

    static INLINE void step(const V *u, const V *p, V h, const V *f0, V *end, V *error, V *f2) {
        V J[n][n], k1[n], k2[n], f1[n], at[n];
        LU lu;
        P::jacobian(u, p, J);
        lu.factorise(J, h * g);
        each<n>(EACH(i) { k1[i] = f0[i]; });
        lu.solve(k1);
        each<n>(EACH(i) { at[i] = u[i] + 0.5 * h * k1[i]; });
        P::f(at, p, f1);
        each<n>(EACH(i) { k2[i] = f1[i] - k1[i]; });
        lu.solve(k2);
        each<n>(EACH(i) { k2[i] += k1[i], end[i] = u[i] + h * k2[i]; });
        P::f(end, p, f2);
        each<n>(EACH(i) {
            error[i] = f2[i] - e32 * (k2[i] - f1[i]) - 2.0 * (k1[i] - f0[i]);
        });
        lu.solve(error);
        each<n>(EACH(i) { error[i] = h * (1 / 6.) * (k1[i] - 2.0 * k2[i] + error[i]); });
    }
};

//
// The ensemble
//

// By Hairer, Norsett and Wanner, "Solving Ordinary Differential Equations I", section II.4.
static double first_step(const double *p, double t1, double rtol, double atol) {
    double f0[n], f1[n], at[n], size = 0, slope = 0, bend = 0;
    P::f(P::u0, p, f0);
    auto unit = [&](int i) { return atol + std::fabs(P::u0[i]) * rtol; };
    for (int i = 0; i < n; i++)
        size += std::pow(P::u0[i] / unit(i), 2), slope += std::pow(f0[i] / unit(i), 2);
    size = std::sqrt(size / n), slope = std::sqrt(slope / n);
    double h0 = size < 1e-5 || slope < 1e-5 ? 1e-6 : std::min(.01 * size / slope, t1);
    for (int i = 0; i < n; i++) at[i] = P::u0[i] + h0 * f0[i];
    P::f(at, p, f1);
    for (int i = 0; i < n; i++) bend += std::pow((f1[i] - f0[i]) / unit(i), 2);
    double most = std::max(slope, std::sqrt(bend / n) / h0), h1 = std::max(1e-6, h0 * 1e-3);
    if (most > 1e-15) h1 = std::pow(10, -(2 + std::log10(most)) / METHOD::order);
    return std::min({100 * h0, h1, t1});
}

struct Group {
    V u[n], p[np], f0[n], t, h, tried;
    __m256 last[K], most[K];
    unsigned active;
    bool fresh;  // lanes have begun, whose slopes are not there yet
    long which[W];
};

struct Ensemble {
    long count;
    const double *p;
    double t1, rtol, atol, *ends;
    long *steps, next = 0, running = 0;

    void load(Group &g, int lane) {
        long s = g.which[lane] = next++;
        if (s >= count) {
            running -= g.active >> lane & 1, g.active &= ~(1u << lane);
            g.h.set(lane, 0), g.t.set(lane, t1);
            return;
        }
        for (int i = 0; i < np; i++) g.p[i].set(lane, p[s * np + i]);
        for (int i = 0; i < n; i++) g.u[i].set(lane, P::u0[i]);
        g.t.set(lane, 0), g.tried.set(lane, 0);
        g.h.set(lane, first_step(p + s * np, t1, rtol, atol));
        ((float *)g.last)[lane] = LEAST_LOG, ((float *)g.most)[lane] = 1e4f;
        running += !(g.active >> lane & 1), g.active |= 1u << lane, g.fresh = true;
    }
    __attribute__((noinline)) void finish(Group &g, unsigned over) {
        for (; over; over &= over - 1) {
            int lane = __builtin_ctz(over);
            long s = g.which[lane];
            bool arrived = g.t.get(lane) >= t1;
            for (int i = 0; i < n; i++) ends[s * n + i] = arrived ? g.u[i].get(lane) : NAN;
            steps[s] = (long)g.tried.get(lane);
            load(g, lane);
        }
    }
    INLINE void attempt(Group &g) {
        V u[n], f0[n], end[n], error[n], f2[n], t = g.t, h = minimum(g.h, t1 - t), squared(0.0);
        each<n>(EACH(i) { u[i] = g.u[i]; });
        if (!METHOD::keeps_slope || g.fresh) P::f(u, g.p, f0);
        else each<n>(EACH(i) { f0[i] = g.f0[i]; });
        METHOD::step(u, g.p, h, f0, end, error, f2);
        each<n>(EACH(i) {
            V unit = atol + rtol * maximum(absolute(u[i]), absolute(end[i]));
            V e = error[i] * roughly_inverse(unit);
            squared += e * e;
        });
        squared = squared * (1.0 / n);
        Mask accepted = at_most(squared, V(1.0));
        V arrives = t + h;
        arrives = select(at_most(t1 - arrives, V(100 * 2.3e-16 * t1)), V(t1), arrives);
        each<n>(EACH(i) { g.u[i] = select(accepted, end[i], u[i]); });
        if constexpr (METHOD::keeps_slope)
            each<n>(EACH(i) { g.f0[i] = select(accepted, f2[i], f0[i]); });
        g.fresh = false;
        g.tried += V(1.0);
        unsigned stuck = ~bits(accepted) & bits(at_most(h, 1e-16 + 1e-15 * t));
        g.t = t = select(accepted, arrives, t);
        g.h = h * growth(squared, accepted, g.last, g.most, METHOD::beta1, METHOD::beta2);
        unsigned over = bits(at_most(V(t1), t)) | stuck | bits(at_most(V(1e6), g.tried));
        if (over &= g.active) finish(g, over);
    }
};

// Ends and steps tried of `count` trajectories with parameters `p`; NaN for one that did not arrive.
extern "C" __attribute__((noinline)) void solve(
    long count, const double *p, double t1, double rtol, double atol, double *ends, long *steps) {
    static Group groups[GROUPS];
    Ensemble all{count, p, t1, rtol, atol, ends, steps};
    for (auto &g : groups) {
        for (auto &x : g.u) x = V(1.0);
        for (auto &x : g.p) x = V(1.0);
        g.active = 0;
        for (int lane = 0; lane < W; lane++) all.load(g, lane);
    }
    while (all.running > 0)
        for (auto &g : groups) all.attempt(g);
}
