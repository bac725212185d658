"""Arrays of a store are indexed like NumPy's, and read no more than they have to."""

import operator

import hypothesis
import hypothesis.extra.numpy as arrays
import hypothesis.strategies as some
import jax.numpy as jnp
import numpy as np
import pytest
import zarr

from ensembleode.ground.on_disk import OnDisk


SHAPES = [(7,), (5, 3), (6, 4, 3), (4, 1, 2), (3, 0, 2), ()]
IN_MEMORY = [np.arange(np.prod(s, dtype=int), dtype=float).reshape(s) for s in SHAPES]


def on_disk(x):
    chunks = tuple(max(1, min(2, n)) for n in x.shape)
    array = zarr.create_array({}, shape=x.shape, dtype=x.dtype, chunks=chunks)
    array[...] = x
    return OnDisk(array)


ON_DISK = [on_disk(x) for x in IN_MEMORY]


@some.composite
def parts(draw, shape):
    """Of everything NumPy takes: also too much of it, and out of bounds."""
    index, axis = [], 0
    while axis <= len(shape) and draw(some.booleans() if index else some.just(True)):
        n = shape[axis] if axis < len(shape) else 2
        several = arrays.array_shapes(max_dims=2, max_side=3)
        integers = some.integers(-n - (n == 0), max(0, n - 1))
        kind = draw(some.sampled_from(["int", "slice", "array", "mask", "list", "none", "many"]))
        match kind:
            case "int":
                index.append(draw(integers | some.just(n) | integers.map(np.int8)))
            case "slice":
                index.append(draw(some.slices(n)))
            case "array":
                found = draw(arrays.arrays(np.int64, several, elements=integers))
                index.append(jnp.asarray(found) if draw(some.booleans()) else found)
            case "mask":
                index.append(draw(arrays.arrays(bool, n)))
            case "many" if axis + 1 < len(shape):
                index.append(draw(arrays.arrays(bool, (n, shape[axis + 1]))))
                axis += 1
            case "list":
                index.append(draw(some.lists(integers, max_size=4)))
            case _:
                index.append(draw(some.sampled_from([None, True, False, np.True_])))
                continue
        axis += 1
    if draw(some.booleans()):
        index.insert(draw(some.integers(0, len(index))), Ellipsis)
    return index[0] if len(index) == 1 and draw(some.booleans()) else tuple(index)


INDICES = some.sampled_from(range(len(SHAPES))).flatmap(
    lambda i: some.tuples(
        some.just(i),
        parts(SHAPES[i])
        | arrays.basic_indices(SHAPES[i], allow_newaxis=True)
        | (
            arrays.integer_array_indices(SHAPES[i])
            if SHAPES[i] and all(SHAPES[i])
            else some.just(())
        ),
    )
)


@hypothesis.given(INDICES)
@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
def test_any_index(case):
    i, index = case
    theirs = tuple(map(of_numpy, index)) if type(index) is tuple else index
    expected, found = taken(IN_MEMORY[i], theirs), taken(ON_DISK[i], index)
    if isinstance(expected, IndexError):
        assert str(found) == str(expected)
        return
    assert type(found) is type(expected)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def taken(x, index):
    """What it gives, or the error."""
    try:
        return x[index]
    except IndexError as e:
        return e


def of_numpy(part):
    return np.asarray(part) if hasattr(part, "device") else part


def test_only_what_is_needed_is_read(monkeypatch):
    x = np.arange(1000.0).reshape(100, 5, 2)
    array = zarr.create_array({}, shape=x.shape, dtype=x.dtype, chunks=(10, 5, 2))
    array[...] = x
    u, read = OnDisk(array), []
    get = zarr.storage.MemoryStore.get

    async def counted(self, key, *args, **options):
        read.append(key)
        return await get(self, key, *args, **options)

    monkeypatch.setattr(zarr.storage.MemoryStore, "get", counted)
    mask = np.arange(100) % 10 == 3
    few = (np.arange(100) > 20) & (np.arange(100) < 35)
    for index, chunks in {
        "3": 1, "-1": 1, "15:18": 1, "[3, 55]": 2, "few": 2, "few, -1": 2, "[[1, 2], [3, 4]]": 1,
        "::-1": 10, "95:5:-30": 3, "mask": 10, "[55, 3], [0, 1]": 2, "None, 7": 1, "..., 0": 10,
        "[]": 0, "np.zeros(100, bool)": 0, "5:5": 0,
    }.items():  # fmt: skip
        index = eval(f"np.index_exp[{index}]", {"np": np, "mask": mask, "few": few})
        read.clear()
        np.testing.assert_array_equal(u[index], x[index])
        assert len(read) == chunks, index


@pytest.mark.parametrize("name", ["iadd", "imul", "isub", "ipow"])
def test_it_can_not_be_changed(name):
    u = ON_DISK[1]
    with pytest.raises(TypeError, match="an array on disk can't be changed"):
        getattr(operator, name)(u, 1)
    with pytest.raises(TypeError, match="an array on disk can't be changed"):
        np.add(u, 1, out=u)
    with pytest.raises(TypeError, match="an array on disk can't be changed"):
        np.add.at(u, [0], 1)
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(u, copy=False)
    np.testing.assert_array_equal(u, IN_MEMORY[1])


def test_computed_with():
    u, x = ON_DISK[1], IN_MEMORY[1]
    into = np.zeros_like(x)
    np.add(u, 1, out=into, where=OnDisk(u._array) > 2)
    np.testing.assert_array_equal(into, np.where(x > 2, x + 1, 0))
    for found, expected in (
        (u == x, x == x), (-u, -x), (u @ np.ones(3), x @ np.ones(3)), (u.T, x.T),
        (u.sum(0), x.sum(0)), (np.percentile(u, 5), np.percentile(x, 5)), (list(u), list(x)),
        (np.concatenate([u, u]), np.concatenate([x, x])), (np.add.reduce(u), x.sum(0)),
    ):  # fmt: skip
        np.testing.assert_array_equal(found, expected)
