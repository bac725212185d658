// What events.py holds the engine against: the relief valve, written by hand in C++, one trajectory
// after the other.
//
// Steps of Tsit5 and their control as in limits.cpp, in scalars. Events are looked for at the ends
// of steps only, by the signs of two components, and found to the last float on the interpolant of
// the method.

#include <algorithm>
#include <cmath>

constexpr int n = 3, s = 7;
constexpr double c[s] = {0, 0.161, 0.327, 0.9, 0.9800255409045097, 1, 1};
constexpr double a[s][6] = {
    {},
    {0.161},
    {-0.008480655492356989, 0.335480655492357},
    {2.8971530571054935, -6.359448489975075, 4.3622954328695815},
    {5.325864828439257, -11.748883564062828, 7.4955393428898365, -0.09249506636175525},
    {5.86145544294642, -12.92096931784711, 8.159367898576159, -0.071584973281401,
     -0.028269050394068383},
    {0.09646076681806523, 0.01, 0.4798896504144996, 1.379008574103742, -3.290069515436081,
     2.324710524099774}};
constexpr double e[s] = {-0.00178001105222577714, -0.0008164344596567469, 0.007880878010261995,
                         -0.1447110071732629,     0.5823571654525552,     -0.45808210592918697,
                         0.015151515151515152};
// Of the weights of the stages within a step, by powers of theta, from the first.
constexpr double w[s][4] = {
    {1, -2.763706197274826, 2.9132554618219126, -1.0530884977290216},
    {0, 0.1317, -0.2234, 0.1017},
    {0, 3.9302962368947516, -5.941033872131505, 2.490627285651253},
    {0, -12.411077166933676, 30.33818863028232, -16.548102889244902},
    {0, 37.50931341651104, -88.1789048947664, 47.37952196281928},
    {0, -27.896526289197286, 65.09189467479366, -34.87065786149661},
    {0, 1.5, -4, 2.5}};

static inline void f(const double *y, double q, double *dy) {
    dy[0] = y[1];
    dy[1] = -1.25 * y[1] - (y[0] + 10) + y[2];
    dy[2] = 20 * (q - y[0] * std::sqrt(y[2]));
}

static inline double norm_squared(const double *x, const double *y, const double *y2, double tol) {
    double sum = 0;
    for (int i = 0; i < n; i++) {
        double z = x[i] / (tol + tol * std::max(std::fabs(y[i]), std::fabs(y2[i])));
        sum += z * z;
    }
    return sum / n;
}

static double first_step(const double *y, const double *k, double q, double t1, double tol) {
    double d0 = std::sqrt(norm_squared(y, y, y, tol)), d1 = std::sqrt(norm_squared(k, y, y, tol));
    double probe = d0 < 1e-5 || d1 < 1e-5 ? 1e-6 : 0.01 * d0 / d1, y2[n], k2[n];
    for (int i = 0; i < n; i++) y2[i] = y[i] + probe * k[i];
    f(y2, q, k2);
    for (int i = 0; i < n; i++) k2[i] -= k[i];
    double most = std::max(d1, std::sqrt(norm_squared(k2, y, y, tol)) / probe);
    return std::min({t1, 100 * probe, std::pow(10.0, -(2 + std::log10(most)) / 5)});
}

struct Dense {
    double y, h, k[s];
    double operator()(double theta) const {
        double sum = 0;
        for (int j = 0; j < s; j++)
            sum += k[j] * (theta * (w[j][0] + theta * (w[j][1] + theta * (w[j][2] + theta * w[j][3]))));
        return y + h * sum;
    }
};

