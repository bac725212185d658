"""Solves on a service from within JAX: under `jit`, `vmap` and `grad`.

The request is a primitive that calls the host. Under `vmap`, it is one request for more
trajectories; its gradient is a request of its own. Arguments that are known when the program is
traced go into the request as they are, in their own precision.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.interpreters import ad, batching, mlir

from ...ground.host import host_call
from ...ground.retcode import is_successful, ReturnCodes
from ...plan.saving import grid, Spacing
from ...problem import sensitivity
from ...solution.solution import EngineChoice, EnsembleSolution, ODESolution
from ...solution.stats import Stats
from ...tracing.program import is_tracer, Static
from .. import exchange
from ..exchange import JsonObject


_FORWARD = (
    "this solve on a service is differentiated in forward mode (jvp, jacfwd, hessian), or twice; a "
    "service gives first gradients, in reverse mode (grad, vjp, jacrev)."
)
_NOT_DIFFERENTIATED = (
    "this solve on a service is differentiated by {}, but a service gives gradients by u0 and p "
    "only: hold it by jax.lax.stop_gradient."
)


# The fields whose trajectory axis tells how many trajectories there are.
_COUNTED = frozenset({"u0", "p", "tspan"})


@dataclasses.dataclass(frozen=True)
class RequestField:
    """A field of the request."""

    name: str
    own: bool  # whether each trajectory has its own value
    fixed: Static | None = None  # its numbers; None if they are an operand
    times: int = 1  # how often the numbers in `fixed` are repeated, for the same trajectories again

    def numbers(self, operands: Any) -> np.ndarray:
        """The numbers of this field for the request: the next one of the operands, unless they are
        fixed."""
        if self.fixed is None:
            return next(operands)
        array = self.fixed.value
        return np.concatenate([array] * self.times) if self.own and self.times > 1 else array


@dataclasses.dataclass(frozen=True)
class RemoteCall:
    """The static part of a request, which is made when its operands are known."""

    service: Any  # the object that makes requests; compared by identity
    problem: str
    deadline: float | None
    fields: tuple[RequestField, ...]
    n: int | None  # the number of trajectories; None for one without an axis
    state: tuple[int, ...]  # the shape of the state
    dtype: np.dtype
    rows: int
    own_times: bool  # whether the saved times have the trajectory axis, too
    tspan: tuple[float, float]  # the registered time span
    gradient: bool = False  # whether it is for a gradient; its last field is then the cotangent

    @property
    def operands(self) -> tuple[RequestField, ...]:
        return tuple(field for field in self.fields if field.fixed is None)

    @property
    def differentiated(self) -> tuple[RequestField, ...]:
        return tuple(field for field in self.operands if field.name in ("u0", "p"))

    def results(self, operands: Sequence) -> list[jax.ShapeDtypeStruct]:
        """The abstract results: those of `_SolveResults`, or one for each of `differentiated`."""
        if self.gradient:
            pairs = zip(self.operands, operands, strict=True)
            found = [x for field, x in pairs if field in self.differentiated]
            return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in found]
        lead = () if self.n is None else (self.n,)
        u, t = (*lead, self.rows, *self.state), (*(lead if self.own_times else ()), self.rows)
        kinds = [(u, self.dtype), (t, _time_dtype(self.dtype)), (lead, jnp.int8)]
        return [jax.ShapeDtypeStruct(*kind) for kind in [*kinds, *[(lead, jnp.int32)] * 3]]

    def __call__(self, *operands: np.ndarray) -> list[np.ndarray]:
        given = iter(operands)
        body = {field.name: field.numbers(given) for field in self.fields}
        if self.n is not None and not any(f.own for f in self.fields if f.name in _COUNTED):
            tspan = body.get("tspan", np.array(self.tspan))
            body["tspan"] = np.broadcast_to(tspan, (self.n, 2))
        results = self.results(operands)
        found = self._gradients(body) if self.gradient else self._solution(body, results)
        return [np.asarray(x).astype(r.dtype) for x, r in zip(found, results, strict=True)]

    def _solution(self, body: dict, results: Sequence[jax.ShapeDtypeStruct]) -> list[np.ndarray]:
        sol: Any = self.service._ask_solution(self.problem, body, self.deadline)
        many = isinstance(sol, EnsembleSolution)
        lengths = sol.lengths if many else sol.length
        if np.shape(sol.u) != results[0].shape:
            raise exchange.ServiceError(
                f"the service answered states of the shape {np.shape(sol.u)}, not "
                f"{results[0].shape}, for which this was compiled. Pass saveat as an array of "
                "times; if the problem has changed at the service, ask client.problem() and "
                "compile again.",
                code="bad_answer",
            )
        t = np.asarray(sol.t)
        if t.ndim == 2 and not self.own_times:
            t = t[0]
        t = np.broadcast_to(t, results[1].shape)
        return [
            *_SolveResults(sol.u, t, sol.retcode, lengths, sol.stats.naccept, sol.stats.nreject)
        ]

    def _gradients(self, body: dict) -> list[np.ndarray]:
        cotangent = np.array(body["cotangent"])
        each = cotangent.reshape(self.n or 1, -1)
        # A service accepts only finite numbers. The gradient of a loss that is NaN is NaN.
        lost = ~np.isfinite(each).all(axis=1)
        each[lost] = 0
        found = self.service._ask_gradients(
            self.problem, {**body, "cotangent": each.reshape(cotangent.shape)}, self.deadline
        )
        gradients = []
        for field in self.differentiated:
            g = np.array(getattr(found, field.name))
            if g.shape != body[field.name].shape:
                raise exchange.ServiceError(
                    f"the service answered a gradient by {field.name} of the shape {g.shape}, not "
                    f"{body[field.name].shape}.",
                    code="bad_answer",
                )
            if field.own:
                g[lost] = np.nan
            elif lost.any():
                g[...] = np.nan
            gradients.append(g)
        return gradients


class _SolveResults(NamedTuple):
    """The results of a call that is a solve, named as in a solution."""

    u: Any
    t: Any
    retcode: ReturnCodes
    lengths: Any
    naccept: Any
    nreject: Any


_remote_p = jex.Primitive("ensembleode_remote")
_remote_p.multiple_results = True


@_remote_p.def_impl
def _evaluated(*operands: Any, call: RemoteCall) -> list:
    return [jnp.asarray(x) for x in call(*map(np.asarray, operands))]


@_remote_p.def_abstract_eval
def _abstract(*operands: Any, call: RemoteCall) -> list:
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in call.results(operands)]


def _staged(*operands: Any, call: RemoteCall) -> list:
    return host_call(call, call.results(operands), *operands)


def _mapped(operands: Sequence, dims: Sequence, *, call: RemoteCall) -> tuple[list, list]:
    """One request of `size` times as many trajectories, those of the first mapped entry first."""
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    n = call.n or 1
    rest = iter(zip(operands, dims, strict=True))
    fields, given, moves_times = [], [], False
    for field in call.fields:
        if field.fixed is not None:
            fields.append(dataclasses.replace(field, times=size * field.times))
            continue
        x, d = next(rest)
        wanted = call.gradient and field.name in ("u0", "p", "cotangent")
        own = field.own or d is not None or wanted
        if d is not None:
            x = jnp.moveaxis(x, d, 0)
        elif own:
            x = jnp.broadcast_to(x, (size, *x.shape))
        if own and not field.own:
            x = jnp.broadcast_to(x[:, None], (size, n, *x.shape[1:]))
        if own:
            # The shape is [size, n, ...] here.
            x = x.reshape(size * n, *x.shape[2:])
        moves_times |= field.name in ("tspan", "saveat") and d is not None
        fields.append(dataclasses.replace(field, own=own))
        given.append(x)
    own_times = call.own_times or moves_times
    folded = dataclasses.replace(call, fields=tuple(fields), n=size * n, own_times=own_times)
    outs = _remote_p.bind(*given, call=folded)
    # Without an axis of trajectories, the mapped axis is the only one.
    split = (size,) if call.n is None else (size, n)
    if call.gradient:
        found = []
        for field, g in zip(call.differentiated, outs, strict=True):
            g = g.reshape(*split, *g.shape[1:])
            found.append(g if call.n is None or field.own else jnp.sum(g, axis=1))
        return found, [0] * len(found)
    moved: list = [0] * len(outs)
    for i, x in enumerate(outs):
        if i != 1 or own_times:
            outs[i] = x.reshape(*split, *x.shape[1:])
    if not own_times:
        moved[1] = None
    elif not call.own_times and call.n is not None:
        outs[1] = outs[1][:, 0]  # all trajectories of a request share the times
    return outs, moved


def _differentiated(*_: Any, **__: Any) -> Any:
    raise TypeError(_FORWARD)


ad.primitive_jvps[_remote_p] = _differentiated
batching.primitive_batchers[_remote_p] = _mapped
mlir.register_lowering(_remote_p, mlir.lower_fun(_staged, multiple_results=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _answered(call: RemoteCall, operands: tuple) -> list:
    return _remote_p.bind(*operands, call=call)


def _answered_fwd(call: RemoteCall, operands: tuple) -> tuple[list, tuple]:
    outs = _remote_p.bind(*operands, call=call)
    solved = _SolveResults(*outs)
    return outs, (operands, solved.retcode, solved.lengths)


def _answered_bwd(call: RemoteCall, kept: tuple, cotangents: list) -> tuple:
    operands, retcode, lengths = kept
    masked = _masked if call.n is None else jax.vmap(_masked)
    ct = masked(cotangents[0], retcode, lengths)
    if not call.differentiated:
        return (tuple(map(jnp.zeros_like, operands)),)
    fields = (*call.fields, RequestField("cotangent", call.n is not None))
    back = dataclasses.replace(call, fields=fields, gradient=True)
    found = iter(_remote_p.bind(*operands, ct, call=back))
    every, differentiated = zip(call.operands, operands, strict=True), call.differentiated
    return (tuple(next(found) if f in differentiated else jnp.zeros_like(x) for f, x in every),)


def _masked(cotangent: Array, retcode: Array, length: Array) -> Array:
    """The cotangent of one trajectory: zero where it failed, so that a loss can mask it, and in
    rows that were not reached."""
    rows = jnp.arange(cotangent.shape[0], dtype=length.dtype)
    keep = (rows < length) & is_successful(retcode)
    return jnp.where(keep.reshape(-1, *(1,) * (cotangent.ndim - 1)), cotangent, 0)


_answered.defvjp(_answered_fwd, _answered_bwd)


def solve(
    service: Any,
    description: Mapping[str, Any],
    arguments: JsonObject,
    deadline: float | None,
    engine: EngineChoice,
) -> EnsembleSolution | ODESolution:
    """A solve with some traced arguments (of the arrays `u0`, `p`, `tspan` and `saveat`), by a
    service with the methods `_ask_solution(problem, body, deadline)` and `_ask_gradients`. Raises
    `ValueError` for shapes that don't fit, and `TypeError` for a grid of times whose size isn't
    known."""
    given = dict(arguments)
    state = tuple(description["state"]["shape"])
    dtype = np.dtype(description["state"]["dtype"])
    rows = _rows(description, given, dtype)
    p = (description["parameters"]["size"],)
    shapes = {"u0": state, "p": p, "tspan": (2,), "saveat": (rows,)}
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    fields, operands, counts = [], [], {}
    for name, x in given.items():
        own = _is_own(name, x, shapes[name])
        if own:
            counts[name] = x.shape[0]
        if not is_tracer(x):
            fields.append(RequestField(name, own, Static(x)))
            continue
        fields.append(RequestField(name, own))
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            x = x.astype(_time_dtype(dtype))
        held = name in ("tspan", "saveat")
        reverse = _NOT_DIFFERENTIATED.format(name) if held else None
        errors = {"forward_error": reverse or _FORWARD, "reverse_error": reverse}
        operands.append(sensitivity._mark(x, second_error=None, **errors))
    if len(set(counts.values())) > 1:
        raise ValueError(f"the arguments have different numbers of trajectories: {counts}.")
    n = next(iter(counts.values()), None)
    own_times = any(field.own for field in fields if field.name in ("tspan", "saveat"))
    name, tspan = description["name"], tuple(description["tspan"])
    call = RemoteCall(
        service, name, deadline, tuple(fields), n, state, dtype, rows, own_times, tspan
    )
    answered: Any = _answered(call, tuple(operands))
    x = _SolveResults(*answered)
    stats = Stats(x.naccept, x.nreject, None)
    if n is None:
        return ODESolution(x.u, x.t, x.retcode, stats, x.lengths, None, engine)
    return EnsembleSolution(
        x.u, x.t, x.retcode, x.lengths, stats, True, math.nan, engine, kind="trajectories"
    )


def _rows(description: Mapping[str, Any], given: JsonObject, dtype: np.dtype) -> int:
    """The number of saved times. A spacing in `given` is replaced by the times."""
    saveat = given.get("saveat")
    if saveat is None:
        registered = description["saveat"]
        return 2 if registered is None else np.shape(registered)[-1]
    if np.ndim(saveat) > 0:
        return saveat.shape[-1]
    tspan = given.get("tspan", np.asarray(description["tspan"]))
    if is_tracer(saveat) or is_tracer(tspan) or np.ndim(tspan) > 1:
        raise TypeError(
            "inside jit, grad and vmap a spacing as saveat needs one tspan of plain numbers, so "
            "that the count of saved times is known; pass saveat as an array of times."
        )
    times, _ = grid(Spacing(float(saveat), True), *tspan, _time_dtype(dtype))
    given["saveat"] = times
    return len(times)


def _is_own(name: str, x: Array | np.ndarray, shape: tuple[int, ...]) -> bool:
    if x.shape == shape:
        return False
    if x.ndim == len(shape) + 1 and x.shape[1:] == shape:
        return True
    one = ", ".join(map(str, shape))
    raise ValueError(
        f"{name} must have the shape [{one}], or [{', '.join(['n', *map(str, shape)])}] for n "
        f"trajectories, got {list(x.shape)}."
    )


def _time_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of time, which has the precision of the state."""
    return np.dtype(jnp.finfo(dtype).dtype)
