"""Where a number decides between two ways to compute, both ways are right.

`THRESHOLDS` has every number with which sizes are compared, and on which side of it a problem is
tried: at the number that the problem just has, and at one less. A number that isn't listed fails
`test_every_threshold_is_listed`.
"""

import ast
import dataclasses
import functools
import importlib
import pathlib
import sys
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.engines.compiled import kernel
from ensembleode.engines.compiled.llvm import machine

from .marks import slow_unless
from .problems import lotka_volterra, ROBERTSON, robertson


PACKAGE = pathlib.Path(eo.__file__).parent


#
# Problems, each with much of something
#


def of_each(prob):
    """An ensemble whose trajectories start apart from each other."""
    return eo.EnsembleProblem(
        prob, lambda prob, ctx: eo.remake(prob, u0=prob.u0 * (1 + ctx.index / 10))
    )


def network(dtype, width=12):
    """Matrices of shared weights."""
    key = jax.random.key(0)
    sizes = [(width, 2), (width, width), (2, width)]
    ws = [jax.random.normal(key, s, dtype) / np.sqrt(s[1]).astype(dtype) for s in sizes]

    def f(u, p, t):
        hidden = jnp.tanh(p[0] @ u)
        return p[2] @ jnp.tanh(p[1] @ hidden) - u

    return of_each(eo.ODEProblem(f, jnp.array([0.7, -0.4], dtype), (0.0, 1.0), ws))


wide_network = functools.partial(network, width=64)


def own_network(dtype):
    """Weights of each trajectory's own."""
    ens = network(dtype)

    def prob_func(prob, ctx):
        return eo.remake(prob, p=[w * (1 + ctx.index / 10) for w in prob.p])

    return eo.EnsembleProblem(ens.prob, prob_func)


def ring(dtype, n=20):
    """Many components, each driven by its neighbours (Lorenz 96)."""

    def f(u, p, t):
        return (jnp.roll(u, -1) - jnp.roll(u, 2)) * jnp.roll(u, 1) - u + p

    u0 = 8 + jnp.sin(jnp.arange(n, dtype=dtype))
    return of_each(eo.ODEProblem(f, u0, (0.0, 0.3), jnp.asarray(8.0, dtype)))


long_ring = functools.partial(ring, n=40)


def waves(dtype):
    """Many sines."""

    def f(u, p, t):
        return sum(jnp.sin(k * u + p) for k in range(1, 16)) / 15 - jnp.roll(u, 1)

    return of_each(eo.ODEProblem(f, jnp.array([0.3, 0.5], dtype), (0.0, 1.0), dtype(0.2)))


def branches(dtype):
    """Ways that depend on the state, with a loop in one of them."""

    def far(u):
        return jax.lax.fori_loop(0, 6, lambda i, x: x - 0.1 * jnp.tanh(x), u)

    def f(u, p, t):
        return jax.lax.cond(u[0] > p, lambda u: -u * u, far, u) - 0.5 * u

    return of_each(eo.ODEProblem(f, jnp.array([0.4, 0.5], dtype), (0.0, 1.0), dtype(0.9)))


def dense(dtype):
    """A full Jacobian."""
    a = jax.random.normal(jax.random.key(1), (6, 6), dtype)

    def f(u, p, t):
        return p * (a @ jnp.tanh(u)) - 5 * u

    return of_each(eo.ODEProblem(f, jnp.linspace(1, 2, 6, dtype=dtype), (0.0, 0.5), dtype(2.0)))


def algebraic(dtype):
    """A component that is determined by the others (Robertson's reactions)."""

    def f(u, p, t):
        rates = robertson(u, p, t)
        return jnp.stack([*rates[:2], u[0] + u[1] + u[2] - 1])

    mass = np.diag([1.0, 1.0, 0.0])
    prob = eo.ODEProblem(
        eo.ODEFunction(f, mass_matrix=mass),
        jnp.array([1.0, 0.0, 0.0], dtype),
        (0.0, 10.0),
        jnp.asarray(ROBERTSON, dtype),
    )
    return eo.EnsembleProblem(
        prob, lambda prob, ctx: eo.remake(prob, p=prob.p * (1 + ctx.index / 10))
    )


