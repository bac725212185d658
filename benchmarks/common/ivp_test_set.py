"""Problems of the "Test Set for IVP Solvers" (Mazzia and Magherini, University of Bari, 2008), each
with its rate constants, or the values of its circuit, as parameters.

A field gives its components one by one, over whatever it is computed with: `Problem.f` is the field
over JAX arrays.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np


class Problem(NamedTuple):
    """From `u0` at 0 to `end`, where the published solution is, if there is one."""

    components: Callable
    u0: Sequence[float]
    end: float
    constants: Sequence[float]
    published: Sequence[float] | None

    @property
    def f(self):
        return lambda u, p, t: jnp.stack(self.components(u, p, t))


def constants_of(problem, copies):
    """Those of the problem, then ones perturbed by about 10%: `[copies + 1, constants]`."""
    constants = np.asarray(problem.constants)
    noise = np.random.default_rng(0).normal(size=(copies, len(constants)))
    return np.concatenate([constants[None], constants * np.exp(0.1 * noise)])


def hires(u, p, t):
    """High irradiance response of a plant: 8 species."""
    y1, y2, y3, y4, y5, y6, y7, y8 = u
    bound = p[0] * y6 * y8
    return [
        -p[1] * y1 + p[2] * y2 + p[3] * y3 + p[4],
        p[1] * y1 - p[5] * y2,
        -p[6] * y3 + p[2] * y4 + p[7] * y5,
        p[3] * y2 + p[1] * y3 - p[8] * y4,
        -p[9] * y5 + p[2] * (y6 + y7),
        -bound + p[10] * (y4 + y7) + p[1] * y5 - p[2] * y6,
        bound - p[11] * y7,
        -bound + p[11] * y7,
    ]


def rober(u, p, t):
    """Robertson's autocatalytic reaction: 3 species, over eleven decades of time."""
    a, b = p[0] * u[0] - p[2] * u[1] * u[2], p[1] * u[1] ** 2
    return [-a, a - b, b]


def orego(u, p, t):
    """The Oregonator, an oscillating reaction."""
    x, y, z = u
    return [p[0] * (y + x * (1 - p[1] * x - y)), (z - (1 + x) * y) / p[0], p[2] * (x - z)]


def vdp(u, p, t):
    """Van der Pol's oscillator, mu = 1000, in its own time."""
    return [u[1], p[0] * (1 - u[0] ** 2) * u[1] - u[0]]


def e5(u, p, t):
    """A pyrolysis, over thirteen decades of time, with rates apart by twenty; `p` is A, B, C and
    the product of M and C.

    Without the third species, the difference of the second and the fourth. With it as a component,
    rounding in what solves with the Jacobian changes that difference by more than the 1e-22 that
    is left at the end.
    """
    y1, y2, y4 = u
    y3 = y2 - y4
    starts, on, back, ends = p[0] * y1, p[1] * y1 * y3, p[2] * y4, p[3] * y2 * y3
    return [-starts - on, starts - ends, on - back]


def ring_modulator(u, p, t):
    """A circuit of four diodes: 7 voltages, 8 currents; `p` is C, Cs, Cp, R, Rp, Lh, Ls1, Ls2, Ls3,
    Rg1, Rg2, Rg3, Ri, Rc, gamma and delta."""
    c, cs, cp, r, rp, lh, ls1, ls2, ls3, rg1, rg2, rg3, ri, rc, gamma, delta = p
    u1, u2, u3, u4, u5, u6, u7, i1, i2, i3, i4, i5, i6, i7, i8 = u
    signal, carrier = 0.5 * jnp.sin(2e3 * jnp.pi * t), 2 * jnp.sin(2e4 * jnp.pi * t)

    def diode(voltage):
        return gamma * (jnp.exp(delta * voltage) - 1)

    d1, d2 = diode(u3 - u5 - u7 - carrier), diode(-u4 + u6 - u7 - carrier)
    d3, d4 = diode(u4 + u5 + u7 + carrier), diode(-u3 - u6 + u7 + carrier)
    return [
        (i1 - 0.5 * i3 + 0.5 * i4 + i7 - u1 / r) / c,
        (i2 - 0.5 * i5 + 0.5 * i6 + i8 - u2 / r) / c,
        (i3 - d1 + d4) / cs,
        (-i4 + d2 - d3) / cs,
        (i5 + d1 - d3) / cs,
        (-i6 - d2 + d4) / cs,
        (-u7 / rp + d1 + d2 - d3 - d4) / cp,
        -u1 / lh,
        -u2 / lh,
        (0.5 * u1 - u3 - rg2 * i3) / ls2,
        (-0.5 * u1 + u4 - rg3 * i4) / ls3,
        (0.5 * u2 - u5 - rg2 * i5) / ls2,
        (-0.5 * u2 + u6 - rg3 * i6) / ls3,
        (-u1 + signal - (ri + rg1) * i7) / ls1,
        (-u2 - (rc + rg1) * i8) / ls1,
    ]


