"""The number of calls from `solve` to the time loop, and of records that are passed along."""

import dataclasses
import inspect
import pathlib
import sys
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import pytest

import ensembleode as eo
from ensembleode.core.executor import Executor
from ensembleode.executors.places import Place


ROOT = str(pathlib.Path(eo.__file__).parent)
# The primitive of the loop, and the function that binds it.
LOOP = ("ensembleode_kernel", "call")


def is_record(x: Any) -> bool:
    """Whether this is a record of ours that is handed on. (An executor and a place do
    something.)"""
    named = isinstance(x, tuple) and hasattr(x, "_fields")
    ours = type(x).__module__.startswith("ensembleode.")
    return ours and (named or dataclasses.is_dataclass(x)) and not isinstance(x, Executor | Place)


def given(frame: Any) -> list:
    """The arguments of a call that has just begun."""
    args = inspect.getargvalues(frame)
    starred = [*args.locals[args.varargs]] if args.varargs else []
    return [*(args.locals[name] for name in args.args), *starred]


class Way:
    """The calls of ours, `solve` first, on the way to the loop's primitive, and the records that
    they are given, and give back. (What `solve` itself is given, and returns, is the user's.)"""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls: list[Any] = []
        self.down: set[str] = set()
        self.up: set[str] = set()
        self._stack: list[tuple[Any, set[str]]] = []
        bind = jex.Primitive.bind

        def watched(prim, *args, **params):
            name = self._stack[-1][0].f_code.co_name if self._stack else None
            if not self.calls and (prim.name, name) == LOOP:
                self.calls = [frame for frame, _ in self._stack]
                self.down = set().union(*(records for _, records in self._stack[1:]))
            return bind(prim, *args, **params)

        monkeypatch.setattr(jex.Primitive, "bind", watched)

    def __call__(self, frame: Any, event: str, value: Any) -> None:
        if not frame.f_code.co_filename.startswith(ROOT):
            return
        if event == "call":
            names = {type(x).__name__ for x in given(frame) if is_record(x)}
            self._stack.append((frame, names))
        elif event == "return" and self._stack and self._stack[-1][0] is frame:
            self._stack.pop()
            if frame in self.calls[1:]:
                parts = value if type(value) is tuple else [value]
                self.up |= {type(x).__name__ for x in parts if is_record(x)}


def test_few_calls_and_records(monkeypatch):
    # (A field of its own: of one that is known nothing is traced.)
    prob = eo.ODEProblem(lambda u, p, t: -p * jnp.sin(u), jnp.ones(2), (0.0, 1.0), 1.0)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=ctx.index / 10))
    way = Way(monkeypatch)
    sys.setprofile(way)
    try:
        eo.solve(ens, trajectories=3, engine="compiled", saveat=0.25)
    finally:
        sys.setprofile(None)
    calls = [frame.f_code.co_qualname for frame in way.calls]
    assert (calls[0], calls[-1]) == ("solve", LOOP[1])
    assert len(calls) <= 16, calls
    assert way.down == {"Run", "Job", "Plan", "Lane"}
    assert way.up - {"EnsembleSolution"} == {"Result", "Outcome"}
