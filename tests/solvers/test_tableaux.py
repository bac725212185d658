"""The explicit Runge-Kutta methods, compared with the theory: no test here trusts a printed table.

A method is of order p if and only if its weights satisfy one equation for each rooted tree of at
most p nodes (Butcher; see Hairer, Norsett and Wanner, "Solving Ordinary Differential Equations I",
II.2). The weights of an interpolant have to satisfy these for every theta.
"""

import functools
import math
from typing import NamedTuple

import diffrax
import numpy as np
import pytest

import ensembleode as eo
from ensembleode import solvers
from ensembleode.solvers.order_conditions import density, trees
from ensembleode.solvers.tableau import Interpolant, Tableau


METHODS = sorted(
    (cls for cls in vars(solvers).values() if isinstance(cls, type) and hasattr(cls, "tableau")),
    key=lambda cls: (cls.order, cls.__name__),
)
ADAPTIVE = [cls for cls in METHODS if cls.adaptive]
SMOOTH = [cls for cls in METHODS if cls not in {eo.Euler, eo.SSPRK33}]
# Their interpolants all but meet the conditions of one order more.
ALL_BUT = [eo.Vern6, eo.Vern7, eo.Vern8]
methods = functools.partial(pytest.mark.parametrize, "cls", ids=lambda cls: cls.__name__)
THETA = np.linspace(0.05, 1.0, 12)
EPS = np.finfo(float).eps


class Arrays(NamedTuple):
    """A tableau with the interpolant's extra stages: all [stages], [stages, powers] or square."""

    a: np.ndarray
    b: np.ndarray
    c: np.ndarray
    embedded: list[np.ndarray]
    weights: np.ndarray


def arrays(tableau):
    within = tableau.interpolant
    weights = np.array(within.weights)
    n = len(weights)
    a = np.zeros((n, n))
    for i, row in enumerate((*tableau.a, *within.extra_a), start=1):
        a[i, : len(row)] = row
    b = np.pad(tableau.b, (0, n - tableau.stages))
    embedded = [b - np.pad(row, (0, n - tableau.stages)) for row in tableau.errors]
    return Arrays(a, b, np.array((*tableau.c, *within.extra_c)), embedded, weights)


def stage_weights(a, nodes):
    """What each stage adds to the condition of each tree of so many nodes: [tree, stage]."""

    @functools.cache
    def of(tree):
        return math.prod((a @ of(branch) for branch in tree), start=np.ones(len(a)))

    return np.stack([of(tree) for tree in trees(nodes)])


def residual(a, b, nodes, theta=1.0):
    """By how much the weights `b` of the state at `theta` miss the conditions of so many nodes."""
    exact = np.array([theta**nodes / density(tree) for tree in trees(nodes)])
    return np.max(np.abs(stage_weights(a, nodes) @ b - exact))


def rounding(a, b):
    """What the conditions may be missed by, as coefficients are rounded: they multiply."""
    return 8 * EPS * max(32, np.max(np.abs(a)) * np.max(np.abs(b)))


def interpolant_residual(x, nodes):
    powers = THETA ** np.arange(1, x.weights.shape[1] + 1)[:, None]
    exact = np.array([THETA**nodes / density(tree) for tree in trees(nodes)])
    return np.max(np.abs(stage_weights(x.a, nodes) @ (x.weights @ powers) - exact))


#
# The equations
#


@methods(METHODS)
def test_order(cls):
    x = arrays(cls.tableau)
    steps = x.a[: cls.stages]
    for nodes in range(1, cls.order + 1):
        assert residual(x.a, x.b, nodes) < rounding(steps, x.b)
    assert residual(x.a, x.b, cls.order + 1) > 1e-7


@methods(ADAPTIVE)
def test_order_of_the_embedded_method(cls):
    x, order = arrays(cls.tableau), cls.tableau.embedded_order
    steps = x.a[: cls.stages]
    assert x.embedded
    for weights in x.embedded:
        for nodes in range(1, order + 1):
            assert residual(x.a, weights, nodes) < rounding(steps, weights)
        assert residual(x.a, weights, order + 1) > 1e-6


@methods(METHODS)
def test_order_of_the_interpolant(cls):
    x, order = arrays(cls.tableau), cls.tableau.interpolant.order
    # Large weights of either sign cancel, and leave what they were rounded by.
    large = np.max(np.abs(x.weights))
    assert 16 * EPS * large < 1e-10
    for nodes in range(1, order + 1):
        assert interpolant_residual(x, nodes) < EPS * large * max(16, np.max(np.abs(x.a)))
    assert interpolant_residual(x, order + 1) > 1e-8


@methods(METHODS)
def test_interpolant_ends_where_the_step_does(cls):
    x = arrays(cls.tableau)
    np.testing.assert_allclose(
        x.weights.sum(axis=1), x.b, rtol=0, atol=16 * EPS * np.max(np.abs(x.weights))
    )


