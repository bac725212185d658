"""Fingerprints of a solve: short values that are equal in every process if everything that the
resulting numbers depend on is equal.

A fingerprint covers everything that JAX traces, with its constants. What Python functions compute
on the host can't be known from the trace, nor from their code, which might read a file. Functions
and classes of installed packages are identified by name and version; for others the user has to
give a key.
"""

import collections
import contextlib
import hashlib
import importlib.metadata
import re
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from ..ground.devices.placement import platform
from ..ground.installed import name_of
from ..ground.keys import raw
from ..plan.plan import Plan
from ..plan.trajectory_numbers import TrajectoryNumbers
from ..problem.number_table import NUMBERS
from ..problem.options import time_dtype_of
from ..tracing.evaluation import equations, is_jaxpr, params_of
from ..tracing.program import custom_rules, Program, RULE_PARAMS, trace
from .job import integers, Job, may_rerun


# A number in the text of a jaxpr, before its type.
_LITERAL = re.compile(rb"(?<=[ (])(-?[\d.][\w.+-]*|-?inf|nan|True|False)(?=:\w+\[\])")


# Classes that had other names when stores were written; fingerprints keep those names.
_NAMES = {
    "ControlledComponents": "Controlled",
    "CountingESDIRK": "Method",
    "_DiffraxMethod": "_Method",
    "JuliaMethod": "Description",
    "PlacedJuliaMethod": "Method",
    "PlannedSolver": "Solver",
    "SwitchingRule": "Rule",
    "TrajectoryNumbers": "Lane",
    "_RetriedSolver": "_Retried",
    "_SolverBeforeJumps": "_BeforeJumps",
}
_RENAMED = re.compile(rf"\b({'|'.join(_NAMES)})\b")
# Numbers that there were not when stores were written; they count where they are given.
_LATER = ("max_norm",)


class NotKnownError(Exception):
    """A part of the ensemble can't be identified by what it computes; the message says why."""


def fingerprint(job: Job, store_key: str | None = None) -> dict[str, Any]:
    """The fingerprint: values by name; values whose names begin with # are digests. The `store_key`
    stands for all that the user's functions and classes compute on the host.

    **Raises:** `NotKnownError` where it can't be known what a part computes.
    """
    from ..ground.version import __version__

    plan, shared = job.plan, job.trajectories.shared
    versions = {"ensembleode": __version__}
    versions |= {package: importlib.metadata.version(package) for package in ("jax", "jaxlib")}
    versions |= plan.engine.versions(plan.method)
    fields = {
        "#f": plan.field,
        "#output_func": plan.output,
        "#the solver's options": plan.method.value,
        **{f"#{name}": x[0] if len(x) == 1 else x for name, x in _numbers(plan, shared).items()},
        "#key (or seed)": job.key,
        "#what output_func closes over": job.output_consts,
        "#which of them prob_func changes": _without_later(plan.batched),
        "#prob_func": _prob_func_trace(job),
    }
    if plan.apart is not None:
        fields["#fn of SavingCallback"] = plan.apart
    if plan.form is not None:
        fields["#what is known of f"] = (plan.form.product, plan.form.mass)
    if plan.events is not None:
        fields["#what callbacks do"] = (plan.events.about, [x.program for x in plan.events.parts])
        fields["#max_events"] = job.trajectories.options["max_events"]
    digests = {}
    for name, value in fields.items():
        try:
            text = text_of(value, host=store_key is None)
        except NotKnownError as e:
            raise NotKnownError(f"{name.lstrip('#')}: it {e}") from e
        digests[name] = f"{digest_of([text]):016x}"
    if store_key is not None:
        digests["store_key"] = store_key
    return {
        "engine": plan.engine.name,
        "maxiters": plan.maxiters,
        "backend": platform(),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "time": str(time_dtype_of(plan.state)),
        **digests,
    }


