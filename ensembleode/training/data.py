"""The items of a fit: arrays in memory or on disk, or batches from an iterable."""

import contextlib
import dataclasses
import functools
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import Array
from jaxtyping import PyTree

from .checkpoints import Position
from .identity import of_array
from .parallel import Placement
from .step import PaddedBatch


@dataclasses.dataclass(frozen=True)
class Piece:
    """A batch on its devices."""

    batch: PaddedBatch | None
    count: int  # the number of its items
    last: bool  # whether it is the last batch of a pass
    items: np.ndarray | None = None  # the indices of its items in arrays
    batches: int = 1  # the number of batches that it was made of


class Arrays:
    """A pytree of arrays `[item, ...]` (in memory, memory-mapped, or Zarr's), in batches of `size`
    items, of which as many in succession are one piece as are accumulated. A last one with fewer
    items is padded, so that a step compiles once; or it isn't."""

    def __init__(
        self,
        tree: PyTree,
        size: int | None,
        placed: Placement,
        shuffle: bool,
        accumulated: int = 1,
        padded: bool = True,
    ):
        self._padded = padded
        self._leaves, self._structure = _arrays(tree, gives_batches)
        self.items = _length_of(self._leaves)
        self._in_memory = all(type(x) is np.ndarray for _, x in self._leaves)
        if self._in_memory:
            check_finite(self._leaves, None)
        self.items_of_batch = self.items if size is None else min(size, self.items)
        self.size = min(self.items_of_batch * accumulated, self.items)
        self.steps = -(-self.items // self.size)
        self.repeats = self.steps == 1
        self._placed, self._shuffle = placed, shuffle and not self.repeats

    def batches(self, begin: Position, key: Any) -> Iterator[Piece]:
        """Batches without end, from this position on; each pass is in another order."""
        while self.repeats:
            yield self._only
        yield from self._pass(self._order(begin.epoch, key), begin.items)
        for epoch in itertools.count(begin.epoch + 1):
            yield from self._pass(self._order(epoch, key))

    @property
    def names(self) -> list[str]:
        """The names of the arrays."""
        return [name for name, _ in self._leaves]

    def identity(self) -> dict[str, str]:
        """A digest of each array by its name, by which the data are recognised."""
        return {name: of_array(x) for name, x in self._leaves}

    def example(self) -> dict[str, Any]:
        """The shapes and dtypes of a batch."""
        leaves = [_struct(self.size, x) for _, x in self._leaves]
        return jtu.tree_unflatten(self._structure, leaves)

    def in_order(self) -> Iterator[Piece]:
        """The batches of one pass, in the order of the items."""
        return iter([self._only]) if self.repeats else self._pass(np.arange(self.items))

    @functools.cached_property
    def _only(self) -> Piece:
        """The batch where there is only one; it stays on its devices."""
        return self._piece(np.arange(self.items), True)

    def _pass(self, order: np.ndarray, first: int = 0) -> Iterator[Piece]:
        for i in range(first, self.items, self.size):
            rows = order[i : i + self.size]
            yield self._piece(rows, i + len(rows) == self.items)

    def _order(self, epoch: int, key: Array) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self.items)
        seed = np.asarray(jax.random.key_data(jax.random.fold_in(key, epoch))).ravel()
        return np.random.Generator(np.random.Philox(seed.tolist())).permutation(self.items)

    def _piece(self, rows: np.ndarray, last: bool) -> Piece:
        size = self._placed.rows(self.size if self._padded else len(rows))
        mine = rows[_here(len(rows), size, self._placed)]
        named = [(name, _taken_rows(x, mine)) for name, x in self._leaves]
        if not self._in_memory:
            check_finite(named, mine)
        tree = jtu.tree_unflatten(self._structure, [x for _, x in named])
        return _piece(tree, len(rows), size, last, self._placed, rows)


