"""Derivatives by some of the numbers: those by the others are not computed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.engines.derivatives.primitives import pull_p
from ensembleode.tracing.evaluation import equations

from ..marks import slow_unless
from .compiled.test_networks import network, states, weights


N = 3
TIGHT = {"abstol": 1e-9, "reltol": 1e-9}
WAYS = {
    "compiled": {"engine": "compiled"},
    "compiled, gauss": {
        "engine": "compiled",
        "alg": eo.Rodas5P(),
        "sensealg": eo.GaussAdjoint(),
    },
    "compiled, gauss of an explicit method": {"engine": "compiled", "sensealg": eo.GaussAdjoint()},
    "diffrax": {"engine": "diffrax"},
}


def numbers():
    u0 = jnp.linspace(0.5, 1.5, 2 * N).reshape(N, 2)
    own, shared = jnp.array([0.5, 0.7, 1.1]), jnp.array([0.3, 0.2])
    return {"u0": u0, "own": own, "shared": shared, "t0": jnp.array(0.1), "t1": jnp.array(0.9)}


def solved(x, alg=None, **options):
    """A function of the ends of `u' = shared - own u`."""
    prob = eo.ODEProblem(lambda u, p, t: p[1] - p[0] * u, x["u0"][0], (x["t0"], x["t1"]))

    def prob_func(prob, ctx):
        i = ctx.index
        return eo.remake(prob, u0=x["u0"][i], p=(x["own"][i], x["shared"]))

    given = {"trajectories": N, "save_start": False, **TIGHT, **options}
    sim = eo.solve(eo.EnsembleProblem(prob, prob_func), alg or eo.Tsit5(), **given)
    return jnp.sum(jnp.sin(sim.u))


def exact(x):
    k = x["own"][:, None]
    left = jnp.exp(-k * (x["t1"] - x["t0"]))
    return jnp.sum(jnp.sin(left * x["u0"] + (1 - left) / k * x["shared"][None]))


def gradient_by(loss, *names):
    return lambda x: jax.grad(lambda some: loss({**x, **some}))({name: x[name] for name in names})


def same(found, expected, compare=np.testing.assert_allclose, **tolerance):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        compare(a, b, **tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_part_of_the_gradient(way):
    """It is the closed form, and that of the gradient by everything."""
    x = numbers()
    some = [("u0",), ("own",), ("shared",), ("u0", "shared"), ("t1",)]

    @jax.jit
    def gradients(x):
        return [
            gradient_by(functools.partial(solved, **WAYS[way]), *names)(x) for names in (x, *some)
        ]

    every, *parts = gradients(x)
    same(every, jax.grad(exact)(x), rtol=1e-6)
    for names, found in zip(some, parts, strict=True):
        same(found, {name: every[name] for name in names}, rtol=1e-12)


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        slow_unless((engine, name) == ("compiled", "u0"), engine, name)
        for engine in ("compiled", "diffrax")
        for name in ("u0", "own", "shared", "t0")
    ],
)
def test_derivatives_of_a_part(engine, name):
    """By every number, in forward and in reverse mode; and several at once."""
    x = numbers()
    v = {name: jnp.cos(jnp.arange(1.0, 1 + a.size)).reshape(a.shape) for name, a in x.items()}

    def along(loss):
        part = gradient_by(loss, name)

        @jax.jit
        def both(x):
            reverse = jax.grad(lambda x: jnp.vdot(part(x)[name], v[name]))(x)
            return jax.jvp(part, (x,), (v,))[1], reverse

        return both(x)

    def loss(x):
        return solved(x, engine=engine)

    same(along(loss), along(exact), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("engine", ["compiled", slow_unless(False, "diffrax")])
def test_transformations(engine):
    """`vmap`, `jit` and `checkpoint` of a gradient by a part; parameters that are shared within
    each place of the mapped axis have a sum for each."""
    x = numbers()

    def each(loss):
        loss = jax.checkpoint(loss)

        def at(shared):
            first = gradient_by(loss, "shared")({**x, "shared": shared})
            return first, gradient_by(loss, "u0")({**x, "shared": shared})

        return jax.jit(jax.vmap(at))(jnp.array([[0.3, 0.2], [0.1, 0.4]]))

    same(each(lambda x: solved(x, engine=engine)), each(exact), rtol=1e-6)


def of_network():
    return states(5), weights(2, 11, 13, 2)


def loss_of_network(u0, p, engine):
    ens = eo.EnsembleProblem(
        eo.ODEProblem(network, u0[0], (0.0, 0.4), p),
        lambda prob, ctx: eo.remake(prob, u0=u0[ctx.index]),
    )
    given = {"adaptive": False, "dt": 0.1, "save_start": False, "engine": engine}
    return jnp.sum(eo.solve(ens, eo.Tsit5(), trajectories=len(u0), **given).u ** 2)


@pytest.mark.parametrize("engine", ["compiled", slow_unless(False, "diffrax")])
def test_frozen_layers(engine):
    u0, p = of_network()
    to_p = jax.grad(loss_of_network, argnums=1)(u0, p, engine)

    def last_alone(p):
        return loss_of_network(u0, [*jax.lax.stop_gradient(p[:2]), p[2]], engine)

    expected = [*jax.tree.map(jnp.zeros_like, p[:2]), to_p[2]]
    same(jax.grad(last_alone)(p), expected, rtol=1e-11)


def pulled(fn, *args):
    """The equation that pulls back in the program of `fn`."""
    (eqn,) = (x for x in equations(jax.make_jaxpr(fn)(*args).jaxpr) if x.primitive is pull_p)
    return eqn


def made_in(eqn):
    """The shapes of all that the computation of an equation makes."""
    structs = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.invars]
    opened = jax.make_jaxpr(lambda *xs: eqn.primitive.opened(*xs, **eqn.params))(*structs)
    return {v.aval.shape for eqn in equations(opened.jaxpr) for v in eqn.outvars}


@pytest.mark.slow
def test_the_others_are_not_computed():
    """By the programs: for the states alone there are no cotangents of weights, and for one layer
    there are those of its weights."""
    u0, p = of_network()

    def loss(u0, layer, i):
        return loss_of_network(u0, [*p[:i], layer, *p[i + 1 :]], "compiled")

    hidden, last = (jax.grad(functools.partial(loss, i=i), argnums=1) for i in (1, 2))
    gradients = {
        "hidden": pulled(hidden, u0, p[1]),
        "last": pulled(last, u0, p[2]),
        "states": pulled(jax.grad(functools.partial(loss, i=1)), u0, p[1]),
    }
    shapes = {name: [v.aval.shape for v in eqn.outvars] for name, eqn in gradients.items()}
    assert shapes == {
        "hidden": [(5, 2), (1, 13, 11), (1, 13)],
        "last": [(5, 2), (1, 2, 13), (1, 2)],
        "states": [(5, 2)],
    }
    made = {name: {shape[-2:] for shape in made_in(eqn)} for name, eqn in gradients.items()}
    assert [name for name in made if (13, 11) in made[name]] == ["hidden"]
    assert [name for name in made if (2, 13) in made[name]] == ["last"]