@methods(SMOOTH)
def test_interpolant_has_the_slopes_of_the_ends(cls):
    """So that the interpolants of two steps meet in a once differentiable function."""
    x = arrays(cls.tableau)
    first, last = np.zeros((2, len(x.a)))
    first[0] = 1
    (end,) = (i for i in range(len(x.a)) if x.c[i] == 1 and np.array_equal(x.a[i], x.b))
    last[end] = 1
    np.testing.assert_array_equal(x.weights[:, 0], first)
    powers = np.arange(1, x.weights.shape[1] + 1)
    atol = 64 * EPS * np.max(np.abs(x.weights))
    np.testing.assert_allclose(x.weights @ powers, last, rtol=0, atol=atol)


@methods(METHODS)
def test_rows_add_up_to_the_nodes(cls):
    x = arrays(cls.tableau)
    scale = 1 + np.max(np.abs(x.a), axis=1)
    assert np.all(np.abs(x.a.sum(axis=1) - x.c) < 16 * EPS * scale)
    assert np.all(np.triu(x.a) == 0)


def test_a_misprint_shows():
    """These tests can fail: the conditions miss no digit of a coefficient but the last few."""
    x = arrays(eo.Tsit5.tableau)
    last = eo.Tsit5.tableau.stages - 1  # checked by test_fsal
    for i, j in zip(*np.nonzero(x.a[:last]), strict=True):
        a = x.a.copy()
        a[i, j] *= 1 + 1e-9
        assert max(residual(a, x.b, nodes) for nodes in range(1, 6)) > rounding(a, x.b)
    for i, j in zip(*np.nonzero(x.weights), strict=True):
        weights = x.weights.copy()
        weights[i, j] *= 1 + 1e-9
        assert max(interpolant_residual(x._replace(weights=weights), n) for n in (1, 2)) > 1e-10


@methods(ALL_BUT)
def test_interpolants_that_are_all_but_of_the_order_of_the_steps(cls):
    """Vern7's as published, to all its 40 digits; those of Vern6 and Vern8 by choice."""
    x, order = arrays(cls.tableau), cls.order
    assert cls.tableau.interpolant.order == order - 1
    assert 5e-8 < interpolant_residual(x, order) < 1e-6 < interpolant_residual(x, order + 1)


#
# What is said of the methods
#


@methods(METHODS)
def test_fsal(cls):
    """The last stage is the next step's first if and only if it is f at the end of the step."""
    x, last = arrays(cls.tableau), cls.stages - 1
    same = x.c[last] == 1 and np.array_equal(x.a[last], x.b)
    assert cls.fsal == same


@methods([cls for cls in METHODS if hasattr(diffrax, cls.__name__) and cls is not eo.Euler])
def test_diffrax_has_the_same(cls):
    """But for the sign of the error, of which only the size is used.

    (Its Dopri5 has Shampine's embedded method: two thirds of Dormand and Prince's error.)
    """
    ours, theirs = cls.tableau, getattr(diffrax, cls.__name__).tableau
    same = functools.partial(np.testing.assert_allclose, rtol=1e-14, atol=1e-16)
    same(ours.c[1:], theirs.c)
    for row, other in zip(ours.a, theirs.a_lower, strict=True):
        same(row, other)
    same(ours.b, theirs.b_sol)
    size = 2 / 3 if cls is eo.Dopri5 else 1
    differences = [size * np.array(ours.error) - sign * theirs.b_error for sign in (1, -1)]
    assert min(np.abs(difference).max() for difference in differences) < 1e-15
    assert ours.fsal == theirs.fsal


@methods(METHODS)
def test_tableaux_are_values(cls):
    """Programs are keyed by them."""
    tableau = cls.tableau
    copy = Tableau(**{name: getattr(tableau, name) for name in tableau.__dataclass_fields__})
    assert copy == tableau
    assert hash(copy) == hash(tableau)
    assert [other for other in METHODS if other.tableau == tableau] == [cls]


LINEAR = Interpolant(((0, 0), (1, 0)), order=1)
MIDPOINT = {"c": (0, 1 / 2), "a": ((1 / 2,),), "b": (0, 1), "order": 2, "interpolant": LINEAR}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"embedded_order": 1}, "come together"),
        ({"second_error": (-1, 1)}, "comes with error"),
        ({"error": (-1, 1), "embedded_order": 1, "second_error": (1, 1)}, "second_error does not"),
        ({"interpolant": Interpolant(((1,),), order=1)}, "as many stages"),
    ],
)
def test_a_tableau_of_wrong_shape_is_refused(wrong, message):
    Tableau(**MIDPOINT)
    with pytest.raises(ValueError, match=message):
        Tableau(**(MIDPOINT | wrong))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"weights": ((1, 0), (0,))}, "differ in length"),
        ({"weights": ((1,), (0,)), "extra_c": (1,)}, "1 nodes for 0 rows"),
        ({"weights": ((1,), (0,)), "extra_c": (1,), "extra_a": ((1 / 2,),)}, "does not add up"),
    ],
)
def test_an_interpolant_of_wrong_shape_is_refused(extra, message):
    with pytest.raises(ValueError, match=message):
        Interpolant(**extra, order=1)
