"""Known times that are stepped onto on the way, with a new beginning at each: as solves from one to
the next, to the last bit, and with derivatives. (Nobody can ask for them yet.)"""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.engines.compiled import solves
from ensembleode.engines.compiled.numbers import Number

from ...marks import slow_unless
from ..methods import Lags


N, SIZE = 11, 4
# Of every third trajectory: in no order, before the start and beyond the end, at the end, and none.
STOPS = np.array([[0.71, 0.25, -1.0, 7.0], [0.25, 0.5, 0.75, 1.0], [np.inf] * SIZE])
STOPS = STOPS[np.arange(N) % len(STOPS)]


@contextmanager
def stopping(sign: float) -> Iterator[None]:
    """Kernels have the times in a number of that name."""
    layout_of, operands_of = solves.layout_of, solves.operands_of

    def layout(plan, lanes):
        found = layout_of(plan, lanes)
        more = Number("tstops", True, plan.state.dtype, SIZE, 1_000_000)
        return found._replace(numbers=(*found.numbers, more))

    def operands(plan, lanes, **options):
        stops = jnp.asarray(sign * STOPS, plan.state.dtype)
        return [*operands_of(plan, lanes, **options), stops]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solves, "layout_of", layout)
        patch.setattr(solves, "operands_of", operands)
        jax.clear_caches()
        yield
    jax.clear_caches()


def field(u, p, t):
    """An oscillator with a short pulse at 0.25."""
    pulse = (t * p[1] >= 0.25) & (t * p[1] < 0.2501)
    return p[1] * jnp.stack([u[1], jnp.where(pulse, 1e4, -p[0] * u[0])])


def ensemble(sign, u0, begins, ends):
    def prob_func(prob, ctx):
        tspan = (sign * begins[ctx.index], sign * ends[ctx.index])
        return eo.remake(prob, u0=u0[ctx.index], tspan=tspan)

    prob = eo.ODEProblem(field, u0[0], (0.0, 1.0), jnp.array([2.0, sign]))
    return eo.EnsembleProblem(prob, prob_func)


# (Of a controller that remembers nothing, and has no rule of its own for the first step.)
ADAPTIVE = {"dt": 1e-3, "stepsize_controller": eo.IController(qmax_first_step=10.0)}
FIXED = {"dt": 0.03, "adaptive": False}
WAYS = {
    "fixed": (eo.RK4(), FIXED),
    "fixed, FSAL": (eo.Tsit5(), FIXED),
    "adaptive": (eo.Tsit5(), ADAPTIVE),
    "no FSAL": (eo.Vern7(), ADAPTIVE),
}


@pytest.mark.parametrize(
    ("name", "sign"),
    [slow_unless((sign > 0) == (x != "fixed"), x, sign) for x in WAYS for sign in (1.0, -1.0)],
)
def test_they_are_as_solves_between_them(name, sign):
    alg, options = WAYS[name]

    def solve(u0, begins, ends, **more):
        ens = ensemble(sign, u0, jnp.asarray(begins), jnp.asarray(ends))
        return eo.solve(ens, alg, trajectories=N, engine="compiled", **options, **more)

    u0 = jnp.array([[1.0 + i / N, 0.5] for i in range(N)])
    with stopping(sign):
        sim = solve(u0, np.zeros(N), np.ones(N))
        every = solve(u0, np.zeros(N), np.ones(N), save_everystep=True)
    inside: np.ndarray = np.where((STOPS > 0) & (STOPS < 1), STOPS, 1.0)
    bounds = np.concatenate([np.zeros((N, 1)), np.sort(inside, axis=1), np.ones((N, 1))], axis=1)
    u, steps = u0, np.zeros(N, int)
    for begins, ends in zip(bounds.T, bounds.T[1:], strict=False):
        part = solve(u, begins, ends)
        u, steps = part.u[:, -1], steps + part.stats.naccept + part.stats.nreject
    assert (sim.retcode == eo.ReturnCode.Success).all()
    np.testing.assert_array_equal(sim.u[:, -1], u)
    np.testing.assert_array_equal(sim.stats.naccept + sim.stats.nreject, steps)
    for stops, t in zip(inside, np.asarray(every.t), strict=True):
        assert np.isin(sign * stops, t).all()


def test_the_first_step_is_chosen_anew():
    """So that the pulse is seen, which would be stepped over."""
    u0, options = jnp.ones((N, 2)), {"trajectories": N, "engine": "compiled"}
    ens = ensemble(1.0, u0, jnp.zeros(N), jnp.ones(N))
    over = eo.solve(ens, eo.Tsit5(), **options)
    with stopping(1.0):
        seen = eo.solve(ens, eo.Tsit5(), **options)
    gained = np.abs(seen.u[:, -1] - over.u[:, -1]).max(axis=1)
    has_stop = (STOPS == 0.25).any(axis=1)
    assert (gained[has_stop] > 0.3).all()
    assert (gained[~has_stop] == 0).all()


def smooth(u, p, t):
    return p[1] * jnp.stack([u[1], -p[0] * jnp.sin(u[0]) * (1 + 0.3 * t)])


@pytest.mark.parametrize(
    ("alg", "saving"),
    [
        pytest.param(Lags(), {"saveat": jnp.linspace(0.1, 1.0, 7)}, id="lagging, times"),
        pytest.param(Lags(), {}, id="lagging, ends", marks=pytest.mark.slow),
        pytest.param(eo.Tsit5(), {}, id="Tsit5", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_differences(alg, saving):
    """Also of what a method carries, which is made anew of the state at each of the times; and in
    forward mode, which solves with it."""
    weights = jnp.cos(jnp.arange(N * max(1, len(saving.get("saveat", ()))) * 2.0))

    def loss(x):
        prob = eo.ODEProblem(smooth, x[:2], (0.0, 1.0), x[2:])

        def prob_func(prob, ctx):
            return eo.remake(prob, u0=prob.u0 * (1 + 0.1 * ctx.index))

        options = {**FIXED, **saving, "trajectories": N, "engine": "compiled"}
        u = eo.solve(eo.EnsembleProblem(prob, prob_func), alg, **options).u
        u = u if saving else u[:, -1]
        return jnp.sum(weights * u.reshape(-1) ** 2)

    x, step = jnp.array([1.0, 0.5, 2.0, 1.0]), 1e-5
    with stopping(1.0):
        found = jax.jit(jax.grad(loss))(x)
        _, pushed = jax.jit(lambda x: jax.jvp(loss, (x,), (x,)))(x)
        value = jax.jit(loss)
        expected = [(value(x + d) - value(x - d)) / (2 * step) for d in step * np.eye(len(x))]
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-7)
    np.testing.assert_allclose(pushed, found @ x, rtol=1e-11)
