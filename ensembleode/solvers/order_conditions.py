"""The order of a Runge-Kutta method, from the conditions on its coefficients, of which there is one
for each rooted tree.

Source: Butcher, "Numerical Methods for Ordinary Differential Equations" (2016), chapter 3.
"""

import functools
import math
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from .tableau import Tableau


# A root, given by the sorted trees that grow on it.
Tree: TypeAlias = tuple["Tree", ...]

# The tolerance of a condition for rounding, relative to the sum of its terms' magnitudes. The
# weights of dense output are often published with few digits.
_ROUNDING, _ROUNDING_WITHIN = 1e-11, 1e-6


@functools.cache
def trees(order: int) -> tuple[Tree, ...]:
    """All rooted trees with `order` vertices."""
    return tuple(sorted(set(_trees(order - 1, order - 1))))


def _trees(vertices: int, largest: int) -> Iterator[Tree]:
    """The sets of trees on a root that have `vertices` vertices in all, with at most `largest` in
    each tree."""
    if not vertices:
        yield ()
        return
    for size in range(1, min(vertices, largest) + 1):
        for first in trees(size):
            for rest in _trees(vertices - size, size):
                yield tuple(sorted((first, *rest)))


def size(tree: Tree) -> int:
    return 1 + sum(map(size, tree))


def density(tree: Tree) -> int:
    return size(tree) * math.prod(map(density, tree))


def _weights(tree: Tree, a: np.ndarray) -> np.ndarray:
    """The elementary weight of a tree at each stage."""
    found = np.ones(len(a))
    for branch in tree:
        found = found * (a @ _weights(branch, a))
    return found


def missed(tableau: Tableau) -> str | None:
    """The claim about an order that a tableau misses, and by how much; None where all claims
    hold."""
    a = _matrix(tableau)
    s = tableau.stages
    b, interpolant = np.array(tableau.b), tableau.interpolant
    if miss := _missed(b, a[:s, :s], tableau.order):
        return f"its order is said to be {tableau.order}, and {miss}"
    for name, row in zip(("error", "second_error"), tableau.errors, strict=False):
        assert tableau.embedded_order is not None
        if miss := _missed(b - np.array(row), a[:s, :s], tableau.embedded_order):
            return (
                f"its embedded_order is said to be {tableau.embedded_order}, and for the weights "
                f"b - {name} {miss}"
            )
    if miss := _missed_within(np.array(interpolant.weights), a, interpolant.order):
        return f"the order of its interpolant is said to be {interpolant.order}, and {miss}"
    return None


def _matrix(tableau: Tableau) -> np.ndarray:
    """The coefficients `a` of all stages, including those of dense output, as a square matrix."""
    rows = [(), *tableau.a, *tableau.interpolant.extra_a]
    a = np.zeros((len(rows), len(rows)))
    for i, row in enumerate(rows):
        a[i, : len(row)] = row
    return a


def _missed(b: np.ndarray, a: np.ndarray, order: int) -> str | None:
    for of in range(1, order + 1):
        for tree in trees(of):
            terms = b * _weights(tree, a)
            off = abs(math.fsum(terms) - 1 / density(tree))
            if not off <= _ROUNDING * (1 + np.abs(terms).sum()):
                return f"a condition of order {of} is missed by {off:.1g}"
    return None


def _missed_within(weights: np.ndarray, a: np.ndarray, order: int) -> str | None:
    """Check the conditions for `b(theta)`, power by power of theta; see `missed`."""
    for of in range(1, order + 1):
        for tree in trees(of):
            terms = weights * _weights(tree, a)[:, None]
            exact = np.zeros(weights.shape[1])
            if of <= len(exact):
                exact[of - 1] = 1 / density(tree)
            off = np.abs(terms.sum(axis=0) - exact)
            allowed = _ROUNDING_WITHIN * (1 + np.abs(terms).sum(axis=0))
            if of > len(exact) or not (off <= allowed).all():
                return f"a condition of order {of} is missed by {off.max():.1g}"
    return None