def systems(dtype):
    """A system of linear equations."""

    def f(u, p, t):
        a = 4 * jnp.eye(3, dtype=dtype) + p * jnp.outer(u, jnp.flip(u))
        return -jnp.linalg.solve(a, u)

    return of_each(eo.ODEProblem(f, jnp.array([0.7, -0.4, 1.0], dtype), (0.0, 1.0), dtype(0.5)))


def long_sum(dtype, n=2):
    """Many numbers written in `f`, in one expression."""

    def f(u, p, t):
        return -u + sum((k / 7) * u ** (1 + k % 2) * 0.01 for k in range(1, 50)) * p

    u0 = jnp.linspace(0.3, 0.5, n, dtype=dtype)
    return of_each(eo.ODEProblem(f, u0, (0.0, 1.0), dtype(-0.2)))


long_sums = functools.partial(long_sum, n=40)


def predators(dtype):
    u0, p = jnp.ones(2, dtype), jnp.array([1.5, 1.0, 3.0, 1.0], dtype)
    return of_each(eo.ODEProblem(lotka_volterra, u0, (0.0, 3.0), p))


HALVED = eo.ContinuousCallback(
    lambda u, t, i: u[0] - 0.9 * i.t - 0.2, lambda i: eo.remake(i, u=0.5 * i.u)
)


class Way(NamedTuple):
    """Options that change the code."""

    options: Mapping
    changes: Mapping = types.MappingProxyType({})
    where: Any = eo.EnsembleThreads()


WAYS = {
    "ends": Way({}),
    "times": Way({"saveat": [0.05, 0.1, 0.25]}),
    "every step": Way({"save_everystep": True, "maxiters": 256}),
    "fixed": Way({"adaptive": False, "dt": 0.01}),
    "events": Way({"callback": HALVED}),
    "integrand": Way({}, {"integrand": lambda u, p, t: u[0] * u[1]}),
    "columns": Way({}, where=eo.EnsembleColumns()),
}
EXPLICIT = tuple(WAYS)
IMPLICIT = ("ends", "times", "every step", "events", "integrand")


class Threshold(NamedTuple):
    """A number that decides between two ways.

    - `problem`: one that has much of what it bounds.
    - `low`, `high`: values with which the problem is on one side, and on the other.
    - `ways`: the options that are tried.
    - `in_code`: whether the two ways are other code of a kernel.
    - `registers`: how many vector registers a machine has where this matters.
    - `n`: the number of trajectories.
    """

    problem: Any
    low: Any = 0
    high: Any = 10**9
    ways: tuple[str, ...] = ("ends", "times")
    in_code: bool = True
    alg: Any = eo.Tsit5()
    registers: int | None = None
    n: int = 5


