"""Solves inside of `jax.shard_map` and on meshes with explicit axes: values and derivatives as of a
closed form, whatever is split or shared, and with what JAX's types say of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ensembleode as eo

from ..marks import slow_unless


N = 4
STARTS, RATE = jnp.linspace(1.0, 2.0, N), jnp.array(0.5)
TIGHT = {"abstol": 1e-9, "reltol": 1e-9, "save_start": False}


def mesh_of(kind):
    return jax.make_mesh((2,), ("d",), axis_types=(kind,))


def exact(starts, rate):
    return starts * jnp.exp(-rate)


def decay(u, p, t):
    return -p * u


def ends(starts, rate, alg=None, ensemblealg=None, f=decay, **options):
    prob = eo.ODEProblem(f, starts[:1], (0.0, 1.0), rate)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=starts[ctx.index][None]))
    sim = eo.solve(ens, alg, ensemblealg, trajectories=len(starts), **TIGHT, **options)
    return sim.u if "output_func" in options else sim.u[:, 0, 0]


def mapped(fn, check_vma):
    specs = {"in_specs": (P("d"), P()), "out_specs": P("d")}
    return jax.shard_map(fn, mesh=mesh_of(AxisType.Auto), check_vma=check_vma, **specs)


def loss_of(fn):
    return lambda starts, rate: jnp.sum(fn(starts, rate) ** 2 * jnp.arange(1.0, N + 1))


def assert_close(got, wanted):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def gradient(fn):
    """By the starts, which are split, and by the rate, which is shared."""
    return jax.jit(jax.value_and_grad(loss_of(fn), (0, 1)))(STARTS, RATE)


def tangents(fn):
    return jax.jit(lambda *x: jax.jvp(fn, x, x))(STARTS, RATE)


def closing_over_starts(starts, rate):
    """The field closes over arrays that vary over the mesh."""
    return ends(starts, rate, f=lambda u, p, t: -rate * u + 0.0 * starts[0])


def with_loops(u, p, t):
    return jax.lax.fori_loop(0, 2, lambda i, x: x - p * u / 2, jnp.zeros_like(u))


def halved_twice(starts, rate):
    """An event at the start, and one on the way."""
    halve = eo.PresetTimeCallback(
        jnp.array([0.0, 0.5]), lambda i: eo.remake(i, u=i.u / 2), save_positions=(False, False)
    )
    return 4 * ends(starts, rate, callback=halve)


def with_outputs(starts, rate):
    prob = eo.ODEProblem(decay, starts[:1], (0.0, 1.0), rate)
    ens = eo.EnsembleProblem(
        prob,
        lambda prob, ctx: eo.remake(prob, u0=starts[ctx.index][None]),
        lambda sol, ctx: (sol.u[-1, 0] * jnp.array([0.5, 0.5]) @ jnp.ones(2), False),
    )
    return eo.solve(ens, trajectories=len(starts), **TIGHT).u


def one_by_one(starts, rate):
    def end(start):
        return eo.solve(eo.ODEProblem(decay, start[None], (0.0, 1.0), rate), **TIGHT).u[0, 0]

    return jax.vmap(end)(starts)


def by(alg=None, ensemblealg=None, **options):
    return lambda starts, rate: ends(starts, rate, alg, ensemblealg, **options)


WAYS = {
    "compiled": by(engine="compiled"),
    "alone": one_by_one,
    "closure": closing_over_starts,
    "events": halved_twice,
    "outputs": with_outputs,
    "stiff": by(eo.Rodas5P()),
    "columns": by(None, eo.EnsembleColumns()),
    "in batches": by(batch_size=1),
    "loops": by(f=with_loops),
    "columns on diffrax": by(None, eo.EnsembleColumns(), engine="diffrax"),
    "diffrax": by(engine="diffrax"),
    "backsolve": by(engine="diffrax", sensealg=eo.BacksolveAdjoint()),
    "direct": by(engine="diffrax", sensealg=eo.DirectAdjoint(), maxiters=64),
}
QUICK = ("compiled", "closure")


@pytest.mark.parametrize(
    ("way", "check_vma"),
    [slow_unless(way in QUICK, way, True) for way in WAYS]
    + [slow_unless(False, way, False) for way in ("compiled", "closure", "diffrax")],
)
def test_gradients_inside_shard_map(way, check_vma):
    """What devices share has the sum of their cotangents as its own."""
    assert_close(gradient(mapped(WAYS[way], check_vma)), gradient(exact))


FORWARD = {
    "compiled": WAYS["compiled"],
    "diffrax": by(engine="diffrax", sensealg=eo.ForwardDiffSensitivity(), maxiters=64),
    "direct": WAYS["direct"],
}


@pytest.mark.parametrize("way", [slow_unless(way == "compiled", way) for way in FORWARD])
def test_tangents_inside_shard_map(way):
    assert_close(tangents(mapped(FORWARD[way], True)), tangents(exact))


@pytest.mark.parametrize("check_vma", [True, slow_unless(False, False)])
def test_second_derivatives_inside_shard_map(check_vma):
    """Forward over reverse, and reverse over forward, by what is split and what is shared."""

    def both(fn):
        loss, x = loss_of(fn), (STARTS, RATE)

        def along(*x):
            return jax.jvp(loss, x, (x[0] ** 2, jnp.ones(())))[1]

        return jax.jit(lambda *x: (jax.hessian(loss, 1)(*x), jax.grad(along, (0, 1))(*x)))(*x)

    assert_close(both(mapped(WAYS["compiled"], check_vma)), both(exact))


@pytest.mark.slow
def test_gradient_inside_of_the_map():
    """Taken on each device: JAX sums over the devices what they share, as it does elsewhere."""

    def inside(fn):
        def part(starts, rate):
            return jax.grad(lambda rate: jnp.sum(fn(starts, rate) ** 2))(rate)

        whole = jax.shard_map(
            part, mesh=mesh_of(AxisType.Auto), in_specs=(P("d"), P()), out_specs=P()
        )
        return jax.jit(whole)(STARTS, RATE)

    assert_close(inside(WAYS["compiled"]), inside(exact))


ON_EXPLICIT = {
    "alone": one_by_one,
    "one state": lambda starts, rate: eo.solve(
        eo.ODEProblem(decay, starts, (0.0, 1.0), rate), **TIGHT
    ).u[0],
    "diffrax": lambda starts, rate: eo.solve(
        eo.ODEProblem(decay, starts, (0.0, 1.0), rate), **TIGHT, engine="diffrax"
    ).u[0],
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "way", [slow_unless(way in ("alone", "one state"), way) for way in ON_EXPLICIT]
)
@pytest.mark.parametrize("spec", [P("d"), slow_unless(False, P())], ids=str)
def test_gradients_on_explicit_axes(way, spec):
    mesh = mesh_of(AxisType.Explicit)
    starts = jax.device_put(STARTS, NamedSharding(mesh, spec))
    rate = jax.device_put(RATE, NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        loss = loss_of(ON_EXPLICIT[way])
        found = jax.jit(jax.value_and_grad(loss, (0, 1)))(starts, rate)
    assert found[1][0].sharding.is_equivalent_to(starts.sharding, 1)
    assert_close(found, gradient(exact))


def test_split_like_what_is_mapped():
    """The results of `vmap` over an axis that is split are split, too."""
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        starts = jax.device_put(STARTS, NamedSharding(mesh, P("d")))
        u = one_by_one(starts, RATE)
    assert u.sharding.spec == P("d")
    assert_close(u, exact(STARTS, RATE))


@pytest.mark.slow
def test_whole_arrays_on_explicit_axes_in_an_ensemble():
    mesh = mesh_of(AxisType.Explicit)
    whole = NamedSharding(mesh, P())
    starts, rate = jax.device_put((STARTS, RATE), (whole, whole))
    with jax.set_mesh(mesh):
        found = jax.jit(jax.value_and_grad(loss_of(WAYS["compiled"]), (0, 1)))(starts, rate)
    assert_close(found, gradient(exact))