def _numbers(plan: Plan, shared: TrajectoryNumbers) -> dict[str, tuple]:
    """The numbers that all trajectories share, by their names in a fingerprint."""
    found: dict[str, tuple] = {name: (program,) for name, program in plan.beside}
    found |= {"saveat": (plan.saving,), "u0": (plan.state,)}
    known = _without_later(plan.batched)._fields
    for row in (x for x in NUMBERS if x.name in known):
        if name := row.digest or row.option:
            found[name] = (*found.get(name, ()), getattr(shared, row.name))
    found["u0"] = (*found["u0"], plan.tree and plan.tree._replace(order=()))
    if plan.saved is not None:
        found["save_idxs"] = (plan.saved,)
    if plan.extension is not None:
        found["integrand"] = (plan.extension,)
    return found


def _without_later(numbers: TrajectoryNumbers) -> Any:
    """The numbers without those of `_LATER` that aren't given."""
    named = {k: x for k, x in numbers._asdict().items() if k not in _LATER or x is not None}
    return collections.namedtuple("TrajectoryNumbers", named)(**named)


def _prob_func_trace(job: Job) -> Any:
    """The trace of `prob_func` over an index and a repeat. If it can't be traced, the numbers that
    it returned in the first run, with the function itself where there may be reruns."""
    every, given = job.trajectories, job.arguments

    def made(indices, repeat):
        lanes = every.made(indices, repeat)
        own = jax.tree.map(lambda varies, x: x if varies else None, every.batched, lanes)
        return _without_later(own)

    if every.repeatable:
        return trace(made, integers(np.arange(2)), integers(1), rules=True)
    prob_func = given.ens.prob_func if may_rerun(job.plan) else None
    return made(integers(np.arange(given.n or 1)), 1), prob_func


def text_of(value: Any, host: bool = True) -> bytes:
    """Bytes that are equal for equal values, in every process; with `host`, functions that Python
    runs on the host count.

    **Raises:** `NotKnownError` where such a function is not from an installed package.
    """
    leaves, structure = jtu.tree_flatten(value, is_leaf=lambda x: isinstance(x, Program))
    parts = [_plain(structure)]
    if host:
        parts += _texts_of_nodes(structure)
    for x in leaves:
        if isinstance(x, Program):
            parts += [_plain(x.out_tree), *_texts_with_rules(x.jaxpr, host)]
        elif hasattr(x, "shape") and hasattr(x, "dtype"):
            parts.append(f"{x.shape} {x.dtype}".encode())
            parts.append(np.asarray(raw(x)).tobytes() if eqx.is_array_like(x) else b"")
        elif callable(x):
            parts += [_text_of_function(x)] if host else []
        else:
            parts.append(_plain(repr(x)))
    return b"\n".join(parts)


def text_of_jaxpr(closed: ClosedJaxpr, numbers: bool = True) -> bytes:
    """`text_of` a closed jaxpr and its constants; without `numbers`, their values don't count.

    **Raises:** `NotKnownError` as `text_of`.
    """
    consts = map(text_of, closed.consts if numbers else ())
    text = b"\n".join([*_texts_with_rules(closed.jaxpr, True), *consts])
    return text if numbers else _LITERAL.sub(b"", text)


def _plain(x: Any) -> bytes:
    """A value as text, without the addresses of functions, file names and line numbers."""
    text = _RENAMED.sub(lambda found: _NAMES[found[0]], str(x))
    return re.sub(r'0x[0-9a-f]{6,}|file "[^"]*", line \d+', "", text).encode()


def _texts_of_nodes(structure: Any) -> Iterator[bytes]:
    """The texts of the classes in a pytree, such as a solver, and of the functions in its nodes."""
    found = structure.node_data()
    if found is None:
        return
    kind, about = found
    if not issubclass(kind, tuple | list | dict | type(None)):
        yield _text_of_function(kind)
        yield from map(_text_of_function, filter(callable, jtu.tree_leaves(about)))
    for child in structure.children():
        yield from _texts_of_nodes(child)


def _texts_with_rules(jaxpr: Jaxpr, host: bool) -> Iterator[bytes]:
    """`_texts_of` a jaxpr, and of the derivative rules of functions in it, from which implicit
    methods get their Jacobian."""
    yield from _texts_of(jaxpr, host)
    for _, rule, numbers in custom_rules(jaxpr, _forward_calls):
        yield str(numbers).encode()
        if isinstance(rule, Exception):
            yield type(rule).__name__.encode()
        elif rule is not None:
            yield from (text_of(const, host) for const in rule.consts)
            yield from _texts_of(rule.jaxpr, host)