RODAS = eo.Rodas5P()
C, F = "engines.compiled", "fields"
THRESHOLDS = {
    f"{C}.steps.tuning.MOST_VARIABLES": Threshold(network, ways=EXPLICIT),
    f"{C}.steps.tuning.MOST_OWN_VARIABLES": Threshold(own_network, ways=EXPLICIT),
    f"{C}.steps.tuning.MOST_RESIDUALS": Threshold(network),
    f"{C}.steps.tuning.MOST_RECORDED": Threshold(network),
    f"{C}.steps.tuning.MOST_HELD": Threshold(own_network, ways=EXPLICIT),
    f"{C}.steps.tuning.MOST_SHARED": Threshold(network, ways=EXPLICIT),
    f"{C}.steps.tuning.MOST_PACKED": Threshold(wide_network),
    f"{C}.algebra.tuning.WRITTEN_OUT": Threshold(wide_network, ways=EXPLICIT),
    f"{C}.algebra.tuning.LONGEST_SUM": Threshold(wide_network, high=100),
    f"{C}.algebra.tuning.LEAST_PACKED": Threshold(wide_network),
    # (With as many columns as there are lanes.)
    f"{C}.algebra.tuning.LEAST_ROWS": Threshold(wide_network, high=10**6, n=40),
    f"{C}.tuning.MOST_NEAR": Threshold(network, ways=("fixed",), registers=32, n=40),
    f"{C}.tuning.MOST_NEAR_OTHERWISE": Threshold(network, registers=16, n=40),
    f"{C}.tuning.LARGEST_SEGMENTS": Threshold(network, low=1, in_code=False),
    # (With an integrand, all is written out before.)
    f"{C}.field.tuning.WRITTEN_OUT": Threshold(
        long_ring, ways=tuple(way for way in EXPLICIT if way != "integrand")
    ),
    f"{C}.field.tuning.LONGEST_TURN": Threshold(long_ring, registers=32),
    f"{C}.field.tuning.MOST_DEAR": Threshold(waves),
    f"{C}.steps.tuning.LONGEST_INLINED": Threshold(long_sum, ways=EXPLICIT),
    f"{C}.steps.tuning.MOST_INLINED": Threshold(dense, ways=IMPLICIT, alg=RODAS),
    f"{C}.llvm.heap.MOST_ON_STACK": Threshold(dense, ways=IMPLICIT, alg=RODAS),
    f"{C}.algebra.tuning.MOST_UPDATES": Threshold(dense, ways=IMPLICIT, alg=RODAS),
    f"{C}.algebra.tuning.MOST_TERMS": Threshold(algebraic, ways=("ends",), alg=RODAS),
    f"{C}.loop.tuning.MOST_BALL_OPERATIONS": Threshold(branches, ways=("events",)),
    f"{C}.loop.tuning.TURNS_BETWEEN_LOOKS": Threshold(
        predators, low=1, high=2**14, ways=("fixed",)
    ),
    f"{C}.loop.tuning.PATIENCE": Threshold(predators, low=1, high=100, alg=eo.AutoTsit5(RODAS)),
    "engines.columns.tuning.WORTH_SHARING": Threshold(predators, ways=("columns",), in_code=False),
    f"{F}.tuning.MOST_LOOPS": Threshold(long_ring),
    f"{F}.tuning.DEEPEST": Threshold(long_sums, low=1),
    f"{F}.tuning.COST_OF_OTHERS": Threshold(waves),
    f"{F}.tuning.LEAST_PRODUCT": Threshold(wide_network),
    # (Errors are so small that steps follow from rounding.)
    f"{F}.tuning.MOST_TURNS_WRITTEN_OUT": Threshold(
        systems, ways=tuple(way for way in EXPLICIT if way != "every step")
    ),
    "tracing.written_numbers._MOST_APART": Threshold(long_sum),
}


class Found(NamedTuple):
    values: Any
    slopes: Any
    texts: frozenset


def forget():
    """Forget what was made with another number."""
    for name, module in list(sys.modules.items()):
        if name.startswith("ensembleode"):
            for value in list(vars(module).values()):
                getattr(value, "cache_clear", lambda: None)()
    jax.clear_caches()


def solved(monkeypatch, case, way, dtype):
    """The solution of a case, with its gradient and the code of its kernels."""
    forget()
    texts = set()

    def noted(of, text_of):
        def make(d):
            texts.add(text_of(made := of(d)))
            return made

        return make

    here = machine.host()
    if case.registers is not None:
        here = dataclasses.replace(here, registers=case.registers)
    with monkeypatch.context() as patch, machine.using(here):
        patch.setattr(kernel, "solving", noted(kernel.solving, lambda x: x[0]))
        patch.setattr(kernel, "pulling_back", noted(kernel.pulling_back, lambda x: x.text))
        ens, way = case.problem(dtype), WAYS[way]
        tolerance = 1e-9 if dtype == np.float64 else 1e-4
        tight = {"abstol": tolerance, "reltol": tolerance}
        if way.options.get("adaptive") is False:
            tight = {}

        @jax.jit
        def loss(u0, p):
            prob = eo.remake(ens.prob, u0=u0, p=p, **way.changes)
            with_these = eo.EnsembleProblem(prob, ens.prob_func)
            options = {"engine": "compiled", "trajectories": case.n, **tight, **way.options}
            sim = eo.solve(with_these, case.alg, way.where, **options)
            u = jnp.where(jnp.isfinite(sim.u), sim.u, 0)
            out = u if sim.integral is None else (u, sim.integral)
            return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(out)), (out, sim.retcode)

        (_, (values, codes)), slopes = jax.value_and_grad(loss, (0, 1), has_aux=True)(
            ens.prob.u0, ens.prob.p
        )
        assert (np.asarray(codes) < 3).all(), codes
    return Found(values, slopes, frozenset(texts))


def number(name):
    module, _, attribute = f"ensembleode.{name}".rpartition(".")
    return importlib.import_module(module), attribute


