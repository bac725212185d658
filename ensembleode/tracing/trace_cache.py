"""Traces that are used again: of functions that reach the same as when they were traced.

A solve that is called eagerly traces `f`, `prob_func` and `output_func`, which takes milliseconds.
What they reach is looked at each time (see `ensembleode.tracing.reach`), and only where all of it
is what it was is the trace of then taken. A wrong answer would be worse than a slow one, so
whatever can't be told to be the same is traced anew.

**Memory:** the last 128 traces are kept: jaxprs, and the code, types and small values that they are
known by. JAX arrays that functions close over are not kept alive, nor are the functions (but
derivative rules of the user's own are, with what they close over). When such an array is gone, so
is the trace.
"""

import collections
import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..core.keys import is_key
from .program import is_self_contained, is_tracer, Program
from .reach import Key, reached, Unkeyed


@dataclasses.dataclass(frozen=True)
class Operand:
    """Stands for the operand with this number, whichever array that is the next time."""

    index: int


@dataclasses.dataclass(frozen=True)
class _Closed:
    """Stands for the array with this number among those that the key is made of."""

    index: int


class _Entry(NamedTuple):
    alive: tuple[Callable[[], Any], ...]
    kept: tuple
    values: tuple
    static: Any


class Traces:
    """The traces of late, the oldest of which are forgotten. Any thread may use it."""

    def __init__(self, size: int = 128):
        self._size = size
        self._entries: collections.OrderedDict[tuple, _Entry] = collections.OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: Key) -> tuple[list, Any] | None:
        """What was kept under an equal key: the values, and the rest."""
        with self._lock:
            entry = self._entries.get(key.parts)
            if entry is None:
                return None
            if not _are(entry.alive, key.arrays):  # another has the id of one that is gone
                del self._entries[key.parts]
                return None
            self._entries.move_to_end(key.parts)
        values = [key.arrays[x.index] if type(x) is _Closed else x for x in entry.values]
        return values, entry.static

    def keep(self, key: Key, values: Sequence, static: Any) -> None:
        """Keep values (arrays, numbers and `Operand`s; no tracers) and the rest."""
        places = {id(x): _Closed(i) for i, x in enumerate(key.arrays)}
        kept = tuple(places[id(x)] if id(x) in places else _own(x) for x in values)
        alive = tuple(map(weakref.ref, key.arrays))
        entry = _Entry(alive, key.kept, kept, static)
        with self._lock:
            gone = [k for k, x in self._entries.items() if any(ref() is None for ref in x.alive)]
            for each in gone:
                del self._entries[each]
            self._entries[key.parts] = entry
            self._entries.move_to_end(key.parts)
            while len(self._entries) > self._size:
                self._entries.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)


def _are(alive: Sequence, arrays: Sequence) -> bool:
    return all(ref() is x for ref, x in zip(alive, arrays, strict=True))


def _own(x: Any) -> Any:
    """A copy of an array that may be, or share the memory of, a NumPy array that is written into.
    (And JAX takes such an array for what it was as long as a constant made of it lives.)"""
    if isinstance(x, jax.Array) and not is_key(x):
        return jax.device_put(x, may_alias=False)  # (compiles nothing, unlike x.copy())
    return x.copy() if isinstance(x, np.ndarray) else x


traces = Traces()


def key_of(*things: Any) -> Key | None:
    """What these reach; None where that can't be told."""
    try:
        return reached(*things)
    except Unkeyed:
        return None


def may_keep(values: Sequence, *programs: Program) -> bool:
    """Whether a trace is nothing but a computation, of values that are known."""
    return all(map(is_self_contained, programs)) and not any(map(is_tracer, values))


def traced_once(things: tuple, make: Callable[[], tuple[Program, tuple]]) -> tuple[Program, tuple]:
    """The program and constants that `make` traces, which depend on nothing but `things`: made
    anew only where these have changed."""
    key = key_of(*things)
    if key is None:
        return make()
    found = traces.find(key)
    if found is not None:
        consts, program = found
        return program, tuple(consts)
    program, consts = make()
    # (Not where tracing changed what it depends on: then it has to happen each time.)
    if may_keep(consts, program) and key_of(*things) == key:
        traces.keep(key, consts, program)
    return program, consts