// The last theta at which the component is still positive, up to rounding: by the method of
// Illinois.
static double crossing(const Dense &at, double y1) {
    double lo = 0, hi = 1, flo = at.y, fhi = y1;
    if (flo <= 0) {  // an event of the same kind has just been there
        lo = 1e-2, flo = at(lo);
        if (flo <= 0) return 0;
    }
    int side = 0;
    for (int i = 0; i < 100 && hi - lo > 2e-16; i++) {
        double x = (lo * fhi - hi * flo) / (fhi - flo);
        if (!(x > lo && x < hi) || i % 8 == 7) x = 0.5 * (lo + hi);
        double fx = at(x);
        if (fx > 0) {
            if (side == 1) fhi *= 0.5;
            lo = x, flo = fx, side = 1;
        } else {
            if (side == -1) flo *= 0.5;
            hi = x, fhi = fx, side = -1;
        }
        if (x == 0.5 * (lo + hi) && (x == lo || x == hi)) break;
    }
    return lo;
}

// `ends [count, 3]`; `events [count, 2]`: how many impacts and sections; `sections [count, most]`:
// the opening at each. Returns the steps tried.
extern "C" long valve(
    long count, const double *qs, double t1, double tol, double restitution, long most,
    double *ends, long *events, double *sections) {
    long tries = 0;
    for (long i = 0; i < count; i++) {
        double y[n] = {0.2, 0, 10}, q = qs[i], t = 0, k[s][n];
        long impacts = 0, crossings = 0;
        f(y, q, k[0]);
        double h = first_step(y, k[0], q, t1, tol), memory = 0.08 * std::log(1e-4);
        // The signs of the two components, which at an event are those they have right after it.
        bool open = y[0] > 0, opening = y[1] > 0;
        while (t < t1) {
            bool last = h >= (t1 - t) * (1 - 1e-12);
            double step = last ? t1 - t : h, y2[n], error[n];
            for (int j = 1; j < s; j++) {
                for (int x = 0; x < n; x++) {
                    double sum = 0;
                    for (int m = 0; m < j; m++) sum += a[j][m] * k[m][x];
                    y2[x] = y[x] + step * sum;
                }
                f(y2, q, k[j]);
            }
            for (int x = 0; x < n; x++) {
                double sum = 0;
                for (int j = 0; j < s; j++) sum += e[j] * k[j][x];
                error[x] = step * sum;
            }
            tries++;
            double squared = norm_squared(error, y, y2, tol);
            double log_error = 0.5 * std::log(squared);
            if (!(squared <= 1)) {
                h = step * std::max(0.2, 0.9 * std::exp(-0.14 * log_error));
                continue;
            }
            double factor = 0.9 * std::exp(-0.14 * log_error + memory);
            memory = std::max(0.08 * log_error, 0.08 * std::log(1e-4));
            h = step * std::min(std::max(factor, 0.2), 10.0);
            bool hits = open && y2[0] <= 0, turns = opening && y2[1] <= 0;
            if (__builtin_expect(!hits && !turns, 1)) {
                t = last ? t1 : t + step;
                for (int x = 0; x < n; x++) y[x] = y2[x], k[0][x] = k[s - 1][x];
                open = y[0] > 0, opening = y[1] > 0;
                continue;
            }
            Dense dense[n];
            for (int x = 0; x < n; x++) {
                dense[x].y = y[x], dense[x].h = step;
                for (int j = 0; j < s; j++) dense[x].k[j] = k[j][x];
            }
            double first = hits ? crossing(dense[0], y2[0]) : 2;
            double second = turns ? crossing(dense[1], y2[1]) : 2;
            double theta = std::min(first, second);
            for (int x = 0; x < n; x++) y[x] = dense[x](theta);
            t += theta * step;
            if (first <= second) {
                y[1] *= -restitution;
                open = true, opening = y[1] > 0;
                impacts++;
            } else {
                if (crossings < most) sections[i * most + crossings] = y[0];
                open = y[0] > 0, opening = false;
                crossings++;
            }
            h = step;
            f(y, q, k[0]);
        }
        for (int x = 0; x < n; x++) ends[i * n + x] = y[x];
        events[2 * i] = impacts, events[2 * i + 1] = crossings;
    }
    return tries;
}