CASES = [
    slow_unless(way == case.ways[0] and dtype is np.float64 and i % 6 == 0, name, way, dtype)
    for i, (name, case) in enumerate(THRESHOLDS.items())
    for way in case.ways
    for dtype in ((np.float64, np.float32) if way == case.ways[0] else (np.float64,))
]


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(("name", "way", "dtype"), CASES)
def test_both_sides(monkeypatch, name, way, dtype):
    case = THRESHOLDS[name]
    found = []
    for value in (case.low, case.high):
        monkeypatch.setattr(*number(name), value)
        found.append(solved(monkeypatch, case, way, dtype))
    low, high = found
    if case.in_code:
        assert low.texts != high.texts
    # (Tolerances above the rounding errors that other sums have, and steps that follow from them.)
    close = 1e-7 if dtype == np.float64 else 5e-3
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=close, atol=close),
        (low.values, low.slopes),
        (high.values, high.slopes),
    )


@pytest.mark.parametrize(("registers", "n"), [(r, r + i) for r in (16, 32) for i in (-1, 0, 1)])
@pytest.mark.parametrize("way", EXPLICIT)
@pytest.mark.slow
def test_states_in_memory(monkeypatch, way, n, registers):
    """From as many components on as there are registers."""
    case = Threshold(functools.partial(ring, n=n), registers=registers)
    got = solved(monkeypatch, case, way, np.float64)
    monkeypatch.setattr(
        "ensembleode.engines.compiled.steps.description.least_in_memory", lambda: 10**6
    )
    expected = solved(monkeypatch, case, way, np.float64)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-7), got[:2], expected[:2]
    )


#
# That none is forgotten
#


# Rooms in which sizes decide how something is computed.
ROOMS = ("engines", "fields", "tracing", "plan", "jumps", "trajectories", "running", "solvers")
# Numbers that nothing is computed in two ways by, and where else those are tested that decide about
# more than a kernel.
OTHERS = {
    # No problem here is on both sides of these.
    "engines.compiled.field.tuning.CHEAP",
    "fields.tuning.MOST_SCALAR_OPERATIONS",
    "fields.tuning.MOST_OPERATIONS_OF_JACOBIANS",
    "fields.tuning.MOST_UNROLLED",
    "solvers.mass_matrix._MOST_SUMMED",
    # Refusals, and what the formulas of functions are made of.
    "engines.compiled.llvm.compiler.OLDEST",
    "engines.compiled.llvm.compiler._LONGEST",
    "engines.compiled.llvm.compiler._MOST",
    "engines.compiled.gpu_engine._MOST_ARRAYS",
    "engines.base.tuning.MOST_COLUMN_VARIABLES",
    "engines.base.tuning.MOST_COLUMN_STEPS",
    "engines.base.checks._ROUNDINGS",
    "engines.compiled.llvm.functions.error_functions._HALF_AT",
    "engines.compiled.llvm.functions.gamma._STIRLING_FROM",
    "engines.compiled.llvm.functions.gamma._SUMMED_BELOW",
    "solvers.mass_matrix._ROUNDINGS",
    "solvers.order_conditions._ROUNDING",
    "solvers.step_size.MOST_FAILURES",
    "solvers.step_size._FAR",
    "solvers.time.STRETCH",
    "solvers.powers._LARGE",
    "jumps.consistent_start._MOST_STEPS",
    "engines.derivatives.rest._MOST_STEPS",
    # test_program.py: how deep rules within rules are compared.
    "tracing.program._MOST_RULES",
    "tracing.program._ORDERS",
    # When memory is given back, and how often progress is said.
    "engines.compiled.llvm.object_cache._EACH",
    "running.progress._EACH",
    # What is checked before a solve.
    "fields.bounds._MOST",
    # test_every_event.py, test_batches.py: rooms for events, sizes of batches.
    "running.tuning.FEW_RERUNS",
    "running.tuning.MOST_ROOM",
    "running.tuning.FEW_NARROW_BATCHES",
    "running.tuning.LEAST_BATCH",
    "jumps.moving_jumps.ROWS",
    # noise/test_adaptive_steps.py: how many noises' paths lanes remember.
    "plan.tuning.MOST_REMEMBERED",
    # noise/test_random_numbers.py: how many numbers of a step with which steps share blocks.
    "solvers.philox._MOST_SHARED",
    # test_matrices.py: what is taken apart into scalars.
    "fields.tuning.MOST_SORTED",
    "fields.tuning.MOST_ROWS",
    # test_ctrl_c.py: after how many steps of columns the flag is read.
    "engines.columns.tuning.TURNS_BETWEEN_LOOKS",
    # test_complex_numbers.py: which Fourier transforms are written out, and how.
    "fields.tuning.LONGEST_TRANSFORM",
    "fields.tuning.LONGEST_PRIME_TRANSFORM",
    "fields.tuning.LONGEST_WHOLE_TRANSFORM",
    # test_coinciding_times.py
    "jumps.told_apart._FEW",
    "plan.known_times.NEAR",
    "engines.diffrax.control._ROOM",
}
# The choice between engines: tests/engines/test_capabilities.py. Other engines: their own tests.
OTHER_ROOMS = ("engines.julia.", "fields.scalarising.")


