"""Primitives, as functions with example arguments, and vector fields as users write them."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..problems import lotka_volterra, with_reverse_rule
from .drawn import reals


#
# Primitives: functions of one trajectory
#


def ints(*shape, low=-5, high=6):
    return np.random.default_rng(len(shape)).integers(low, high, shape)


def bools(*shape):
    return np.random.default_rng(7).integers(0, 2, shape).astype(bool)


X, Y, POSITIVE, UNIT = reals(3), reals(3, low=-1.5), reals(3, low=0.5), reals(3, low=-0.9, high=0.9)
INTS, COUNTS, B, C = ints(3), ints(3, low=1), bools(3), bools(3)[::-1]
M = reals(3, 2)

UNARY: dict[str, tuple[Callable, np.ndarray]] = {
    "abs": (lax.abs, X),
    "acos": (lax.acos, UNIT),
    "acosh": (lax.acosh, 1 + POSITIVE),
    "asin": (lax.asin, UNIT),
    "asinh": (lax.asinh, X),
    "atan": (lax.atan, X),
    "atanh": (lax.atanh, UNIT),
    "bessel_i0e": (lax.bessel_i0e, X),
    "bessel_i1e": (lax.bessel_i1e, X),
    "cbrt": (lax.cbrt, X),
    "ceil": (lax.ceil, X),
    "conj": (lambda x: lax.conj(lax.complex(x, x)), X),
    "copy": (jnp.copy, X),
    "convert_element_type": (lambda x: x.astype(jnp.int32), 3 * X),
    "cos": (lax.cos, X),
    "cosh": (lax.cosh, X),
    "digamma": (lax.digamma, POSITIVE),
    "erf": (lax.erf, X),
    "erf_inv": (lax.erf_inv, UNIT),
    "erfc": (lax.erfc, X),
    "exp": (lax.exp, X),
    "exp2": (lax.exp2, X),
    "expm1": (lax.expm1, X),
    "floor": (lax.floor, X),
    "imag": (lambda x: lax.imag(lax.complex(x, 2 * x)), X),
    "is_finite": (lambda x: lax.is_finite(1 / jnp.floor(x)), X),
    "lgamma": (lax.lgamma, POSITIVE),
    "log": (lax.log, POSITIVE),
    "log1p": (lax.log1p, POSITIVE),
    "log2": (jnp.log2, POSITIVE),
    "logistic": (lax.logistic, X),
    "neg": (lax.neg, X),
    "not": (lax.bitwise_not, B),
    "one_minus_square": (lambda x: jax.jvp(jnp.tanh, (x,), (x,)), X),
    "polynomial": (lambda x: jnp.polyval(x, x), X),
    "population_count": (lax.population_count, COUNTS),
    "real": (lambda x: lax.real(lax.complex(x, 2 * x)), X),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 8, 7), X),
    "round": (lax.round, 4 * X),
    "rsqrt": (lax.rsqrt, POSITIVE),
    "sign": (lax.sign, X),
    "sin": (lax.sin, X),
    "sinh": (lax.sinh, X),
    "sqrt": (lax.sqrt, POSITIVE),
    "square": (lax.square, X),
    "stop_gradient": (lax.stop_gradient, X),
    "tan": (lax.tan, X),
    "tanh": (lax.tanh, X),
}
BINARY: dict[str, tuple] = {
    "add": (lax.add, X, Y),
    "and": (lax.bitwise_and, B, C),
    "atan2": (lax.atan2, X, Y),
    "clz": (lambda x, y: lax.clz(x) + y, COUNTS, COUNTS),
    "complex": (lax.complex, X, Y),
    "div": (lax.div, X, Y),
    "eq": (lax.eq, INTS, COUNTS),
    "ge": (lax.ge, X, Y),
    "gt": (lax.gt, X, Y),
    "igamma": (lax.igamma, POSITIVE, POSITIVE),
    "igammac": (lax.igammac, POSITIVE, POSITIVE),
    "le": (lax.le, INTS, COUNTS),
    "lt": (lax.lt, X, Y),
    "max": (lax.max, X, Y),
    "min": (lax.min, X, Y),
    "mul": (lax.mul, X, Y),
    "mulhi": (lambda x, y: lax.mulhi(x, y) if hasattr(lax, "mulhi") else x, INTS, COUNTS),
    "ne": (lax.ne, INTS, COUNTS),
    "nextafter": (lax.nextafter, X, Y),
    "or": (lax.bitwise_or, B, C),
    "polygamma": (lax.polygamma, np.array([1.0, 2.0, 3.0]), POSITIVE),
    "pow": (lax.pow, POSITIVE, X),
    "rem": (lax.rem, INTS, COUNTS),
    "shift_left": (lax.shift_left, INTS, COUNTS),
    "shift_right_arithmetic": (lax.shift_right_arithmetic, INTS, COUNTS),
    "shift_right_logical": (lax.shift_right_logical, INTS, COUNTS),
    "sub": (lax.sub, X, Y),
    "xor": (lax.bitwise_xor, B, C),
    "zeta": (lax.zeta, 1 + POSITIVE, POSITIVE),
}


@jax.custom_jvp
def cubed(x, y):
    return x**3, y


@cubed.defjvp
def _(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    return cubed(x, y), (jnp.cos(x) * dx, dy + 0 * x.sum())


def _nested(x):
    def step(carry, z):
        return carry * z + 1, (carry, z.sum())

    return lax.scan(step, x[0], x)


CASES: dict[str, list[tuple]] = {name: [case] for name, case in (UNARY | BINARY).items()}
CASES |= {
    "add_any": [(lambda x: jax.grad(lambda z: jnp.sum(jnp.sin(z) * z))(x), X)],
    "argmax": [(lambda x: jnp.argmax(x, 0), M), (lambda x: jnp.argmax(x), X)],
    "argmin": [(lambda x: jnp.argmin(x, 1), M)],
    "broadcast_in_dim": [
        (lambda x: jnp.broadcast_to(x[:, None], (3, 4)), X),
        (lambda x: jnp.full((2, 3), x), X[0].reshape(())),
        (lambda x: jnp.broadcast_to(x, (90,)), X[0].reshape(1)),
    ],
    "clamp": [
        (lax.clamp, -abs(X), Y, abs(X)),
        (lambda x, low: lax.clamp(low, x, 1.0), X, X[0].reshape(())),
    ],
    "concatenate": [
        (lambda x, y: jnp.concatenate([x, y], 1), M, reals(3, 1)),
        (lambda x, y: jnp.concatenate([x, y]), X, reals(1)),
    ],
    "cond": [
        (lambda x, y: lax.cond(x[0] > y[0], lambda: (x, y.sum()), lambda: (y, x[1])), X, Y),
        (lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, jnp.exp], x), np.int64(1), X),
        (lambda x: lax.cond(True, jnp.sin, jnp.cos, x), X),
    ],
    "cumlogsumexp": [(lambda x: lax.cumlogsumexp(x, 0), M)],
    "cummax": [(lambda x: lax.cummax(x, 0), M)],
    "cummin": [(lambda x: lax.cummin(x, 1, reverse=True), M)],
    "cumprod": [(lambda x: jnp.cumprod(x), X)],
    "cumsum": [
        (lambda x: jnp.cumsum(x[:0]), X),
        (lambda x: jnp.cumsum(x, 0), M),
        (lambda x: lax.cumsum(x, 0, reverse=True), X),
    ],
    "custom_jvp_call": [(cubed, X, Y), (jax.nn.relu, M), (jax.nn.softplus, X)],
    "dot_general": [
        (lambda a, x: a @ x, reals(2, 3), X),
        (lambda x, a: x @ a, X, M),
        (jnp.dot, X, Y),
        (lambda a, b: a @ b, reals(2, 3), M),
        (lambda a, b: a @ b, reals(5, 6), reals(6, 4)),
        (lambda a, x: a @ x, reals(8, 9), reals(9)),
        (lambda x, a: x @ a, reals(9), reals(9, 7)),
        (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), reals(2, 3, 4), reals(2, 4, 3)),
        (lambda a, x: jnp.einsum("bij,bj->bi", a, x), reals(2, 9, 4), reals(2, 4)),
        (lambda x, a: jnp.einsum("bj,bij->bi", x, a), reals(2, 4), reals(2, 9, 4)),
        (lambda a, b: jnp.einsum("ij,jk->ki", a, b), reals(5, 6), reals(6, 4)),
        (jnp.outer, X, reals(20)),
    ],
    "dynamic_slice": [
        (lambda x: lax.dynamic_slice(x, (1, 1), (2, 1)), M),
        (lambda x, i: x[i], X, np.int64(-1)),
        (lambda x, i: lax.dynamic_slice(x, (i,), (2,)), X, np.int64(2)),
        (lambda x, i: x[i], reals(30), np.int64(17)),
        (lambda x, i: x[i], M, np.int64(2)),
    ],
    "dynamic_update_slice": [
        (lambda x, y: lax.dynamic_update_slice(x, y, (2,)), X, reals(2)),
        (lambda x, y, i: lax.dynamic_update_slice(x, y, (i, 0)), M, reals(2, 1), np.int64(1)),
    ],
    "eq_to": [(lambda x: lax.eq_to_p.bind(x, x[::-1]), X)],
    "gather": [
        (lambda x: x[np.array([2, 0, -1])], X),
        (lambda x: x[np.array([[2, 0], [1, 1]])], M),
        (lambda x: x[np.array([0, 2]), np.array([1, 0])], M),
        (lambda x: x.at[np.array([1, 7])].get(mode="fill"), X),
        (lambda x: x.at[np.array([1, 7])].get(mode="clip"), X),
        (lambda x: x.at[np.array([1, 7])].get(mode="fill", fill_value=3), INTS),
        (lambda x, i: x[i], M, np.array([2, 1])),
        (lambda x: jnp.take_along_axis(x, np.array([[1, 0], [0, 1], [1, 1]]), 1), M),
    ],
    "integer_pow": [(lambda x, n=n: x**n, X) for n in (2, 3, 5, 7, -1, -3)],
    "iota": [
        (lambda x: x + lax.broadcasted_iota(jnp.float64, (3, 2), 1), M),
        (lambda x: jnp.sum(x) + jnp.arange(70.0), X),
    ],
    "jit": [(jax.jit(lambda x: jnp.sin(x) * 2), X), (lambda x: jnp.where(x > 0, x, 1.0), X)],
    "le_to": [(lambda x: lax.le_to_p.bind(x, x[::-1]), X)],
    "lt_to": [(lambda x: lax.lt_to_p.bind(x, x[::-1]), X)],
    "pad": [
        (lambda x: jnp.pad(x, 1), M),
        (lambda x: lax.pad(x, 2.0, [(1, -1, 2)]), X),
        (lambda x: lax.pad(x, 2.0, [(-1, 2, 0), (0, 0, 1)]), M),
        (lambda x, y: lax.pad(x, y, [(1, 1, 0)]), X, np.float64(3)),
    ],
    "reduce": [
        (lambda x: lax.reduce(x, 5.0, lax.add, (0,)), X),
        (lambda x: lax.reduce(x, 0.5, lax.max, (1,)), M),
        (lambda x: lax.reduce(x, -1.0, lambda a, b: a + b * b, (0, 1)), M),
        (lambda x: lax.reduce(x, 2.0, lax.mul, (0,)), reals(30, 3)),
        (
            lambda x, i: lax.reduce(
                (x, i), (5.0, np.int64(1)), lambda a, b: (a[0] + b[0], lax.max(a[1], b[1])), (0,)
            ),
            X,
            INTS,
        ),
    ],
    "reduce_and": [(lambda x: jnp.all(x, 0), bools(3, 2))],
    "reduce_max": [(lambda x: jnp.max(x, 1), M), (jnp.max, X)],
    "reduce_min": [(lambda x: jnp.min(x, 0), M)],
    "reduce_or": [(jnp.any, bools(3, 2))],
    "reduce_prod": [(lambda x: jnp.prod(x, 0), M)],
    "reduce_sum": [
        (lambda x: jnp.sum(x, 1), M),
        (lambda x: jnp.sum(x, (0, 2)), reals(2, 3, 2)),
        (lambda x: jnp.sum(x[:0]), X),
    ],
    "reduce_window": [
        (lambda x: lax.reduce_window(x, 5.0, lax.add, (3,), (1,), "VALID"), X),
        (lambda x: lax.reduce_window(x, 0.5, lax.max, (2, 1), (1, 1), "SAME"), M),
    ],
    "reduce_xor": [(lambda x: lax.reduce(x, np.int64(0), lax.bitwise_xor, (0,)), ints(3, 2))],
    "regularized_incomplete_beta": [(lax.betainc, POSITIVE, POSITIVE, abs(UNIT))],
    "remat2": [(jax.checkpoint(lambda x: jnp.sin(x) * 2), X)],
    "reshape": [
        (lambda x: x.reshape(2, 3), M),
        (lambda x: x.reshape(-1), M),
        (lambda x: lax.reshape(x, (6,), (1, 0)), M),
        (lambda x: lax.reshape(x, (4, 40), (2, 0, 1)), reals(2, 20, 4)),
    ],
    "rev": [(lambda x: x[::-1], M), (lambda x: jnp.flip(x), M)],
    "scan": [
        (_nested, M),
        (lambda x: lax.scan(lambda c, z: (c + z, c * z), x, None, length=0) if 0 else x, X),
        (lambda x: lax.scan(lambda c, z: (c + z, c), x[0], x, reverse=True), X),
        (lambda x: lax.fori_loop(0, 3, lambda i, z: z * x[i], x), X),
        (lambda x: lax.fori_loop(0, 90, lambda i, z: 0.9 * jnp.roll(z, 1) + i, x), X),
        (lambda x: lax.scan(lambda c, z: (c + z, jnp.outer(c, z)), x, reals(2, 3)), X),
        (lambda x, y: lax.scan(lambda c, z: (c + z, z), y, x), reals(2, 40), reals(40)),
    ],
    "scatter": [
        (lambda x: x.at[1].set(5.0), X),
        (lambda x: x.at[np.array([0, 5])].set(5.0, mode="drop"), X),
        (lambda x, y: x.at[:, 1].set(y), M, X),
        (lambda x, y: x.at[1:].set(y), X, reals(2)),
        (lambda x, y, i: x.at[i].set(y), X, np.float64(3), np.int64(2)),
    ],
    "scatter-add": [
        (lambda x, y: x.at[np.array([0, 0, 2])].add(y), X, Y),
        (lambda x, y, i: x.at[i].add(y), M, reals(2), np.int64(2)),
    ],
    "scatter-sub": [(lambda x: x.at[1].subtract(5.0), X)],
    "scatter-max": [(lambda x: x.at[np.array([1, 2])].max(0.5), X)],
    "scatter-min": [(lambda x: x.at[np.array([1, 2])].min(0.5), X)],
    "scatter-mul": [(lambda x: x.at[np.array([1, 2])].multiply(0.5), X)],
    "select_n": [
        (lambda b, x, y: lax.select_n(b, x, y), B, X, Y),
        (lambda b, x, y: lax.select_n(b, x, y), np.bool_(True), X, Y),
        (lambda i, x, y: lax.select_n(i, x, y, x * y), np.array([0, 1, 2], np.int32), X, Y),
        (lambda x, y: jnp.where(np.array([True, False, True]), x, y), X, Y),
    ],
    "slice": [(lambda x: x[1:], X), (lambda x: x[::2, 1:], M), (lambda x: x[:0], X)],
    "sort": [(lambda x: jnp.sort(x, 0), M), (lambda x, y: lax.sort((x, y), num_keys=1), X, Y)],
    "split": [(lambda x: jnp.split(x, [1], 0), M), (lambda x: jnp.split(x, 2, 1), M)],
    "squeeze": [(lambda x: jnp.squeeze(x, 1), reals(3, 1))],
    "stack": [(lambda x, y: jnp.stack([x, y], 1), X, Y)],
    "tile": [(lambda x: jnp.tile(x, (1, 2)), M), (lambda x: lax.tile(x, (2,)), X)],
    "transpose": [(lambda x: x.T, M), (lambda x: x.transpose(2, 0, 1), reals(2, 3, 2))],
    "unstack": [(lambda x: tuple(x), X), (lambda x: jnp.unstack(x, axis=1), M)],
}


#
# Fields
#


TABLE = np.array([0.3, -1.0, 2.0, 0.5, 0.1])
rng = np.random.default_rng(0)
MATRIX, BIG_MATRIX = rng.normal(size=(3, 3)), rng.normal(size=(30, 30))
WIDE = jnp.asarray(rng.normal(size=(50,)))
NET = eqx.nn.MLP(2, 2, 50, 1, activation=jnp.tanh, key=jax.random.key(0))
RELU_NET = eqx.nn.MLP(2, 2, 16, 2, activation=jax.nn.relu, key=jax.random.key(1))


def van_der_pol(u, p, t):
    return jnp.array([u[1], p * (1 - u[0] ** 2) * u[1] - u[0]])


def arenstorf(u, p, t):
    q, v = u[:2], u[2:]
    mu = 0.012277471
    d1 = jnp.linalg.norm(q + jnp.array([mu, 0.0])) ** 3
    d2 = jnp.sum((q - jnp.array([1 - mu, 0.0])) ** 2) ** 1.5
    pull = (1 - mu) * (q + jnp.array([mu, 0.0])) / d1 + mu * (q - jnp.array([1 - mu, 0.0])) / d2
    return jnp.concatenate([v, q + 2 * jnp.array([v[1], -v[0]]) - pull])


def rigid_body(u, p, t):
    return p * u[np.array([1, 2, 0])] * jnp.roll(u, 1)


def linear(u, p, t):
    return jnp.asarray(MATRIX) @ u + jnp.einsum("ij,j->i", p, u)


def big_linear(u, p, t):
    return u @ jnp.asarray(BIG_MATRIX) - p * u


def matrix_state(u, p, t):
    return p @ u - u.T @ p + jnp.trace(u) * jnp.eye(2)


def big_matrix_state(u, p, t):
    return p @ u + u @ p - jnp.tanh(u).T


def reaction_diffusion(u, p, t):
    laplacian = jnp.roll(u, 1) + jnp.roll(u, -1) - 2 * u
    return p * laplacian + u * (1 - u).at[0].set(0.0)


def lorenz96(u, p, t):
    return (jnp.roll(u, -1) - jnp.roll(u, 2)) * jnp.roll(u, 1) - u + p


def branches(u, p, t):
    near = jnp.where(u > 0, u, 0.1 * u)
    return lax.cond(u[0] * t > 0, lambda: jnp.sin(near) * p, lambda: near**3)


def shared_branch(u, p, t):
    return lax.cond(p[0] > 0, lambda: jnp.sqrt(p) * u, lambda: u)


def loops(u, p, t):
    last, seen = lax.scan(lambda c, x: (c * x + t, c), u[0], u)
    polynomial = lax.fori_loop(0, 3, lambda i, z: z * 0.5 + p[i], u)
    return polynomial + last + jnp.cumsum(seen) + u[::-1]


def long_loop(u, p, t):
    return lax.fori_loop(0, 50, lambda i, z: z + 0.01 * jnp.sin(z) * p, u)


def while_loop(u, p, t):
    # Not reverse-differentiable, in JAX either.
    return lax.while_loop(lambda z: jnp.sum(z**2) > 0.1, lambda z: 0.7 * z, u) * p


def updates(u, p, t):
    v = jnp.zeros_like(u).at[0].set(u[1]).at[1:].add(p * u[:-1])
    return v.at[-1].multiply(2.0) + jnp.clip(u, -1, 1) + jnp.pad(u[:1], (1, 1))


def forced(u, p, t):
    wind = jnp.interp(t, jnp.linspace(-2.0, 2.0, 5), jnp.asarray(TABLE))
    rain = jnp.interp(t, jnp.linspace(-2.0, 2.0, 50), WIDE)
    return -p * u + wind * jnp.exp(-(t**2)) + rain


def quadrature(u, p, t):
    return p * jnp.sum(jnp.exp(-u * WIDE**2)) - u


def activations(u, p, t):
    return jax.nn.softplus(p * u) - jax.nn.relu(u) + jax.nn.sigmoid(t) * jax.nn.gelu(u)


def sorting(u, p, t):
    return jnp.sort(u) * p + jnp.linalg.solve(jnp.diag(2 + u**2), u)


def checkpointed(u, p, t):
    return jax.checkpoint(lambda u: jnp.sin(p * u))(u)


def constant(u, p, t):
    return jnp.array([1.0, 2.0])


def only_time(u, p, t):
    return jnp.full(2, t) * p


def closed_over_network(u, p, t):
    return NET(u)


def universal(u, p, t):
    return lotka_volterra(u, p, t) + RELU_NET(u)


@jax.custom_jvp
def with_rule(x):
    return jnp.sin(x)


@with_rule.defjvp
def _(primals, tangents):
    return with_rule(*primals), 7 * tangents[0] * primals[0]


def custom_rules(u, p, t):
    return with_rule(p * u) + with_rule(u[0]) * p


def custom_reverse_rules(u, p, t):
    return with_reverse_rule(p * u) + with_reverse_rule(u[0]) * p


# Each with the shape of its state, and its parameters; beside those of fields.py.
FIELDS = {
    "activations": (activations, (3,), 0.5),
    "activations_array": (activations, (30,), 0.5),
    "arenstorf": (arenstorf, (4,), ()),
    "big_linear": (big_linear, (30,), 0.2),
    "big_matrix_state": (big_matrix_state, (5, 5), rng.normal(size=(5, 5))),
    "branches": (branches, (3,), 0.5),
    "branches_array": (branches, (30,), 0.5),
    "checkpointed": (checkpointed, (2,), 0.5),
    "closed_over_network": (closed_over_network, (2,), ()),
    "constant": (constant, (2,), ()),
    "custom_reverse_rules": (custom_reverse_rules, (2,), 0.5),
    "custom_reverse_rules_array": (custom_reverse_rules, (30,), 0.5),
    "custom_rules": (custom_rules, (2,), 0.5),
    "custom_rules_array": (custom_rules, (30,), 0.5),
    "forced": (forced, (2,), 0.5),
    "linear": (linear, (3,), rng.normal(size=(3, 3))),
    "long_loop": (long_loop, (2,), 0.5),
    "loops": (loops, (4,), rng.normal(size=3)),
    "loops_array": (loops, (30,), rng.normal(size=3)),
    "lorenz96": (lorenz96, (40,), 8.0),
    "matrix_state": (matrix_state, (2, 2), rng.normal(size=(2, 2))),
    "number": (lambda u, p, t: -p * u + t, (), 0.5),
    "only_time": (only_time, (2,), 0.5),
    "quadrature": (quadrature, (), 0.5),
    "reaction_diffusion": (reaction_diffusion, (8,), 0.5),
    "reaction_diffusion_array": (reaction_diffusion, (40,), 0.5),
    "rigid_body": (rigid_body, (3,), rng.normal(size=3)),
    "shared_branch": (shared_branch, (2,), np.array([0.5, 0.7])),
    "sorting": (sorting, (3,), 0.5),
    "sorting_array": (sorting, (25,), 0.5),
    "universal": (universal, (2,), tuple(rng.uniform(size=4))),
    "updates": (updates, (3,), 0.5),
    "van_der_pol": (van_der_pol, (2,), 3.0),
    "while_loop": (while_loop, (2,), 0.5),
}