def pollu(u, p, t):
    """Air pollution: 25 reactions of 20 species."""
    y = (None, *u)
    k = (None, *p)
    r = (
        None,
        k[1] * y[1],
        k[2] * y[2] * y[4],
        k[3] * y[5] * y[2],
        k[4] * y[7],
        k[5] * y[7],
        k[6] * y[7] * y[6],
        k[7] * y[9],
        k[8] * y[9] * y[6],
        k[9] * y[11] * y[2],
        k[10] * y[11] * y[1],
        k[11] * y[13],
        k[12] * y[10] * y[2],
        k[13] * y[14],
        k[14] * y[1] * y[6],
        k[15] * y[3],
        k[16] * y[4],
        k[17] * y[4],
        k[18] * y[16],
        k[19] * y[16],
        k[20] * y[17] * y[6],
        k[21] * y[19],
        k[22] * y[19],
        k[23] * y[1] * y[4],
        k[24] * y[19] * y[1],
        k[25] * y[20],
    )
    return [
        -r[1] - r[10] - r[14] - r[23] - r[24]
        + (r[2] + r[3] + r[9] + r[11] + r[12] + r[22] + r[25]),
        -r[2] - r[3] - r[9] - r[12] + r[1] + r[21],
        -r[15] + r[1] + r[17] + r[19] + r[22],
        -r[2] - r[16] - r[17] - r[23] + r[15],
        -r[3] + 2 * r[4] + r[6] + r[7] + r[13] + r[20],
        -r[6] - r[8] - r[14] - r[20] + r[3] + 2 * r[18],
        -r[4] - r[5] - r[6] + r[13],
        r[4] + r[5] + r[6] + r[7],
        -r[7] - r[8],
        -r[12] + r[7] + r[9],
        -r[9] - r[10] + r[8] + r[11],
        r[9],
        -r[11] + r[10],
        -r[13] + r[12],
        r[14],
        -r[18] - r[19] + r[16],
        -r[20],
        r[20],
        -r[21] - r[22] - r[24] + r[23] + r[25],
        -r[25] + r[24],
    ]  # fmt: skip


PROBLEMS = {
    "HIRES": Problem(
        hires,
        [1.0, 0, 0, 0, 0, 0, 0, 0.0057],
        321.8122,
        [280.0, 1.71, 0.43, 8.32, 0.0007, 8.75, 10.03, 0.035, 1.12, 1.745, 0.69, 1.81],
        [
            *(0.7371312573325668e-3, 0.1442485726316185e-3, 0.5888729740967575e-4),
            *(0.1175651343283149e-2, 0.2386356198831331e-2, 0.6238968252742796e-2),
            *(0.2849998395185769e-2, 0.2850001604814231e-2),
        ],
    ),
    "ROBER": Problem(
        rober,
        [1.0, 0, 0],
        1e11,
        [0.04, 3e7, 1e4],
        [0.2083340149701255e-7, 0.8333360770334713e-13, 0.9999999791665050],
    ),
    "OREGO": Problem(
        orego,
        [1.0, 2, 3],
        360.0,
        [77.27, 8.375e-6, 0.161],
        [0.1000814870318523e1, 0.1228178521549917e4, 0.1320554942846706e3],
    ),
    "VDP": Problem(
        vdp, [2.0, 0], 2000.0, [1e3], [0.1706167732170469e1, -0.8928097010248125e-3]
    ),
    "POLLU": Problem(
        pollu,
        [0, 0.2, 0, 0.04, 0, 0, 0.1, 0.3, 0.01, 0, 0, 0, 0, 0, 0, 0, 0.007, 0, 0, 0],
        60.0,
        [
            *(0.35, 0.266e2, 0.123e5, 0.86e-3, 0.82e-3, 0.15e5, 0.13e-3, 0.24e5, 0.165e5),
            *(0.9e4, 0.22e-1, 0.12e5, 0.188e1, 0.163e5, 0.48e7, 0.35e-3, 0.175e-1, 0.1e9),
            *(0.444e12, 0.124e4, 0.21e1, 0.578e1, 0.474e-1, 0.178e4, 0.312e1),
        ],
        [
            *(0.5646255480022769e-1, 0.1342484130422339, 0.4139734331099427e-8),
            *(0.5523140207484359e-2, 0.2018977262302196e-6, 0.1464541863493966e-6),
            *(0.7784249118997964e-1, 0.3245075353396018, 0.7494013383880406e-2),
            *(0.1622293157301561e-7, 0.1135863833257075e-7, 0.2230505975721359e-2),
            *(0.2087162882798630e-3, 0.1396921016840158e-4, 0.8964884856898295e-2),
            *(0.4352846369330103e-17, 0.6899219696263405e-2, 0.1007803037365946e-3),
            *(0.1772146513969984e-5, 0.5682943292316392e-4),
        ],
    ),
    "E5": Problem(
        e5,
        [1.76e-3, 0, 0],
        1e13,
        [7.89e-10, 1.1e7, 1.13e3, 1.13e9],
        # (Published are 8.868e-23 and 8.855e-23 of the second and the third, whose difference is
        # rounding: this is their mean.)
        [0.1152903278711829e-290, 0.8861235071955479e-22, 0],
    ),
    "RING": Problem(
        ring_modulator,
        [0.0] * 15,
        1e-3,
        [
            *(1.6e-8, 2e-12, 1e-8, 25e3, 50.0, 4.45, 2e-3, 5e-4, 5e-4),
            *(36.3, 17.3, 17.3, 50.0, 600.0, 40.67286402e-9, 17.7493332),
        ],
        [
            *(-0.2339057358486745e-1, -0.7367485485540825e-2, 0.2582956709291169),
            *(-0.4064465721283450, -0.4039455665149794, 0.2607966765422943),
            *(0.1106761861269975, 0.2939904342435596e-6, -0.2840029933642329e-7),
            *(0.7267198267264553e-3, 0.7929487196960840e-3, -0.7255283495698965e-3),
            *(-0.7941401968526521e-3, 0.7088495416976114e-4, 0.2390059075236570e-4),
        ],
    ),
}  # fmt: skip