class Batches:
    """An iterable of batches, each of which is a pytree of arrays `[item, ...]`; as many in
    succession are one piece as are accumulated. Those with fewer items than one before are padded;
    or they aren't."""

    repeats = False
    items = steps = None

    def __init__(
        self, source: Iterable, placed: Placement, accumulated: int = 1, padded: bool = True
    ):
        self._source, self._placed, self._accumulated = source, placed, accumulated
        self._padded = padded
        self.once = iter(source) is source
        self._room = 0
        # The batches that were taken for `identity` and are still to be used, and the rest of the
        # iterator.
        self._begun: tuple[list, Iterator] | None = None

    def batches(self, begin: Position, key: Any) -> Iterator[Piece]:
        """The batches from this position on, pass after pass; of a single pass if the iterable
        can't be repeated."""
        start = begin.batches
        while True:
            source = self._source if self._begun is None else itertools.chain(*self._begun)
            self._begun = None
            # (A batch is on its devices before the next one is asked for, which may reuse its
            # memory.)
            pieces = map(self._piece, self._together(itertools.islice(source, start, None)))
            some = start > 0
            for piece, last in _with_last(pieces):
                some = True
                yield dataclasses.replace(piece, last=last)
            if not some:
                raise ValueError(_NO_BATCH)
            if self.once:
                return
            start = 0

    def _together(self, source: Iterator) -> Iterator[list]:
        """The batches in lists of those that are accumulated."""
        if self._accumulated == 1:
            return ([batch] for batch in source)
        copies = map(_copied, source)
        return iter(lambda: list(itertools.islice(copies, self._accumulated)), [])

    def in_order(self) -> Iterator[Piece]:
        """The batches of one pass."""
        for piece in self.batches(Position(), None):
            yield piece
            if piece.last:
                return

    def identity(self) -> dict[str, str]:
        """A digest of all batches of a list; for other iterables, of the first two."""
        return {
            f"batch {i}{name}": of_array(x)
            for i, tree in enumerate(self._known_size())
            for name, x in _arrays(tree)[0]
        }

    def example(self) -> dict[str, Any]:
        """The shapes and dtypes of a batch."""
        if not (known := self._known_size()):
            raise ValueError(_NO_BATCH)
        leaves, structure = _arrays(known[0])
        return jtu.tree_unflatten(structure, [_struct(_length_of(leaves), x) for _, x in leaves])

    @property
    def items_of_batch(self) -> int:
        """The number of items of the first batch."""
        return jtu.tree_leaves(self.example())[0].shape[0]

    def _known_size(self) -> list:
        if isinstance(self._source, list):
            return self._source
        if self._begun is None:
            source = iter(self._source)
            self._begun = list(map(_copied, itertools.islice(source, 2))), source
        return self._begun[0]

    def _piece(self, trees: list) -> Piece:
        tree = trees[0] if len(trees) == 1 else jax.tree.map(_joined, *trees)
        leaves, structure = _arrays(tree)
        count = _length_of(leaves)
        self._room = max(self._room * self._padded, self._placed.rows(count))
        mine = _here(count, self._room, self._placed)
        check_finite(leaves, None)
        rows = jtu.tree_unflatten(structure, [_taken_rows(x, mine) for _, x in leaves])
        piece = _piece(rows, count, self._room, False, self._placed)
        return dataclasses.replace(piece, batches=len(trees))


def _joined(*batches: np.ndarray) -> np.ndarray:
    return np.concatenate(batches)


_NO_BATCH = "data is empty: it gave no batch."


def source_of(
    data: Any,
    size: int | None,
    placed: Placement,
    shuffle: bool,
    accumulated: int = 1,
    padded: bool = True,
) -> Arrays | Batches:
    """The source of batches for some data, of which so many are accumulated, and which are padded
    or not. **Raises:** `ValueError` for data that is empty, ragged or not numeric."""
    if isinstance(data, list) and not data:
        raise ValueError("data is empty.")
    if not gives_batches(data):
        return Arrays(data, size, placed, shuffle, accumulated, padded)
    if size is not None:
        raise ValueError("batch_size is that of the batches that data gives: drop batch_size.")
    return Batches(data, placed, accumulated, padded)


def _struct(count: int, x: Any) -> jax.ShapeDtypeStruct:
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    return jax.ShapeDtypeStruct((count, *x.shape[1:]), dtype)


class BatchesAhead:
    """An iterator over batches that moves the next ones to the devices in advance."""

    def __init__(self, pieces: Iterator[Piece]):
        self._ready: queue.Queue = queue.Queue(2)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(pieces,), daemon=True)
        self._thread.start()

    def _fill(self, pieces: Iterator[Piece]) -> None:
        try:
            for piece in pieces:
                if not self._put(piece):
                    return
            self._put(StopIteration())
        except BaseException as e:  # passed on to the thread that waits for it
            self._put(e)

    def _put(self, item: Piece | BaseException) -> bool:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put(item, timeout=0.1)
                return True
        return False

    def __iter__(self):
        return self

    def __next__(self) -> Piece:
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        self._closed.set()
        self._thread.join()


def check_finite(leaves: list, rows: np.ndarray | None) -> None:
    """Check that arrays are finite. Times `[item, time]` may end in inf; and where numbers of an
    array `[item, time, ...]` are NaN, these are missing observations.

    **Raises:** `ValueError` where other entries are not finite.
    """
    some = [(name, x) for name, x in leaves if np.issubdtype(x.dtype, np.inexact)]
    some = [(name, x, wrong) for name, x in some if (wrong := ~np.isfinite(x)).any()]
    late = [wrong for _, x, wrong in some if x.ndim == 2 and _ends_in_infinity(x, wrong)]
    for name, x, wrong in some:
        if x.ndim > 1:
            wrong = np.isinf(x)
        for rest in late:
            if wrong.shape[:2] == rest.shape:
                wrong = wrong & ~rest.reshape(*rest.shape, *(1,) * (wrong.ndim - 2))
        if not wrong.any():
            continue
        first = int(np.flatnonzero(wrong.reshape(len(wrong), -1).any(1))[0])
        where = f"item {first if rows is None else rows[first]}"
        raise ValueError(
            f"data holds NaN or infinity: {name}, first in {where}. Leave such items out, or "
            "replace the values and give the loss a mask of them. (In arrays [item, time, ...], "
            "NaN is a missing observation, and times [item, time] may end in inf.)"
        )