def numbers_of(tree):
    """The names at the top of a module that are numbers."""

    def is_number(x):
        if isinstance(x, ast.BinOp):
            return is_number(x.left) and is_number(x.right)
        return isinstance(x, ast.Constant) and type(x.value) in (int, float)

    for node in tree.body:
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            yield from (x.id for x, y in pairs if isinstance(x, ast.Name) and is_number(y))


def compared_in(tree):
    """The names that sizes are compared with."""
    order = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], order):
            for x in ast.walk(node):
                yield from [x.id] if isinstance(x, ast.Name) else []
                yield from [x.attr] if isinstance(x, ast.Attribute) else []


def thresholds_there():
    trees = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
        for room in ROOMS
        for path in (PACKAGE / room).rglob("*.py")
    }
    trees = {name: ast.parse(path.read_text()) for name, path in trees.items()}
    imported = {
        alias.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    compared = {x for tree in trees.values() for x in compared_in(tree)}
    return {
        f"{name}.{x}"
        for name, tree in trees.items()
        for x in numbers_of(tree)
        if x in {*compared_in(tree), *(compared & imported)}
        or (name.endswith(".tuning") and x in compared)
    }


def test_every_threshold_is_listed():
    there = {x for x in thresholds_there() if not x.startswith(OTHER_ROOMS)}
    listed = {*THRESHOLDS, *OTHERS, *OF_AUTO}
    assert there - listed == set(), "numbers that are compared with: test both of their sides"
    for name in listed:
        module, attribute = number(name)
        assert isinstance(getattr(module, attribute), int | float), name


def test_a_new_threshold_would_be_seen():
    tree = ast.parse("_MOST, OTHER = 8, 2**4\ndef f(x):\n    return x.size > _MOST\n")
    assert set(numbers_of(tree)) & set(compared_in(tree)) == {"_MOST"}


#
# The choice between engines
#


OF_AUTO = {
    f"{C}.tuning.MOST_STATEMENTS": waves,
    f"{C}.tuning.MOST_WRITTEN_OUT": ring,
    f"{C}.tuning.MOST_OWN_ON_GPU": None,
    f"{C}.tuning.MOST_SHARED_ON_GPU": None,
    # test_large.py: what takes too long to compile.
    f"{C}.tuning.MOST_LINES": None,
    f"{C}.tuning.LINES_OF_ENTRY": None,
}


@pytest.mark.parametrize("name", [x for x, problem in OF_AUTO.items() if problem])
def test_both_sides_of_the_choice(monkeypatch, name):
    """Whichever engine solves it, the values are the same."""
    ens = OF_AUTO[name](np.float64)
    if name.endswith(".MOST_WRITTEN_OUT"):
        prob = eo.remake(ens.prob, integrand=lambda u, p, t: u[0])
        ens = eo.EnsembleProblem(prob, ens.prob_func)
    found = {}
    for value in (0, 10**9):
        forget()
        monkeypatch.setattr(*number(name), value)
        sim = eo.solve(ens, eo.Tsit5(), trajectories=3, abstol=1e-9, reltol=1e-9)
        found[sim.engine.name] = sim.u
    assert set(found) == {"diffrax", "compiled"}
    np.testing.assert_allclose(*found.values(), rtol=1e-7)
