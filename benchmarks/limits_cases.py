"""The ensembles of limits.py. Their fields compute with the module `xp` that they are given, and
return a list of components."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from common.tasks import lorenz_components, Task


@dataclasses.dataclass(frozen=True)
class Case:
    """An ensemble from 0 to `t1`; with `dt` its steps are fixed, otherwise at `tol`.

    `u0 [n, component]`; `p [n, ...]`, or `[...]` where `shares_p`; `cpp`: its name in limits.cpp.
    """

    f: Callable
    u0: np.ndarray
    p: np.ndarray
    t1: float
    cpp: str | None
    dt: float | None = None
    tol: float | None = None
    shares_p: bool = False
    dtypes: tuple[str, ...] = ("float64", "float32")
    has_gradient: bool = True

    @property
    def n(self) -> int:
        return len(self.u0)

    def field(self, u, p, t):
        return jnp.stack(self.f(jnp, u, p, t))

    def task(self, dtype: str) -> Task:
        return Task(
            self.field,
            np.ascontiguousarray(self.u0, dtype),
            np.ascontiguousarray(self.p, dtype),
            ("u0",) if self.shares_p else ("u0", "p"),
            self.n,
            self.t1,
            dt=self.dt,
            rtol=self.tol,
            atol=self.tol,
        )


def lorenz(xp, u, p, t):
    return lorenz_components(u, p[0])


def pendulum(xp, u, p, t):
    return [u[1], -xp.sin(u[0]) - p[0] * u[1]]


def van_der_pol(xp, u, p, t):
    return [u[1], p[0] * (1.0 - u[0] * u[0]) * u[1] - u[0]]


def keller_miksis(xp, u, c, t):
    inverse, angle = 1.0 / u[0], 2.0 * np.pi * t
    power = xp.exp(-4.2 * xp.log(u[0]))
    moving = 1.0 + c[7] * u[1]
    above = (
        (c[0] + c[1] * u[1]) * power
        - c[2] * moving
        - (c[3] + c[4] * u[1]) * inverse
        - (1.5 - 0.5 * c[7] * u[1]) * u[1] * u[1]
        - c[5] * xp.sin(angle) * moving
        - c[6] * xp.cos(angle) * u[0]
    )
    return [u[1], above / (u[0] - c[7] * u[0] * u[1] + c[4] * c[7])]


def bubbles(frequencies, pressure=1.5e5):
    """The constants of the bubble's equation, radii and times over those of equilibrium and of a
    period."""
    density, ambient, vapour, tension = 997.0639504998557, 1e5, 3166.775638952003, 0.071977583160056
    radius, gamma, sound, viscosity = 10e-6, 1.4, 1497.251785455527, 8.902125058209557e-4
    omega = 2.0 * np.pi * frequencies
    scale = 2.0 * np.pi / (radius * omega)
    gas = ambient - vapour + 2.0 * tension / radius
    return np.stack(
        [
            gas / density * scale**2,
            (1.0 - 3.0 * gamma) / (density * sound) * gas * scale,
            (ambient - vapour) / density * scale**2,
            2.0 * tension / (density * radius) * scale**2,
            4.0 * viscosity / (density * radius**2) * 2.0 * np.pi / omega,
            pressure / density * scale**2,
            radius * omega * pressure / (density * sound) * scale**2,
            radius * omega / (2.0 * np.pi * sound),
        ],
        axis=1,
    )


def lorenz_96(xp, u, p, t):
    n = len(u) if isinstance(u, list | tuple) else u.shape[0]
    return [(u[(i + 1) % n] - u[i - 2]) * u[i - 1] - u[i] + p[0] for i in range(n)]


class Network:
    """2 -> 50 -> 2, tanh, its weights in one row (as limits.cpp has them)."""

    def field(self, u, p, t):
        w1, b1, w2, b2 = p[:100].reshape(50, 2), p[100:150], p[150:250].reshape(2, 50), p[250:]
        return w2 @ jnp.tanh(w1 @ u + b1) + b2

    def __call__(self, xp, u, p, t):
        hidden = [xp.tanh(p[2 * j] * u[0] + p[2 * j + 1] * u[1] + p[100 + j]) for j in range(50)]
        return [
            sum(p[150 + 50 * i + j] * hidden[j] for j in range(50)) + p[250 + i] for i in (0, 1)
        ]


class NetworkCase(Case):
    def field(self, u, p, t):
        return self.f.field(u, p, t)


def of_lorenz_96(size: int, n: int, t1: float, kind: type[Case] = Case) -> Case:
    """`n` trajectories of so many components, with forcings of their own."""
    u0, forcings = np.tile(np.sin(np.arange(size)), (n, 1)), np.linspace(2.0, 8.0, n)[:, None]
    return kind(lorenz_96, u0, forcings, t1, f"Lorenz96<{size}>", tol=1e-6)


def cases(quick: bool) -> dict[str, Case]:
    def many(n):
        return n // 16 if quick else n

    def starts(u0, n):
        return np.tile(np.array(u0, np.float64), (n, 1))

    n, rng = many(4096), np.random.default_rng(0)
    rhos = np.linspace(0.0, 21.0, n)[:, None]
    found = {
        "lorenz-rk4": Case(lorenz, starts([1, 0, 0], n), rhos, 1.0, "Lorenz", dt=1e-3),
        "pendulum-rk4": Case(
            pendulum,
            starts([2, 0], n),
            np.linspace(0.0, 0.5, n)[:, None],
            10.0,
            "Pendulum",
            dt=1e-2,
        ),
        "lorenz-tsit5": Case(lorenz, starts([1, 0, 0], n), rhos, 10.0, "Lorenz", tol=1e-6),
    }
    n = many(2048)
    stiffness, u0 = np.geomspace(0.1, 60.0, n)[:, None], starts([2, 0], n)
    for name, p in (("even", stiffness), ("shuffled", rng.permutation(stiffness))):
        case = Case(van_der_pol, u0, p, 10.0, "VanDerPol", tol=1e-6)
        found[f"van-der-pol-{name}"] = case
    n = many(1024)
    for size in (10, 20, 40):
        found[f"lorenz-96-{size}"] = of_lorenz_96(size, n, 2.0)
    weights = rng.normal(size=252) * np.repeat([0.7, 0.7, 0.2, 0.1], [100, 50, 100, 2])
    found["network"] = NetworkCase(
        Network(), rng.normal(size=(n, 2)), weights, 3.0, "Network", tol=1e-6, shares_p=True
    )
    found["bubble"] = Case(
        keller_miksis,
        starts([1, 0], n),
        bubbles(np.geomspace(20e3, 1e6, n)),
        3.0,
        "KellerMiksis",
        tol=1e-10,
        dtypes=("float64",),
        has_gradient=False,
    )
    return found
