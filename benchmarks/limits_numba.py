"""The loops of limits.py in Numba: one trajectory after the other."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np


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


def loop(numba: Any, case: Any, tableau: Any, real: Any) -> Callable:
    """`solve(u0, p)` gives the end states and the steps tried, of all."""
    njit = numba.njit(fastmath=True, error_model="numpy", forceinline=True)
    f = fields(njit)[case.cpp.split("<")[0]]
    n, size = case.u0.shape
    one, t1, shares = real(1), real(case.t1), case.shares_p

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

    rows = np.zeros((6, 6), real)
    for i, row in enumerate(tableau.a):
        rows[i, : len(row)] = row
    nodes, errors = np.array(tableau.c[1:], real), np.array(tableau.error, real)
    tol, beta1, beta2, least = (real(x) for x in (case.tol, 7 / 50, 2 / 25, 1e-4))
    a = tuple(map(tuple, rows.tolist()))
    (a1, *_), (b1, b2, *_), (c1, c2, c3, *_), (d1, d2, d3, d4, *_), (e1, e2, e3, e4, e5, _) = (
        tuple(real(x) for x in row) for row in a[:5]
    )
    f1, f2, f3, f4, f5, f6 = (real(x) for x in a[5])
    g1, g2, g3, g4, g5, g6, g7 = (real(x) for x in errors)
    n1, n2, n3, n4 = (real(x) for x in nodes[:4])

    @numba.njit(fastmath=True, error_model="numpy")
    def adaptive(u0, p):
        out, tried = u0.copy(), 0
        k = np.empty((7, size), u0.dtype)
        at = np.empty(size, u0.dtype)
        for i in range(n):
            y, own = out[i], p[0 if shares else i]
            t, h, before = real(0), real(1e-4), real(least**beta2)
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
                error = math.sqrt(total / size)
                power = error**beta1
                if error <= one:
                    t = t1 if last else t + h
                    q = min(max(power / before / real(0.9), real(0.1)), real(5))
                    before = max(error, least) ** beta2
                    for c in range(size):
                        y[c], k[0, c] = at[c], k[6, c]
                else:
                    q = min(power / real(0.9), real(5))
                h /= q
        return out, tried

    return adaptive
