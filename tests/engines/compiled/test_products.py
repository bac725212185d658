"""Matrix products of the compiled engine, with weights where they are and packed."""

import ctypes

import numpy as np
from hypothesis import given, settings, strategies as st

from ensembleode.engines.compiled.algebra import products
from ensembleode.engines.compiled.llvm.builder import ElementPointer
from ensembleode.engines.compiled.llvm.compiler import compiled
from ensembleode.engines.compiled.llvm.module import Module
from ensembleode.fields.ir import Buffer as Numbers, Matrix


LANES = 4
DTYPES = [np.dtype(np.float32), np.dtype(np.float64)]


def strips(rows, terms, transposed, dtype, tile):
    return products.Strips(
        Matrix(Numbers("shared", dtype, 0, rows * terms), rows, terms, transposed), tile
    )


def in_place(buffer, strides):
    """The rows of a matrix with these strides."""

    def found(first, n, m):
        return [buffer.load((first + i) * strides[0] + m * strides[1]) for i in range(n)]

    return found


def multiplied(w, x, *, packed, first):
    """`w @ x` for `x: [terms, lane]`, where `w` may be stored term by term; if not `first`,
    written as `x^T w^T`."""
    (rows, terms), dtype = w.shape, w.dtype
    transposed = w.flags.f_contiguous and not w.flags.c_contiguous
    m = Module(LANES)
    with m.function("product", ["ptr %w", "ptr %p", "ptr %x", "ptr %y"], linkage="external") as b:
        weights, to, values, result = (ElementPointer(b, f"%{name}", dtype) for name in "wpxy")
        shape = (rows, 1, terms) if first else (1, rows, terms)
        tile = products.tile_of(b, shape, dtype, varies=True)
        packing = strips(rows, terms, transposed, dtype, tile.rows if first else tile.columns)
        of_weights = in_place(weights, packing.weights.strides)
        if packed:
            packing.write(weights, to)
            of_weights = packing.rows(to)

        def of_values(first, n, m):
            assert n == 1
            return [values.load_lanes(m * LANES)]

        def store(row, column, total):
            result.store_lanes((row if first else column) * LANES, total)

        sides = (of_weights, of_values) if first else (of_values, of_weights)
        products.product(b, shape, tile, dtype, *sides, store, varies=True)
        b.return_()
    code = compiled(m.text)
    memory = np.full(packing.size + 1, 7, dtype)
    y = np.full((rows + 1, LANES), 7, dtype)
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4)(code.address("product"))
    function(*(z.ctypes.data for z in (w, memory, x, y)))
    # Nothing is written behind the ends.
    assert memory[-1] == 7
    assert np.all(y[-1] == 7)
    if packed:
        np.testing.assert_array_equal(np.sort(memory[:-1]), np.sort(w.ravel()))
    return y[:-1]


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
    st.sampled_from(DTYPES),
    st.integers(0, 2**32 - 1),
)
def test_packed_weights_give_the_same_bits(rows, terms, transposed, first, dtype, seed):
    """Of any sizes, multiples of a tile's or not."""
    rng = np.random.default_rng(seed)
    w, x = (rng.normal(size=s).astype(dtype) for s in ((rows, terms), (terms, LANES)))
    w = np.asfortranarray(w) if transposed else w
    found, expected = (multiplied(w, x, packed=p, first=first) for p in (True, False))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(found, w @ x, rtol=1e-3, atol=1e-4)
