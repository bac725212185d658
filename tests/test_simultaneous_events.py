"""Callbacks that act at one time, exactly or to rounding, or a billionth apart: each acts once, in
its turn, and is a row of `sim.events`; derivatives are those of closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import ensembleode as eo

from .marks import slow_unless


AT, END, N = 0.75, 1.0, 48
TIGHT = {"abstol": 1e-10, "reltol": 1e-10}
# Conditions that cross zero where the state `x` is `a`, which is positive.
FORMS = {
    "less": lambda x, a: x - a,
    "reverse": lambda x, a: a - x,
    "tripled": lambda x, a: 3.0 * (x - a),
    "large": lambda x, a: 1e6 * (x - a),
    "small": lambda x, a: 1e-6 * (x - a),
    "ratio": lambda x, a: x / a - 1.0,
    "inverse": lambda x, a: a / x - 1.0,
    "sin": lambda x, a: jnp.sin(x / 2) - jnp.sin(a / 2),
    "log": lambda x, a: jnp.log(x) - jnp.log(a),
    "powers": lambda x, a: (x - a) * (x + 1.0) ** 3,
    "steep": lambda x, a: jnp.where(x > a, 1.0, -1.0),
    "unbounded": lambda x, a: jnp.interp(x - a, jnp.array([-4.0, 4.0]), jnp.array([-3.0, 3.0])),
}
FALLS = {"reverse", "inverse"}
ALGS = {
    "Tsit5": eo.Tsit5(),
    "Vern7": eo.Vern7(),
    "Rodas5P": eo.Rodas5P(),
    "AutoTsit5": eo.AutoTsit5(eo.Rodas5P()),
    "mass matrix": eo.Rodas5P(),
}


def field(u, p, t):
    """Of `x`, which grows steadily; of `y`, which decays; and of twice `x`."""
    x, y, z = u
    rate, decay = p
    return jnp.stack([rate, -decay * y, 2 * rate * jnp.ones_like(z)])


def algebraic(u, p, t):
    return field(u, p, t).at[2].set(2 * u[0] - u[2])


def problem(alg, callback, u0, p, end=END):
    f = field
    if alg == "mass matrix":
        f = eo.ODEFunction(algebraic, mass_matrix=np.diag([1.0, 1.0, 0.0]))
    return eo.ODEProblem(f, u0, (0.0, end), p, callback=callback)


def remade(affect):
    """The affect `y, t -> y`."""

    def on(integrator, *_):
        u = integrator.u
        return eo.remake(integrator, u=u.at[1].set(affect(u[1], integrator.t)))

    return on


def continuous(form, level, affect, **how):
    return eo.ContinuousCallback(lambda u, t, _: FORMS[form](u[0], level), affect, **how)


@st.composite
def sets(draw):
    """Kinds of callbacks, up to four; each with its offsets of trajectories, in time."""
    kinds = draw(
        st.lists(st.sampled_from([*FORMS, "preset", "periodic", "pair"]), min_size=2, max_size=4)
    )
    return kinds, draw(st.integers(0, 2**32 - 1))


def check(alg, kinds, seed, forwards=True):
    """Each `y -> 2 y + number of the callback` tells in which order callbacks act."""
    random = np.random.default_rng(seed)
    rates = random.uniform(0.3, 2.0, N)
    # (The parameters of some conditions are a few roundings off.)
    offsets = random.choice([0.0, 0.0, 0.0, 1e-9, -1e-9], (N, len(kinds)))
    levels = rates[:, None] * (AT + offsets)
    levels *= 1 + random.integers(-2, 3, levels.shape) * np.finfo(float).eps
    known = [kind in ("preset", "periodic") for kind in kinds]
    offsets[:, known] = 0.0

    def callbacks(level):
        found = []
        for k, kind in enumerate(kinds):
            affect = remade(lambda y, t, k=k: 2 * y + k + 1)
            if kind == "preset":
                found.append(eo.PresetTimeCallback([AT, 0.1], affect))
            elif kind == "periodic":
                found.append(eo.PeriodicCallback(affect, AT / 3))
            elif kind == "pair":
                found.append(
                    eo.VectorContinuousCallback(
                        lambda u, t, _, a=level[k]: jnp.stack([u[0] - a, 1 - u[0] / a]), affect, 2
                    )
                )
            else:
                found.append(continuous(kind, level[k], affect))
        return eo.CallbackSet(*found)

    prob = problem(alg, None, [0.0, 0.0, 0.0], [1.0, 0.0])

    def prob_func(prob, ctx):
        i = ctx.index
        p = jnp.stack([jnp.asarray(rates)[i], 0.0])
        return eo.remake(prob, p=p, callback=callbacks(jnp.asarray(levels)[i]))

    ens = eo.EnsembleProblem(prob, prob_func)
    sim = eo.solve(ens, ALGS[alg], trajectories=N, max_events=24, **TIGHT)
    assert (sim.retcode == eo.ReturnCode.Success).all()
    events = sim.events
    for i in range(N):
        rows = [(AT + offsets[i, k], known[k], k) for k in range(len(kinds))]
        rows += [(0.1, True, k) for k, kind in enumerate(kinds) if kind == "preset"]
        rows += [
            (AT * j / 3, True, k) for j in (1, 2, 4) for k, x in enumerate(kinds) if x == "periodic"
        ]
        rows = sorted(row for row in rows if row[0] < END)
        which = [k for *_, k in rows]
        n = len(which)
        assert int(events.count[i]) == n
        np.testing.assert_array_equal(events.which[i, :n], which, str(i))
        np.testing.assert_allclose(events.t[i, :n], [t for t, *_ in rows], rtol=0, atol=1e-12)
        y = 0.0
        for k in which:
            y = 2 * y + k + 1
        np.testing.assert_allclose(sim.u[i, -1, 1], y, rtol=1e-12)
        signs = [[1 - 2 * (kinds[k] in FALLS), 0] for k in which]
        signs = [[1, -1] if kinds[k] == "pair" else x for k, x in zip(which, signs, strict=True)]
        found = events.direction[i, :n]
        np.testing.assert_array_equal(found if found.ndim == 2 else found[:, None], np.array(signs)[:, : 1 + ("pair" in kinds)])
