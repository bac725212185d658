"""Users' own explicit methods, from their tableaus, and the orders that these claim."""

import dataclasses
import pickle
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import hypothesis as hp
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode import solvers
from ensembleode.solvers.order_conditions import density, missed, size, trees

from ..marks import slow_unless
from ..problems import lotka_volterra


METHODS = [cls for cls in vars(solvers).values() if hasattr(cls, "tableau")]
KUTTA = {
    "c": (0, 1 / 2, 1),
    "a": ((1 / 2,), (-1, 2)),
    "b": (1 / 6, 2 / 3, 1 / 6),
    "order": 3,
    "error": (1 / 6, -1 / 3, 1 / 6),
    "embedded_order": 2,
}


def ensemble(**changes):
    p = jnp.array([1.5, 1.0, 3.0, 1.0])
    prob = eo.ODEProblem(lotka_volterra, jnp.array([1.0, 1.0]), (0.0, 2.0), p)
    return eo.EnsembleProblem(
        eo.remake(prob, **changes), lambda prob, ctx: eo.remake(prob, u0=prob.u0 + ctx.index / 10)
    )


def test_trees():
    assert [len(trees(n)) for n in range(1, 9)] == [1, 1, 2, 4, 9, 20, 48, 115]
    assert all(size(tree) == n for n in range(1, 8) for tree in trees(n))
    # As many ways to label n vertices, over all trees of n vertices, as there are: (n - 1)!
    symmetric = {(): 1}

    def symmetries(tree):
        found = 1
        for branch in set(tree):
            count = tree.count(branch)
            found *= symmetries(branch) ** count * np.prod(range(1, count + 1), dtype=int)
        return int(found)

    assert symmetries(()) == symmetric[()]
    for n in range(1, 8):
        ways = sum(
            Fraction(1, symmetries(tree) * density(tree)) * int(np.prod(range(1, n + 1)))
            for tree in trees(n)
        )
        assert ways == np.prod(range(1, n), dtype=int)


@pytest.mark.parametrize("cls", METHODS, ids=lambda cls: cls.__name__)
def test_our_tableaus_are_what_they_claim(cls):
    assert missed(cls.tableau) is None
    higher = dataclasses.replace(cls.tableau, order=cls.tableau.order + 1)
    assert f"a condition of order {cls.tableau.order + 1} is missed" in missed(higher)


@pytest.mark.parametrize("engine", ["compiled", slow_unless(False, "diffrax")])
def test_the_same_tableau_takes_the_same_steps(engine):
    # (diffrax's own Tsit5 has a controller of its own.)
    how = {"trajectories": 3, "engine": engine, "saveat": 0.25}
    how["stepsize_controller"] = eo.PIController()
    ours, theirs = (
        eo.solve(ensemble(), alg, **how) for alg in (eo.ExplicitRK(eo.Tsit5.tableau), eo.Tsit5())
    )
    # (There Tsit5 is diffrax's class, and the other one is ours: they round otherwise.)
    np.testing.assert_allclose(ours.u, theirs.u, rtol=1e-13 * (engine == "diffrax"))
    np.testing.assert_array_equal(ours.stats.nf, theirs.stats.nf)


@pytest.mark.parametrize("engine", ["compiled", slow_unless(False, "diffrax")])
def test_order_and_tolerances(engine):
    alg = eo.ExplicitRK(eo.Tableau(**KUTTA))
    assert (alg.order, alg.adaptive, alg.stages, alg.fsal) == (3, True, 3, False)
    exact = eo.solve(ensemble().prob, eo.Vern9(), abstol=1e-13, reltol=1e-13, saveat=0.3).u

    def error(**options):
        sol = eo.solve(ensemble().prob, alg, engine=engine, saveat=0.3, **options)
        return float(jnp.abs(sol.u - exact).max())

    coarse, fine = (error(dt=dt, adaptive=False) for dt in (0.02, 0.01))
    assert 2.8 < np.log2(coarse / fine) < 3.3
    assert error(abstol=1e-9, reltol=1e-9) < 1e-6


@pytest.mark.slow
def test_they_go_to_workers():
    alg = eo.ExplicitRK(eo.Tableau(**KUTTA))
    assert pickle.loads(pickle.dumps(alg)) == alg
    how = {"stepsize_controller": eo.PIDController(0.6, -0.2), "internalnorm": eo.MaxNorm()}
    how |= {"trajectories": 3, "dtmax": 0.1}
    here = eo.solve(ensemble(), alg, eo.EnsembleSerial(), **how)
    with ThreadPoolExecutor(1) as executor:
        there = eo.solve(ensemble(), alg, eo.EnsembleDistributed(executor), **how)
    np.testing.assert_array_equal(here.u, there.u)


@pytest.mark.slow
@hp.given(st.sampled_from(METHODS), st.data())
def test_a_wrong_coefficient_is_found(cls, data):
    """Unless it is one that is of no weight."""
    b = list(cls.tableau.b)
    i, j = data.draw(st.lists(st.integers(0, len(b) - 1), min_size=2, max_size=2))
    off = data.draw(st.sampled_from([1e-6, 1e-3, 0.1]))
    hp.assume(cls.tableau.c[i] != cls.tableau.c[j] and cls.tableau.order > 1)
    b[i], b[j] = b[i] + off, b[j] - off
    wrong = dataclasses.replace(
        cls.tableau,
        b=tuple(b),
        interpolant=None,
        error=None,
        embedded_order=None,
        second_error=None,
    )
    with pytest.raises(ValueError, match=r"of order \d is missed by .*claim a lower order"):
        eo.ExplicitRK(wrong)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("with s stages c and b have s entries", {"b": (1.0,)}),
        ("c\\[0\\] is not 0", {"c": (0.1, 1 / 2, 1)}),
        ("row of stage 3 has 1 entries", {"a": ((1 / 2,), (1,))}),
        ("row of stage 3 does not add up to its node", {"a": ((1 / 2,), (-1, 3))}),
        ("order must be a positive integer", {"order": 0}),
        ("error and embedded_order come together", {"error": None}),
        ("error is not of as many stages", {"error": (0.0, 0.0)}),
        ("error does not add up to 0", {"error": (1 / 6, 2 / 3, 1 / 6)}),
        ("order is said to be 4, and a condition of order 4 is missed by", {"order": 4}),
        ("embedded_order is said to be 3, and for the weights b - error", {"embedded_order": 3}),
        ("b - error a condition of order 2 is missed", {"error": (0.1, -0.1, 0.0)}),
        ("b - second_error a condition of order 2", {"second_error": (0.1, -0.1, 0.0)}),
    ],
)
def test_wrong_tableaus(message, changes):
    with pytest.raises(ValueError, match=message):
        eo.ExplicitRK(eo.Tableau(**{**KUTTA, **changes}))


def test_wrong_interpolants():
    fine = eo.Tableau(**KUTTA).interpolant
    lower = dataclasses.replace(fine, order=fine.order + 1)
    with pytest.raises(ValueError, match="order of its interpolant is said to be 4, and"):
        eo.ExplicitRK(eo.Tableau(**{**KUTTA, "interpolant": lower}))


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"ExplicitRK takes an eo\.Tableau, got"):
        eo.ExplicitRK("Tsit5")
    alg = eo.ExplicitRK(eo.Tableau(**KUTTA))
    with pytest.raises(ValueError, match="it runs on compiled, diffrax"):
        eo.solve(ensemble().prob, alg, engine="julia")
