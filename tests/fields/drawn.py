"""Random functions of any shapes, axes and indices, each with its arguments."""

import jax.numpy as jnp
import numpy as np
from hypothesis import assume, strategies as st
from jax import lax


MODES = ["fill", "clip", "promise_in_bounds"]
_SHAPES = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)


def reals(*shape, low=-2.0, high=2.0, dtype=np.float64):
    rng = np.random.default_rng(abs(hash((shape, low))) % 2**32)
    return rng.uniform(low, high, shape).astype(dtype)


def _elementwise(data):
    shape = data.draw(_SHAPES)
    other = tuple(data.draw(st.sampled_from([1, n])) for n in shape)
    other = data.draw(st.sampled_from([other, ()]))
    args = reals(*shape), reals(*other, low=-1.0)
    return lambda x, y: lax.sub(lax.mul(jnp.sin(x), y), x), *args


def _movement(data):
    shape = data.draw(_SHAPES)
    order = data.draw(st.permutations(range(len(shape))))
    axis = data.draw(st.integers(0, len(shape) - 1))
    starts = [data.draw(st.integers(0, n - 1)) for n in shape]
    where = tuple(slice(i, None, data.draw(st.integers(1, 2))) for i in starts)

    def fn(x):
        y = jnp.transpose(jnp.sin(x), order)
        z = jnp.concatenate([x, jnp.cos(x), x], axis)
        w = jnp.tile(x + 1, (2,) * len(shape)), jnp.roll(x, 1, axis), x[where] * 2, x[where]
        return y, jnp.flip(y, axis), z, *w, jnp.stack([x, 2 * x], axis), x.reshape(-1)[:, None] + 1

    return fn, reals(*shape)


def _reductions(data):
    shape = data.draw(_SHAPES)
    axes = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True).map(tuple))
    axis = data.draw(st.integers(0, len(shape) - 1))

    def fn(x):
        total = jnp.sum(x, axes), jnp.max(-x, axes), jnp.any(x > 0, axes), jnp.prod(x, axes)
        return *total, lax.cumsum(x, axis, reverse=bool(axes)), jnp.argmin(x, axis)

    return fn, reals(*shape)


def _products(data):
    letters = data.draw(st.lists(st.sampled_from("ijkl"), unique=True, min_size=1, max_size=4))
    sizes = data.draw(st.sampled_from([(2, 3, 1, 2), (9, 8, 1, 2), (1, 9, 2, 8), (8, 2, 9, 1)]))
    size = dict(zip("ijkl", sizes, strict=True))
    x = "".join(c for c in letters if data.draw(st.booleans()))
    y = "".join(c for c in letters[::-1] if c not in x or data.draw(st.booleans()))
    both = sorted(set(x + y))
    out = "".join(c for c in data.draw(st.permutations(both)) if data.draw(st.booleans()))
    args = (reals(*(size[c] for c in names), low=low) for names, low in ((x, -2.0), (y, -1.0)))
    return lambda a, b: jnp.einsum(f"{x},{y}->{out}", jnp.sin(a), b), *args


def _padding(data):
    n, interior = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 2))
    low, high = data.draw(st.tuples(*[st.integers(-3, 3)] * 2))
    assume(n + (n - 1) * interior + min(low, 0) + min(high, 0) >= 0 and n + low + high >= 0)
    return lambda x: lax.pad(x, -1.0, [(low, high, interior), (0, 1, 0)]), reals(n, 2)


def _where(data):
    """A shape, for each of its axes None or an index (or two), and a mode."""
    shape, mode = data.draw(_SHAPES), data.draw(st.sampled_from(MODES))
    outside = 0 if mode == "promise_in_bounds" else 2

    def index(n):
        some = st.integers(-outside - n, n - 1 + outside)
        return data.draw(st.one_of(some, st.lists(some, min_size=2, max_size=2).map(np.array)))

    return shape, [data.draw(st.sampled_from([None, index(n)])) for n in shape], mode


def _at(x, where, indices):
    remaining = iter(indices)
    return x.at[tuple(slice(None) if i is None else next(remaining) for i in where)]


def _indices(data):
    shape, where, mode = _where(data)

    def fn(x, *i):
        return _at(x, where, i).get(mode=mode), _at(x, where, i).add(5.0, mode=mode)

    return fn, reals(*shape), *(np.asarray(i) for i in where if i is not None)


def _constant_indices(data):
    shape, where, mode = _where(data)
    given = [i for i in where if i is not None]

    def fn(x, y):
        at = _at(x, where, given)
        # (Of what is set twice, the last is not said to win.)
        sets = [at.set(y, mode=mode)] if all(np.ndim(i) == 0 for i in given) else []
        return at.get(mode=mode), at.add(y, mode=mode), *sets

    return fn, reals(*shape), np.float64(5)


DRAWN = {
    "elementwise": _elementwise,
    "movement": _movement,
    "reductions": _reductions,
    "products": _products,
    "padding": _padding,
    "indices": _indices,
    "constant indices": _constant_indices,
}