def _forward_calls(jaxpr: Jaxpr) -> Iterator:
    """The calls of functions with rules of their own for the forward mode, at any depth."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "custom_jvp_call":
            yield eqn
        if not _is_told(eqn):
            for x in filter(is_jaxpr, params_of(eqn)):
                yield from _forward_calls(getattr(x, "jaxpr", x))


def _texts_of(jaxpr: Jaxpr, host: bool) -> Iterator[bytes]:
    """The texts of a jaxpr, and of the constants and functions in it, at any depth."""
    yield _plain(_without_functions(jaxpr))
    for eqn in jaxpr.eqns:
        if _is_told(eqn):
            yield from (_text_of_function(x) for x in _functions_of(eqn))
            continue
        for x in params_of(eqn):
            if hasattr(x, "jaxpr") and hasattr(x, "consts"):
                for const in x.consts:
                    yield text_of(const, host)
                yield from _texts_of(x.jaxpr, host)
            elif hasattr(x, "eqns"):
                yield from _texts_of(x, host)
        if host:
            yield from map(_text_of_function, _called_by(eqn))


def _text_of_function(x: Any) -> bytes:
    """The text of a function or class: that of its attribute `stands_for`, if it has one, or its
    name."""
    if not isinstance(x, type) and hasattr(x, "stands_for"):
        return text_of(x.stands_for)
    if (name := name_of(x)) is None:
        what = "has the class" if isinstance(x, type) else "calls the Python function"
        raise NotKnownError(
            f"{what} {getattr(x, '__qualname__', type(x).__qualname__)} of your own"
        )
    return _plain(name)


def _is_told(eqn: JaxprEqn) -> bool:
    """Whether a function among an equation's parameters has an attribute `stands_for`, which says
    what the equation computes."""
    return any(hasattr(x, "stands_for") for x in _functions_of(eqn))


def _called_by(eqn: JaxprEqn) -> list:
    """The Python functions that compute the results of an equation."""
    # (The first two primitives have no results; the rule of the last one computes the same in
    # another way.)
    if eqn.primitive.name in ("debug_callback", "debug_print", "custom_vmap_call"):
        return []
    if eqn.primitive.name == "ffi_call":
        raise NotKnownError(f"calls {eqn.params.get('target_name')!r} of a compiled library")
    return [getattr(x, "callback_func", x) for x in _functions_of(eqn)]


def _functions_of(eqn: JaxprEqn) -> list:
    """The functions among an equation's parameters, and objects that hold one (JAX's callbacks)."""
    params = [x for name, x in eqn.params.items() if name not in RULE_PARAMS]
    return list(filter(_is_function, jtu.tree_leaves(params, is_leaf=is_jaxpr)))


def _is_function(x: Any) -> bool:
    # A mesh of devices is callable, since it is a decorator.
    is_other = is_jaxpr(x) or isinstance(x, type | contextlib.ContextDecorator)
    return hasattr(x, "callback_func") or (callable(x) and not is_other)


def _without_functions(jaxpr: ClosedJaxpr | Jaxpr) -> ClosedJaxpr | Jaxpr:
    """The jaxpr with a fixed word in place of each function, whose `repr` may differ between
    processes."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)  # in the newest JAX, a closed jaxpr is its own jaxpr
    if inner is not jaxpr:
        return jaxpr.replace(jaxpr=_without_functions(inner))
    if not any(map(_functions_of, equations(jaxpr))):
        return jaxpr

    def replaced(x):
        return "function" if _is_function(x) else _without_functions(x) if is_jaxpr(x) else x

    def of_words(eqn):
        if _is_told(eqn):
            return eqn.replace(params={})
        rules = {name: x for name, x in eqn.params.items() if name in RULE_PARAMS}
        params = jtu.tree_map(replaced, eqn.params, is_leaf=is_jaxpr)
        return eqn.replace(params={**params, **rules})

    return jaxpr.replace(eqns=list(map(of_words, jaxpr.eqns)))


def digest_of(parts: list) -> int:
    """A digest of eight bytes as an integer, which is never zero."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else np.ascontiguousarray(part).tobytes())
    return int.from_bytes(digest.digest(), "little") or 1