def _ends_in_infinity(times: np.ndarray, wrong: np.ndarray) -> bool:
    """Whether rows of times are in order, and infinite from their first infinite entry on."""
    meant = ~wrong[:, 1:]
    order = np.sign(np.where(meant, np.diff(np.where(wrong, 0, times)), 0))
    return bool(
        not np.isnan(times).any()
        and (wrong[:, 1:] >= wrong[:, :-1]).all()
        and ((order >= 0).all() or (order <= 0).all())
    )


def _here(count: int, size: int, placed: Placement) -> np.ndarray:
    """The indices, among `count` items, of this process's part of `size` rows, filled up with the
    last item."""
    return np.minimum(np.arange(size), count - 1)[placed.here(size)]


def _piece(
    rows: PyTree,
    count: int,
    size: int,
    last: bool,
    placed: Placement,
    items: np.ndarray | None = None,
) -> Piece:
    place = np.arange(size, dtype=np.int32)[placed.here(size)]
    rows, place = placed.split((rows, place), size)
    return Piece(PaddedBatch(rows, place, placed.everywhere(np.int32(count))), count, last, items)


def gives_batches(x: Any) -> bool:
    """Whether an object is an iterable of batches, such as a list; a tuple is a pytree."""
    is_one = isinstance(x, tuple | dict | str) or _is_array(x) or _has_columns(x)
    return isinstance(x, Iterable) and not is_one


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype") and hasattr(x, "__getitem__")


def _has_columns(x: Any) -> bool:
    """Whether an object is a table of pandas, Polars, Arrow, ..., or a dataset of xarray."""
    return hasattr(type(x), "columns") or hasattr(type(x), "data_vars")


def _arrays(tree: PyTree, is_leaf: Callable | None = None) -> tuple[list[tuple[str, Any]], Any]:
    """The arrays of a pytree by name, and its structure."""
    leaves, structure = jtu.tree_flatten_with_path(tree, is_leaf)
    named = [(jtu.keystr(path) or "data", x) for path, x in leaves]
    return [(name, _array(name, x)) for name, x in named], structure


def _array(name: str, x: Any) -> Any:
    """An array whose rows are taken by their positions: NumPy's, or one on disk."""
    if _has_columns(x):
        raise TypeError(
            f"data must be made of arrays, and {name} is a {type(x).__name__}: give its columns, "
            "{name: frame[name] for name in (...)}, or its rows as a matrix, frame.to_numpy()."
        )
    if not _is_array(x) or not x.shape:
        raise TypeError(
            f"data must be made of arrays, of which each has an axis of items: {name} is {x!r}. "
            "(An iterable gives batches of items, as grain's and Hugging Face's batch(32) do.)"
        )
    # (Indices of pandas and xarray may be labels, and other libraries have their own dtypes.)
    labelled = hasattr(type(x), "iloc") or hasattr(type(x), "coords")
    if labelled or isinstance(x, jax.Array) or not isinstance(x.dtype, np.dtype):
        x = np.asarray(x)
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"data must have no masked arrays, and {name} is one: give its filled values, and the "
            "mask as another array, which the loss takes into account."
        )
    if not (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == np.bool_):
        raise TypeError(
            f"data must be numbers, and {name} has the dtype {x.dtype}: make numbers of it, such "
            "as by .astype(float)."
        )
    return x


def _length_of(leaves: list) -> int:
    if not leaves:
        raise ValueError("data is empty: it has no arrays.")
    lengths = {name: x.shape[0] for name, x in leaves}
    if len(set(lengths.values())) > 1:
        (one, a), *rest = lengths.items()
        other, b = next(x for x in rest if x[1] != a)
        raise ValueError(
            f"data is ragged: the first axis of every array is the items, and {one} has {a} of "
            f"them, {other} has {b}."
        )
    count = next(iter(lengths.values()))
    if not count:
        raise ValueError(f"data is empty: {leaves[0][0]} has the shape {leaves[0][1].shape}.")
    return count


def _taken_rows(x: Any, rows: np.ndarray) -> np.ndarray:
    """These rows of an array. Rows on disk are read in order, and each only once."""
    if isinstance(x, np.ndarray) and not isinstance(x, np.memmap):
        return x[rows]
    unique, back = np.unique(rows, return_inverse=True)
    if len(unique) == unique[-1] - unique[0] + 1:
        read = x[int(unique[0]) : int(unique[-1]) + 1]
    elif hasattr(x, "oindex"):  # an array of Zarr
        read = x.oindex[unique]  # pyright: ignore
    else:
        read = x[unique]
    return np.asarray(read)[back]


def _copied(tree: PyTree) -> dict[str, np.ndarray]:
    leaves, structure = _arrays(tree)
    return jtu.tree_unflatten(structure, [np.array(x) for _, x in leaves])


def _with_last(source: Iterable) -> Iterator[tuple[Any, bool]]:
    """The elements, each with whether it is the last one."""
    end = object()
    for item, following in itertools.pairwise(itertools.chain(source, [end])):
        yield item, following is end
