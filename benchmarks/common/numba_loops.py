"""Loops written by hand in Numba."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

import ensembleode as eo


def fields(njit: Callable) -> dict[str, Callable]:
    """`f(u, p, t, du)`, by the name in limits.cpp; `<` ends it."""

    @njit
    def lorenz(u, p, t, du):
        du[0] = 10 * (u[1] - u[0])
        du[1] = u[0] * (p[0] - u[2]) - u[1]
        du[2] = u[0] * u[1] - p.dtype.type(8 / 3) * u[2]

    @njit
    def pendulum(u, p, t, du):
        du[0] = u[1]
        du[1] = -math.sin(u[0]) - p[0] * u[1]

    @njit
    def van_der_pol(u, p, t, du):
        du[0] = u[1]
        du[1] = p[0] * (1 - u[0] * u[0]) * u[1] - u[0]

    @njit
    def keller_miksis(u, c, t, du):
        x, v, angle = u[0], u[1], 2.0 * math.pi * t
        moving = 1.0 + c[7] * v
        above = (c[0] + c[1] * v) * math.exp(-4.2 * math.log(x)) - c[2] * moving
        above -= (c[3] + c[4] * v) / x + (1.5 - 0.5 * c[7] * v) * v * v
        above -= c[5] * math.sin(angle) * moving + c[6] * math.cos(angle) * x
        du[0] = v
        du[1] = above / (x - c[7] * x * v + c[4] * c[7])

    @njit
    def lorenz_96(u, p, t, du):
        n = len(u)
        du[0] = (u[1] - u[n - 2]) * u[n - 1] - u[0] + p[0]
        du[1] = (u[2] - u[n - 1]) * u[0] - u[1] + p[0]
        for i in range(2, n - 1):
            du[i] = (u[i + 1] - u[i - 2]) * u[i - 1] - u[i] + p[0]
        du[n - 1] = (u[0] - u[n - 3]) * u[n - 2] - u[n - 1] + p[0]

    @njit
    def network(u, p, t, du):
        du[0], du[1] = p[250], p[251]
        for j in range(50):
            h = math.tanh(p[2 * j] * u[0] + p[2 * j + 1] * u[1] + p[100 + j])
            du[0] += p[150 + j] * h
            du[1] += p[200 + j] * h

    return {
        "Lorenz": lorenz,
        "Pendulum": pendulum,
        "VanDerPol": van_der_pol,
        "KellerMiksis": keller_miksis,
        "Lorenz96": lorenz_96,
        "Network": network,
    }


def loop(numba: Any, case: Any, real: Any) -> Callable:
    """A loop over trajectories, one after the other: RK4 for fixed steps, otherwise Tsit5.

    `solve(u0, p)` returns the end states and the number of steps tried of all trajectories.
    """
    njit = numba.njit(fastmath=True, error_model="numpy", forceinline=True)
    f = fields(njit)[case.cpp.split("<")[0]]
    n, size = case.u0.shape
    shares = case.shares_p

    if case.dt:
        steps, h = round(case.t1 / case.dt), real(case.dt)
        half, third, sixth = real(case.dt / 2), real(case.dt / 3), real(case.dt / 6)

        @numba.njit(fastmath=True, error_model="numpy")
        def solve(u0, p):
            out, at = u0.copy(), np.empty(size, u0.dtype)
            k1, k2, k3, k4 = np.empty_like(at), np.empty_like(at), np.empty_like(at), at.copy()
            for i in range(n):
                y, own = out[i], p[0 if shares else i]
                for step in range(steps):
                    t = step * h
                    f(y, own, t, k1)
                    for c in range(size):
                        at[c] = y[c] + half * k1[c]
                    f(at, own, t + half, k2)
                    for c in range(size):
                        at[c] = y[c] + half * k2[c]
                    f(at, own, t + half, k3)
                    for c in range(size):
                        at[c] = y[c] + h * k3[c]
                    f(at, own, t + h, k4)
                    for c in range(size):
                        y[c] += sixth * (k1[c] + k4[c]) + third * (k2[c] + k3[c])
            return out, n * steps

        return solve

    solve = adaptive(numba, f, size, case.t1, case.tol, real)
    kept = np.empty((n, 0), real)
    return lambda u0, p: solve(u0, p, kept)


def adaptive(
    numba: Any,
    f: Callable,
    size: int,
    t1: float,
    tol: float,
    real: Any,
    event: Callable | None = None,
    act: Callable | None = None,
) -> Callable:
    """Tsit5, one trajectory after the other. `solve(u0, p, kept)` returns the end states and the
    number of steps tried of all trajectories; `p` has a row for each, or one that all share.

    Events are found by `event(y, end, k, h, kept)`. It returns the fraction of the step from `y` to
    `end` at which an event is, and a number above 1 if there is none. The step ends at the event,
    and `act(y, k, h, theta, kept)` sets `y` to the state after it. The row of `kept` of the
    trajectory is for the use of both functions.
    """
    compiled = numba.njit(fastmath=True, error_model="numpy", forceinline=True)
    event = event or compiled(lambda y, end, k, h, kept: real(2))
    act = act or compiled(lambda y, k, h, theta, kept: None)
    tableau = eo.Tsit5().tableau
    rows = np.zeros((6, 6), real)
    for i, row in enumerate(tableau.a):
        rows[i, : len(row)] = row
    nodes, errors = np.array(tableau.c[1:], real), np.array(tableau.error, real)
    half, one, t1 = real(0.5), real(1), real(t1)
    tol, beta1, beta2 = (real(x) for x in (tol, 7 / 50, 2 / 25))
    least = beta2 * real(math.log(1e-4))
    a = tuple(map(tuple, rows.tolist()))
    (a1, *_), (b1, b2, *_), (c1, c2, c3, *_), (d1, d2, d3, d4, *_), (e1, e2, e3, e4, e5, _) = (
        tuple(real(x) for x in row) for row in a[:5]
    )
    f1, f2, f3, f4, f5, f6 = (real(x) for x in a[5])
    g1, g2, g3, g4, g5, g6, g7 = (real(x) for x in errors)
    n1, n2, n3, n4 = (real(x) for x in nodes[:4])

    @numba.njit(fastmath=True, error_model="numpy")
    def solve(u0, p, kept):
        out, tried = u0.copy(), 0
        k = np.empty((7, size), u0.dtype)
        at = np.empty(size, u0.dtype)
        for i in range(len(out)):
            y, own = out[i], p[i % len(p)]
            t, h, before = real(0), real(1e-4), least
            f(y, own, t, k[0])
            while t < t1:
                tried += 1
                last = h >= (t1 - t) * real(1 - 1e-6)
                h = t1 - t if last else h
                for c in range(size):
                    at[c] = y[c] + h * (a1 * k[0, c])
                f(at, own, t + n1 * h, k[1])
                for c in range(size):
                    at[c] = y[c] + h * (b1 * k[0, c] + b2 * k[1, c])
                f(at, own, t + n2 * h, k[2])
                for c in range(size):
                    at[c] = y[c] + h * (c1 * k[0, c] + c2 * k[1, c] + c3 * k[2, c])
                f(at, own, t + n3 * h, k[3])
                for c in range(size):
                    s = d1 * k[0, c] + d2 * k[1, c] + d3 * k[2, c] + d4 * k[3, c]
                    at[c] = y[c] + h * s
                f(at, own, t + n4 * h, k[4])
                for c in range(size):
                    s = e1 * k[0, c] + e2 * k[1, c] + e3 * k[2, c] + e4 * k[3, c] + e5 * k[4, c]
                    at[c] = y[c] + h * s
                f(at, own, t + h, k[5])
                for c in range(size):
                    s = f1 * k[0, c] + f2 * k[1, c] + f3 * k[2, c] + f4 * k[3, c]
                    at[c] = y[c] + h * (s + f5 * k[4, c] + f6 * k[5, c])
                f(at, own, t + h, k[6])
                total = real(0)
                for c in range(size):
                    s = g1 * k[0, c] + g2 * k[1, c] + g3 * k[2, c] + g4 * k[3, c]
                    s = h * (s + g5 * k[4, c] + g6 * k[5, c] + g7 * k[6, c])
                    s /= tol + tol * max(abs(y[c]), abs(at[c]))
                    total += s * s
                error = total / size
                log = half * math.log(error)
                if error <= one:
                    theta = event(y, at, k, h, kept[i])
                    if theta <= one:
                        act(y, k, h, theta, kept[i])
                        t += theta * h
                        f(y, own, t, k[0])
                        before = max(beta2 * log, least)
                        continue
                    t = t1 if last else t + h
                    factor = real(0.9) * math.exp(before - beta1 * log)
                    before = max(beta2 * log, least)
                    h *= min(max(factor, real(0.2)), real(10))
                    for c in range(size):
                        y[c], k[0, c] = at[c], k[6, c]
                else:
                    h *= max(real(0.9) * math.exp(-beta1 * log), real(0.2))
        return out, tried

    return solve


def lorenz_lanes(numba: Any, real: Any, dt: float, lanes: int = 64) -> Callable:
    """Fixed steps of Tsit5 on Lorenz, with the lanes innermost: LLVM makes vector instructions of
    them."""
    compiled = numba.njit(fastmath=True, error_model="numpy", forceinline=True)
    rows = eo.Tsit5().tableau.a  # The last is that of the result.
    coefficients = tuple(tuple(real(dt * x) for x in row) for row in rows)
    (a1,), (b1, b2), (c1, c2, c3), (d1, d2, d3, d4), (e1, e2, e3, e4, e5) = coefficients[:5]
    f1, f2, f3, f4, f5, f6 = coefficients[5]
    sigma, beta = real(10.0), real(8.0 / 3.0)

    @compiled
    def field(x, y, z, rho):
        return sigma * (y - x), x * (rho - z) - y, x * y - beta * z

    @compiled
    def second(u, k1):
        return u + a1 * k1

    @compiled
    def third(u, k1, k2):
        return u + b1 * k1 + b2 * k2

    @compiled
    def fourth(u, k1, k2, k3):
        return u + c1 * k1 + c2 * k2 + c3 * k3

    @compiled
    def fifth(u, k1, k2, k3, k4):
        return u + d1 * k1 + d2 * k2 + d3 * k3 + d4 * k4

    @compiled
    def sixth(u, k1, k2, k3, k4, k5):
        return u + e1 * k1 + e2 * k2 + e3 * k3 + e4 * k4 + e5 * k5

    @compiled
    def after(u, k1, k2, k3, k4, k5, k6):
        return u + f1 * k1 + f2 * k2 + f3 * k3 + f4 * k4 + f5 * k5 + f6 * k6

    @compiled
    def step(x, y, z, rho):
        p, q, r = field(x, y, z, rho)
        x2, y2, z2 = second(x, p), second(y, q), second(z, r)
        p2, q2, r2 = field(x2, y2, z2, rho)
        x3, y3, z3 = third(x, p, p2), third(y, q, q2), third(z, r, r2)
        p3, q3, r3 = field(x3, y3, z3, rho)
        x4, y4, z4 = fourth(x, p, p2, p3), fourth(y, q, q2, q3), fourth(z, r, r2, r3)
        p4, q4, r4 = field(x4, y4, z4, rho)
        x5, y5 = fifth(x, p, p2, p3, p4), fifth(y, q, q2, q3, q4)
        p5, q5, r5 = field(x5, y5, fifth(z, r, r2, r3, r4), rho)
        x6, y6 = sixth(x, p, p2, p3, p4, p5), sixth(y, q, q2, q3, q4, q5)
        p6, q6, r6 = field(x6, y6, sixth(z, r, r2, r3, r4, r5), rho)
        return (
            after(x, p, p2, p3, p4, p5, p6),
            after(y, q, q2, q3, q4, q5, q6),
            after(z, r, r2, r3, r4, r5, r6),
        )

    @compiled
    def kernel(u0, rhos, steps):
        n = len(rhos)
        out = np.empty((n, 3), rhos.dtype)
        x, y, z = (
            np.empty(lanes, rhos.dtype),
            np.empty(lanes, rhos.dtype),
            np.empty(lanes, rhos.dtype),
        )
        rho = np.zeros(lanes, rhos.dtype)
        for first in range(0, n, lanes):
            width = min(lanes, n - first)
            x[:], y[:], z[:] = u0[0], u0[1], u0[2]
            rho[:width] = rhos[first : first + width]
            for _ in range(steps):
                for i in range(lanes):
                    x[i], y[i], z[i] = step(x[i], y[i], z[i], rho[i])
            for i in range(width):
                out[first + i, 0], out[first + i, 1], out[first + i, 2] = x[i], y[i], z[i]
        return out

    return kernel
