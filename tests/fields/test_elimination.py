"""Plans of sparse elimination, carried out by NumPy."""

import numpy as np
import pytest

from ensembleode.fields.derivatives.elimination import eliminated


rng = np.random.default_rng(0)


def solved(plan, matrix, b, *, transposed=False):
    inside, inverse = {}, {}
    for block in plan.blocks:
        m = {p: matrix[p] for p in block.inside}
        for k, below, right in block.pivots:
            inverse[k] = 1 / m[k, k]
            for i in below:
                inside[i, k] = m[i, k] * inverse[k]
                for j in right:
                    m[i, j] = m.get((i, j), 0.0) - inside[i, k] * m[k, j]
        for k, _, right in block.pivots:
            for j in right:
                inside[k, j] = m[k, j] * inverse[k]
    x, moves = b.copy(), [x for block in plan.blocks for x in block.moves]
    for kind, i, j in reversed(moves) if transposed else moves:
        if kind == "pivot":
            x[i] *= inverse[i]
            continue
        entry = inside[i, j] if kind == "factor" else matrix[i, j]
        i, j = (j, i) if transposed else (i, j)
        x[i] -= entry * x[j]
    return x


@pytest.mark.parametrize("n", [1, 2, 5, 12, 30])
@pytest.mark.parametrize("density", [0.0, 0.1, 0.3, 1.0])
def test_random_matrices(n, density):
    places = rng.random((n, n)) < density
    plan = eliminated(n, tuple(map(tuple, np.argwhere(places).tolist())))
    matrix = places * rng.normal(size=(n, n)) + 2 * n * np.eye(n)
    b = rng.normal(size=n)
    np.testing.assert_allclose(solved(plan, matrix, b), np.linalg.solve(matrix, b))
    got = solved(plan, matrix, b, transposed=True)
    np.testing.assert_allclose(got, np.linalg.solve(matrix.T, b))
    assert sorted(p.component for x in plan.blocks for p in x.pivots) == list(range(n))


def test_little_is_filled_in():
    # An arrow, whose head is eliminated when little is left.
    n = 9
    arrow = [(0, i) for i in range(n)] + [(i, 0) for i in range(n)]
    plan = eliminated(n, tuple(arrow))
    assert plan.updates == n - 1
    assert 0 in [x.component for x in plan.blocks[0].pivots[-2:]]
    band = [(i, j) for i in range(n) for j in range(n) if abs(i - j) == 1]
    assert eliminated(n, tuple(band)).updates == n - 1


def test_what_nothing_depends_on_changes_nothing():
    """Integrals, and tangents, whose blocks are those of the state."""
    n = 6
    inside = [tuple(x) for x in np.argwhere(rng.random((n, n)) < 0.4).tolist()]
    alone = eliminated(n, tuple(inside))
    integral = eliminated(n + 1, (*inside, *((n, j) for j in range(n))))
    assert integral.blocks[:-1] == alone.blocks
    assert integral.updates == alone.updates
    tangents = [(i + n, j + n) for i, j in inside]
    across = [(i + n, j) for i in range(n) for j in range(n)]
    both = eliminated(2 * n, (*inside, *tangents, *across))
    assert [x for x in both.blocks if max(p.component for p in x.pivots) < n] == list(alone.blocks)
    assert both.updates == 2 * alone.updates


def test_circles_are_blocks():
    circle = [(i, (i + 1) % 4) for i in range(4)]
    plan = eliminated(7, (*circle, (0, 5), (6, 2)))
    found = [sorted(p.component for p in x.pivots) for x in plan.blocks]
    assert sorted(found) == [[0, 1, 2, 3], [4], [5], [6]]
    order = [block[0] for block in found]
    assert order.index(5) < order.index(0) < order.index(6)
