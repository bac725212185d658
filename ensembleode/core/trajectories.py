"""From a `prob_func` to trajectories as arrays: traced once, shared numbers kept shared.

A [`Lane`][ensembleode.core.trajectories.Lane] holds the numbers of one trajectory; the same
structure with a leading axis on *some* of its leaves holds a batch. Which leaves vary with the
index is found by walking the jaxpr of `prob_func`, so that the weights of a network, say, are
never copied once a trajectory.
"""

import contextlib
import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..options import check_tolerance_shape, resolve, STATIC_OPTIONS, time_dtype_of
from ..problem import EnsembleContext, EnsembleProblem, ODEProblem
from ..tracing.field_errors import check_signature, explain
from ..tracing.program import being_staged, is_tracer, Program, Static, trace, trace_apart
from ..tracing.purity import (
    check_once,
    contents,
    is_known,
    numbers_among,
    numbers_in,
    owned,
    random_state,
)
from ..tracing.reach import abstract, reached, Unkeyed
from ..tracing.trace_cache import key_of, may_keep, Operand, traced_once, traces
from .logs import log_once
from .saving import grid, resolve_saving, Saving, Spacing


class Lane(NamedTuple):
    """The numbers of one trajectory; a leaf is None where it doesn't apply.

    `p` and `consts` are the array leaves of the parameters and the arrays that `f` closes over.
    `count` is how many of the times in `saveat` are meant (None: all).
    """

    u0: Any
    p: tuple
    consts: tuple
    t0: Any
    t1: Any
    saveat: Any
    count: Any
    abstol: Any
    reltol: Any
    dt: Any


@dataclasses.dataclass
class Trajectories:
    """An ensemble as arrays.

    - `field`: the vector field, a program `field(consts, u, p, t)`.
    - `saving`: what each trajectory saves.
    - `options`: the resolved solver options; those that every trajectory shares.
    - `batched`: a Lane of booleans, true where a leaf varies with the trajectory.
    - `lanes(indices, repeat)`: the numbers of several trajectories; the leaves that vary have a
        leading axis.
    - `lane(index, repeat)`: those of one, computed operation by operation, as the user's own
        Python would.
    - `shared`: a Lane with those leaves that are shared and known, the rest None.
    - `traced`: whether anything here is a tracer of an outer transformation.
    - `repeatable`: whether `repeat` may be traced (not when `prob_func` has to be called).
    """

    field: Program
    saving: Any
    options: dict
    batched: Lane
    lanes: Callable[[Any, Any], Lane]
    lane: Callable[[Any, Any], Lane]
    shared: Lane
    traced: bool
    repeatable: bool


def describe(
    ens: EnsembleProblem, solve_options: dict, key: Any, trajectories: int | None
) -> Trajectories:
    """Evaluate `ens.prob_func` over the index, by tracing it where that is possible.

    **Arguments:** the ensemble, the options given to `solve`, the PRNG key, and how many
    trajectories there are (None: a single problem).

    **Raises:** what `prob_func` raises; `TypeError` and `ValueError` for problems that can't be
    solved (see [`solve`][ensembleode.solve]).
    """
    staged = being_staged()
    maker = _Maker(ens, solve_options, trajectories, remembers=not staged)
    n = trajectories or 1
    if not staged and _is_plain(maker, key):
        return _laid_out(_shared_by_all(maker, key), n)
    memory = None if staged else _memory(maker, key)
    every = _laid_out(_evaluated(ens, maker, solve_options, key, trajectories, memory), n)
    return dataclasses.replace(every, traced=every.traced or staged)


def _evaluated(ens, maker, solve_options, key, trajectories, memory) -> Trajectories:
    n = trajectories or 1
    try:
        return _traced(maker, key, n, memory)
    except _Impure as error:
        if being_staged():
            raise TypeError(str(error)) from None
        message = _CALLED_AS_IMPURE
    except Exception as error:
        if ens.prob_func is None:
            raise
        by_array = isinstance(error.__cause__ or error, _NUMPY_INDEXED)
        lifted = _lift_numpy(ens.prob_func) if by_array else None
        if lifted is not None:
            _check_last(ens, key, n)
            if memory is not None:
                memory.indexes_numpy = True
            ens = _with_prob_func(ens, lifted)
            maker = _Maker(ens, solve_options, trajectories, remembers=maker.remembers)
            return _evaluated(ens, maker, solve_options, key, trajectories, memory)
        message = _CALLED_AS_NOT_TRACEABLE.format(_summary(error))
    # Either prob_func needs a concrete index, or it is wrong. Called with one it works in the first
    # case, and raises its plain error in the second. (Here, where the trace is forgotten: as long
    # as a constant of it lives, JAX takes it for the NumPy array that it was made of, even where
    # that has changed.)
    called = _called(_Maker(ens, solve_options, trajectories, concrete=True), key, n)
    log_once(message)
    return called


_CALLED_AS_NOT_TRACEABLE = (
    "prob_func can't be traced over the index, so it is called once a trajectory, which is slow "
    "({}). Index JAX arrays, jnp.asarray(u0s)[ctx.index], and use jnp.where instead of `if`."
)
_CALLED_AS_IMPURE = (
    "prob_func makes another problem each time it is called (by random numbers of NumPy or Python, "
    "or the clock), so it is called once a trajectory, which is slow. Draw them by jax.random with "
    "ctx.key: fast, and the same whatever the batches or devices."
)


def _check_last(ens: EnsembleProblem, key: Any, n: int) -> None:
    """Raise what NumPy does for an index past the end, where JAX takes the last row."""
    ens.make(EnsembleContext(n - 1, 1, key))


class _Impure(Exception):
    """A `prob_func` that makes another problem each time it is called."""

    def __init__(self):
        super().__init__(
            "prob_func makes another problem each time it is called (by random numbers of NumPy or "
            "Python, or the clock). Inside jit it is called once, for all trajectories and every "
            "later run: draw random numbers by jax.random with ctx.key, or pass them in from "
            "outside."
        )


def _summary(error: Exception) -> str:
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"


_NUMPY_INDEXED = (jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError)


#
# One trajectory
#


class _Maker:
    """Makes a Lane from the problem of one trajectory, and keeps what is static on the way."""

    def __init__(
        self,
        ens: EnsembleProblem,
        solve_options: dict,
        n: int | None,
        *,
        concrete: bool = False,
        remembers: bool = False,
    ):
        self.n = n
        self.remembers = remembers  # whether a trace of f may be an earlier one
        self.ens = ens
        self.solve_options = solve_options
        self.concrete = concrete
        self.kept: dict[str, Any] = {}
        self.options: dict[str, Any] = {}
        self._f: tuple | None = None  # what was traced last, and what it closes over

    def __call__(self, index: Any, repeat: Any, key: Any, *operands: Any) -> Lane:
        ens = _with_operands(self.ens, operands) if operands else self.ens
        prob = ens.make(EnsembleContext(index, repeat, key))
        options = resolve(prob.options, self.solve_options)
        dtype = time_dtype_of(prob.u0)
        p = tuple(x for x in jtu.tree_leaves(prob.p) if _is_numeric(x))
        types = tuple((np.shape(x), getattr(x, "dtype", type(x))) for x in p)
        self._keep("u0", (prob.u0.shape, prob.u0.dtype), "the shape or dtype of u0", index)
        self._keep("p", types, "the shapes or dtypes in p", index)
        _check_rows(options["saveat"], self.n)
        saving, times = resolve_saving(options, *prob.tspan, dtype, index, defer=self.concrete)
        self._keep("saving", saving, "which times are saved", index)
        self.options = {k: options[k] for k in (*STATIC_OPTIONS, "maxiters_given")}
        self._keep("options", Static(self.options), "the solver options", index)
        consts = self._trace_field(prob, p, types, dtype, index)
        t0, t1 = (_as_real(t, dtype) for t in prob.tspan)
        abstol = reltol = None
        if options["stepsize_controller"] is None:
            for name in ("abstol", "reltol"):
                check_tolerance_shape(name, options[name], prob.u0.shape)
            abstol, reltol = (_as_real(options[k], dtype) for k in ("abstol", "reltol"))
        dt = None if options["dt"] is None else _as_real(options["dt"], dtype)
        return Lane(prob.u0, p, consts, t0, t1, times, None, abstol, reltol, dt)

    def _trace_field(self, prob, p, types, dtype, index) -> tuple:
        others = [x for x in jtu.tree_leaves(prob.p) if not _is_numeric(x)]
        same = (prob.f, jtu.tree_structure(prob.p), types, *others)
        if self._f is not None and _identical(self._f[0], same):
            field, consts = self._f[1]  # called again, but f is the one traced already
        else:
            field, consts = self._traced_field(prob, p, dtype)
        self._keep("field", field, "the computation that f does", index)
        self._f = (same, (field, consts))
        return consts

    def _traced_field(self, prob, p, dtype) -> tuple[Program, tuple]:
        def make():
            return trace_field(prob, p, dtype)

        if not self.remembers:
            return make()
        try:
            shapes = jax.tree.map(lambda x: abstract(x) if _is_numeric(x) else x, prob.p)
        except (TypeError, OverflowError):  # no number of JAX's: tracing f says so
            return make()
        return traced_once(("f", prob.f, shapes, abstract(prob.u0), dtype), make)

    def again(self) -> "_Maker":
        """One that is to make the same, to find whether it does."""
        maker = _Maker(self.ens, self.solve_options, self.n, remembers=self.remembers)
        if self._f is not None and not any(map(is_tracer, self._f[1][1])):
            maker._f = self._f
        return maker

    def static_numbers(self) -> tuple:
        """What it kept that isn't among the leaves: shapes, and numbers that all share."""
        numbers = contents(numbers_among(self.options))
        return self.kept["u0"], self.kept["p"], self.kept["saving"], numbers

    def _keep(self, name: str, value: Any, what: str, index: Any) -> None:
        if self.kept.setdefault(name, value) != value:
            remedy = "Solve one ensemble for each."
            if name == "field":
                remedy += " (Where f differs in a number only, pass it in p.)"
            raise ValueError(
                f"prob_func varies {what} with the index (first at index {index}: {value}, before: "
                f"{self.kept[name]}); all trajectories of an ensemble must have the same. {remedy}"
            )


def _identical(a: tuple, b: tuple) -> bool:
    """Whether two traces of f would be the same: functions and the like by identity."""
    return len(a) == len(b) and all(
        x is y or (i in (1, 2) and x == y) for i, (x, y) in enumerate(zip(a, b, strict=True))
    )


def _check_rows(saveat: Any, n: int | None) -> None:
    try:
        shape = np.shape(saveat)
    except ValueError:  # ragged, which is found later
        return
    if len(shape) == 2 and shape[0] and shape[0] != n:
        raise ValueError(
            f"saveat has the shape {shape}; two-dimensional, it must be [trajectory, time] with "
            f"{'an ensemble' if n is None else f'{n} trajectories'}."
        )


def trace_field(prob: ODEProblem, p: tuple, dtype: np.dtype) -> tuple[Program, tuple]:
    """Trace `f`, and check what it returns.

    **Raises:** `TypeError` or `ValueError` when `f` returns another structure, shape or dtype
    than the state's.
    """
    numeric, static = eqx.partition(prob.p, _is_numeric)
    structure = jtu.tree_structure(numeric)

    def field(u, p, t):
        return prob.f(u, eqx.combine(jtu.tree_unflatten(structure, p), static), t)

    u = jax.ShapeDtypeStruct(prob.u0.shape, prob.u0.dtype)
    t = jax.ShapeDtypeStruct((), dtype)
    if not is_known(prob.f):
        check_signature(prob.f)
    try:
        program, consts = trace(field, u, p, t, rules=True)
    except Exception as e:
        paths = [(k, x) for k, x in jtu.tree_leaves_with_path(prob.p) if _is_numeric(x)]
        explained = explain(e, prob.p, paths)
        if explained is e:
            raise
        raise explained from e
    check_once(
        prob.f,
        lambda: numbers_in(program, consts) == numbers_in(*trace(field, u, p, t)),
        "f gives another value each time it is called with the same u, p and t (by random numbers "
        "of NumPy or Python, or the clock). It is traced once, and they would be drawn once for "
        "the whole solve: draw them before, and pass them in p (in prob_func by jax.random with "
        "ctx.key).",
    )
    if program.out_tree != jtu.tree_structure(0):
        hint = "Use jnp.array([...]) or jnp.stack on its parts."
        if program.out_tree == jtu.tree_structure(None):
            hint = "Is a `return` missing? " + hint
        raise TypeError(
            f"f must return one array of shape {u.shape}; it returned the structure "
            f"{program.out_tree}. {hint}"
        )
    (out,) = program.out_avals
    if out.shape != u.shape:
        raise ValueError(
            f"f must return an array of the shape of the state u, {u.shape}; it returned the shape "
            f"{out.shape}. (It is called as f(u, p, t).)"
        )
    if out.dtype != u.dtype:
        raise TypeError(
            f"f must return the dtype of the state u, {u.dtype}; it returned {out.dtype}. Give u0 "
            f"that dtype (u0.astype('{out.dtype}')), or cast inside f (parameters and constants "
            "of another precision are the usual cause)."
        )
    return program, tuple(consts)


def _is_numeric(x: Any) -> bool:
    return eqx.is_array_like(x) and not isinstance(x, str)


def _as_real(x: Any, dtype: np.dtype) -> Any:
    # NumPy keeps a concrete number concrete inside a trace.
    return x.astype(dtype) if is_tracer(x) else np.asarray(x, dtype)


def _as_input(x: Any) -> Any:
    # A number stays one: inside the user's jit it is then a constant, which XLA can fold.
    return x if isinstance(x, jax.Array | Operand) or np.ndim(x) == 0 else jnp.asarray(x)


#
# All trajectories
#


class _Trace(NamedTuple):
    """A `prob_func` traced over the index: the numbers of a trajectory, some of them traced.

    Constants and leaves may be `Operand`s.
    """

    program: Program
    consts: list
    leaves: list
    structure: Any


def _trace(maker: _Maker, key: Any, operands: Sequence = ()) -> _Trace:
    found: dict[str, Any] = {}

    def outputs(index, repeat, key, *operands):
        leaves, found["structure"] = jtu.tree_flatten(maker(index, repeat, key, *operands))
        unchanged = {id(x): Operand(i) for i, x in enumerate(operands)}
        found["leaves"] = leaves = [unchanged.get(id(x), x) for x in leaves]
        return [x for x in leaves if is_tracer(x)]

    # Python numbers trace as weakly typed: ctx.index mixes with any dtype, as an int does.
    program, consts, used = trace_apart(outputs, (0, 1, key), operands, rules=True)
    return _Trace(program, [*consts, *map(Operand, used)], **found)


def _numbers(maker: _Maker, made: _Trace) -> tuple:
    """Every number that a call of `prob_func` led to."""
    known = jtu.tree_leaves(maker.ens.prob)
    field = numbers_in(maker.kept["field"], ())  # what it closes over is among the leaves
    program = numbers_in(made.program, _known(made.consts), known)
    return program, contents(_known(made.leaves), known), field, maker.static_numbers()


def _known(values: Sequence) -> list:
    return [x for x in values if type(x) is not Operand]


_CALLS_WITH_DRAWS = 12
_known_as_pure: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


def _trace_checked(maker: _Maker, key: Any, operands: Sequence = ()) -> tuple[_Trace, bool]:
    """The trace of `maker`, made twice where its `prob_func` is met for the first time; and whether
    random numbers were drawn meanwhile.

    **Raises:** `_Impure` where the second is another.
    """
    prob_func = maker.ens.prob_func
    if prob_func is None:
        return _trace(maker, key, operands), False
    state = random_state()
    made = _trace(maker, key, operands)
    drew = drew_at_all = random_state() != state
    if not drew and _known_as_pure.get(id(prob_func)) is prob_func:
        return made, False
    numbers = _numbers(maker, made)  # now, as the second call may write into these arrays
    # JAX keeps what it made of a NumPy array for as long as that lives.
    made = made._replace(consts=list(map(owned, made.consts)), leaves=list(map(owned, made.leaves)))
    # Once more; and where random numbers are drawn (perhaps in another thread) several times, as
    # they may decide about a branch, which need not be another each time.
    for _ in range(_CALLS_WITH_DRAWS):
        state, again = random_state(), maker.again()
        if _numbers(again, _trace(again, key, operands)) != numbers:
            raise _Impure
        drew, drew_before = random_state() != state, drew
        drew_at_all |= drew
        if not (drew or drew_before):
            break
    with contextlib.suppress(TypeError):  # few callables have no weak references
        _known_as_pure[id(prob_func)] = prob_func
    return made, drew_at_all


class _Made(NamedTuple):
    """What of a trace has no numbers in it."""

    program: Program
    varies: tuple[bool, ...]
    is_output: tuple[bool, ...]
    structure: Any
    field: Program
    saving: Any
    options: dict
    indexes_numpy: bool


def _traced(maker: _Maker, key: Any, n: int, memory: "_Memory | None") -> Trajectories:
    """Trace `maker` over the index, or take the trace of an earlier time."""
    if memory is None:
        made, consts, values = _apart(maker, _trace_checked(maker, key)[0], False)
    else:
        made, consts, values = memory.recall(maker, key, n)
    program, varies, is_output = made.program, made.varies, made.is_output

    def fill(outs, rest):
        outs = iter(outs)
        leaves = [next(outs) if out else x for out, x in zip(is_output, rest, strict=True)]
        return jtu.tree_unflatten(made.structure, leaves)

    aval: Any = program.jaxpr.invars[0].aval
    integer = aval.dtype

    def as_integers(*args):
        return [x.astype(integer) if is_tracer(x) else np.asarray(x, integer) for x in args]

    def lanes(indices, repeat):
        return fill(_evaluate(program, varies, consts, *as_integers(indices, repeat), key), values)

    def lane(index, repeat):
        return fill(program(consts, *as_integers(index, repeat), key), values)

    if maker.ens.prob_func is not None and n > 1 and not any(varies):
        log_once(
            "prob_func makes the same problem for every trajectory: let it depend on ctx.index, or "
            "draw random numbers by jax.random with ctx.key."
        )
    return Trajectories(
        field=made.field,
        saving=made.saving,
        options=made.options,
        batched=fill(varies, [False] * len(values)),
        lanes=lanes,
        lane=lane,
        shared=fill([None] * len(varies), values),
        traced=any(is_tracer(x) for x in (*consts, key)),
        repeatable=True,
    )


def _apart(maker: _Maker, trace: _Trace, indexes_numpy: bool) -> tuple[_Made, list, list]:
    """A trace in three: what has no numbers, the constants, and the leaves that are known."""
    made = _Made(
        trace.program,
        tuple(trace.program.depends_on([True] * 3)),
        tuple(map(is_tracer, trace.leaves)),
        trace.structure,
        maker.kept["field"],
        maker.kept["saving"],
        maker.options,
        indexes_numpy,
    )
    values = [None if is_tracer(x) else _as_input(x) for x in trace.leaves]
    return made, trace.consts, values


@functools.partial(jax.jit, static_argnums=(0, 1))
def _evaluate(program, varies, consts, indices, repeat, key):
    def pick(index, wanted):
        outs = program(consts, index, repeat, key)
        return [x for x, v in zip(outs, varies, strict=True) if v == wanted]

    each = iter(jax.vmap(functools.partial(pick, wanted=True))(indices))
    shared = iter(pick(indices[0], wanted=False))
    return [next(each) if v else next(shared) for v in varies]


def _called(maker: _Maker, key: Any, n: int) -> Trajectories:
    """Call `maker` with every index, and stack what comes."""

    def columns(lanes):
        """Leaf by leaf, the values in all lanes."""
        return list(zip(*map(jtu.tree_leaves, lanes), strict=True))

    keep = _Keeper()
    made = [keep(maker(i, 1, key)) for i in range(n)]
    structure = jtu.tree_structure(made[0])
    names = [n for n, x in zip(Lane._fields, made[0], strict=True) for _ in jtu.tree_leaves(x)]
    firsts = columns(made)
    # What is shared in the first run may still be changed in a rerun.
    reruns = maker.ens.output_func is not None
    varies = [
        (reruns and name in _ARRAYS) or not _all_same(name, column)
        for name, column in zip(names, firsts, strict=True)
    ]
    table = [_stack(c) if v else _as_input(c[0]) for c, v in zip(firsts, varies, strict=True)]

    def lanes(indices, repeat):
        if isinstance(repeat, int) and repeat > 1:
            again = columns([keep(maker(int(i), repeat, key)) for i in np.asarray(indices)])
            leaves = []
            for name, column, v, x in zip(names, again, varies, table, strict=True):
                if not v and not _all_same(name, [x, *column]):
                    raise ValueError(
                        f"prob_func changes {name} in a rerun, while it is the same for all "
                        "trajectories in the first run; write prob_func in JAX (see the log)."
                    )
                leaves.append(_stack(column) if v else x)
        else:
            leaves = [x[indices] if v else x for x, v in zip(table, varies, strict=True)]
        return jtu.tree_unflatten(structure, leaves)

    def lane(index, repeat):
        every = lanes(index[None] if is_tracer(index) else np.asarray([index]), repeat)
        return jax.tree.map(lambda x, v: x[0] if v else x, every, batched)

    batched = jtu.tree_unflatten(structure, varies)
    return Trajectories(
        field=maker.kept["field"],
        saving=maker.kept["saving"],
        options=maker.options,
        batched=batched,
        lanes=lanes,
        lane=lane,
        shared=jax.tree.map(lambda x, v: None if v else x, lanes(np.arange(1), 1), batched),
        traced=any(map(is_tracer, table)),
        repeatable=False,
    )


class _Keeper:
    """Copies NumPy arrays, which the next call may write into: one copy for as long as an array
    stays as it is."""

    def __init__(self):
        self.copies: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __call__(self, lane: Lane) -> Lane:
        return jax.tree.map(self._kept, lane)

    def _kept(self, x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        original, copy = self.copies.get(id(x), (None, None))
        if original is not x or copy is None or contents([copy]) != contents([x]):
            copy = x.copy()
            self.copies[id(x)] = x, copy
        return copy


_ARRAYS = ("u0", "p", "consts")


def _all_same(name: str, column: Sequence) -> bool:
    """Whether a leaf is shared: times and tolerances by value, arrays by identity."""
    first = column[0]
    if all(x is first for x in column):
        return True
    if name in _ARRAYS or any(map(is_tracer, column)):
        return False
    return all(np.array_equal(np.asarray(x), np.asarray(first)) for x in column)


def _stack(column: Sequence) -> Any:
    if any(map(is_tracer, column)):
        return jnp.stack([jnp.asarray(x) for x in column])
    if jnp.issubdtype(jnp.result_type(column[0]), jax.dtypes.extended):  # PRNG keys
        return jnp.stack(column)
    return jnp.asarray(np.stack([np.asarray(x) for x in column]))


def _laid_out(traj: Trajectories, n: int) -> Trajectories:
    """Replace a spacing (`saveat` a number) by the grid of each trajectory's own time span."""
    spacing = traj.saving
    if not isinstance(spacing, Spacing):
        return traj
    every = traj.lanes(np.arange(n, dtype=np.int32), 1)
    if is_tracer(every.t0) or is_tracer(every.t1):
        raise TypeError(
            "saveat is a number while tspan is traced, so the count of saved times is not known; "
            "pass saveat as an array of times."
        )
    dtype = every.t0.dtype
    rows = int(grid(spacing, every.t0, every.t1, dtype)[1].max())

    def with_grid(lanes):
        times, counts = grid(spacing, lanes.t0, lanes.t1, dtype, rows)
        return lanes._replace(saveat=jnp.asarray(times), count=jnp.asarray(counts))

    varies = traj.batched.t0 or traj.batched.t1
    return dataclasses.replace(
        traj,
        saving=Saving("times", False, rows),
        batched=traj.batched._replace(saveat=varies, count=varies),
        lanes=lambda indices, repeat: with_grid(traj.lanes(indices, repeat)),
        lane=lambda index, repeat: with_grid(traj.lane(index, repeat)),
    )


#
# Without a trace, or with that of an earlier time
#


def _is_plain(maker: _Maker, key: Any) -> bool:
    """Whether all trajectories are the problem as it is, so that there is nothing to trace but f.

    (A row of `saveat` for each is looked up by the index.)
    """
    if maker.ens.prob_func is not None:
        return False
    if any(map(is_tracer, jtu.tree_leaves((maker.ens.prob, maker.solve_options, key)))):
        return False
    given: Any = maker.solve_options.get("saveat"), maker.ens.prob.options.get("saveat")
    try:
        return all(np.ndim(x) < 2 for x in given)
    except ValueError:  # ragged, which is found later
        return False


def _shared_by_all(maker: _Maker, key: Any) -> Trajectories:
    lane = jax.tree.map(_as_input, maker(0, 1, key))
    return Trajectories(
        field=maker.kept["field"],
        saving=maker.kept["saving"],
        options=maker.options,
        batched=jax.tree.map(lambda _: False, lane),
        lanes=lambda indices, repeat: lane,
        lane=lambda index, repeat: lane,
        shared=lane,
        traced=any(map(is_tracer, jtu.tree_leaves(lane))),
        repeatable=True,
    )


# What of a Lane is checked where it is known.
_CHECKED = ("t0", "t1", "saveat", "abstol", "reltol", "dt")
# Options that are objects.
_OBJECTS = ("stepsize_controller", "sensealg")
_BY_VALUE = "by value"


class _ReadsValues(Exception):
    """What is traced by values of the problem that it could not see isn't what it would be."""


class _Memory:
    """The traces of an ensemble, by what its functions reach and by its problem.

    The arrays in `f`, `u0` and `p` are traced without their values, so that one trace is for all of
    the same shapes; but where values decide about the trace, it is for these arrays only.
    """

    def __init__(self, maker: _Maker, key: Any):
        """
        **Raises:** `Unkeyed` where it can't be told what the trace depends on.
        """
        ens = maker.ens
        self.operands = [x for x in _numbers_of(ens) if isinstance(x, jax.Array)]
        if any(map(is_tracer, (*self.operands, key))):
            raise Unkeyed("the problem is being traced")
        shapes = _with_operands(ens, list(map(abstract, self.operands))).prob
        others = ("prob_func", ens.prob_func, maker.solve_options, abstract(key), maker.n)
        self._ens, self._others = ens, others
        given = ens.prob.options, {k: v for k, v in maker.solve_options.items() if v is not None}
        self._objects = {k: (given[0] | given[1]).get(k) for k in _OBJECTS}
        self._things: tuple = (shapes, *others)
        self._key = reached(*self._things)
        self.indexes_numpy = False

    def recall(self, maker: _Maker, key: Any, n: int) -> tuple[_Made, list, list]:
        """The trace of `maker` in three, as from [`_apart`][]."""
        found = None if self.indexes_numpy else self._found()
        if found is None:
            return self._made(maker, key)
        values, made = found
        if made.indexes_numpy:
            _check_last(self._ens, key, n)
        # (The objects of now: those of then may have been written into.)
        made = made._replace(options=made.options | self._objects)
        return self._filled(made, values)

    def _found(self) -> tuple[list, Any] | None:
        found = traces.find(self._key)
        if found is None or found[1] is not _BY_VALUE:
            return found
        by_value = key_of(*self._by_value())
        return None if by_value is None else traces.find(by_value)

    def _by_value(self) -> tuple:
        return (self._ens.prob, *self._others)

    def _made(self, maker: _Maker, key: Any) -> tuple[_Made, list, list]:
        try:
            made, drew = _trace_checked(maker, key, self.operands)
            self._check_values_unread(made)
            things, reached_before = self._things, self._key
        except _Impure:
            raise
        except Exception:
            # It may be the fault of what it could not see. (If not, this raises again.)
            maker = _Maker(maker.ens, maker.solve_options, maker.n, remembers=True)
            things = self._by_value()
            reached_before = key_of(*things)
            made, drew = _trace_checked(maker, key)
            if reached_before is not None and not drew:
                traces.keep(self._key, (), _BY_VALUE)
        apart, consts, values = _apart(maker, made, self.indexes_numpy)
        numbers = [*consts, *values]
        may = not drew and may_keep(numbers, made.program, apart.field)
        may &= all(apart.options[k] is x for k, x in self._objects.items())
        # (Not where it changed what it depends on: then it has to be called each time.)
        if may and reached_before is not None and key_of(*things) == reached_before:
            options = apart.options | dict.fromkeys(_OBJECTS)
            traces.keep(reached_before, numbers, apart._replace(options=options))
        return self._filled(apart, numbers)

    def _check_values_unread(self, made: _Trace) -> None:
        """
        **Raises:** `_ReadsValues` where a time or a tolerance depends on an operand: its value is
        to be checked.
        """
        operand = [type(x) is Operand for x in made.consts]
        depends = iter(made.program.depends_on([False] * 3, operand))
        marks = [next(depends) if is_tracer(x) else type(x) is Operand for x in made.leaves]
        lane = jtu.tree_unflatten(made.structure, marks)
        if any(jtu.tree_leaves([getattr(lane, name) for name in _CHECKED])):
            raise _ReadsValues

    def _filled(self, made: _Made, numbers: Sequence) -> tuple[_Made, list, list]:
        numbers = [self.operands[x.index] if type(x) is Operand else x for x in numbers]
        count = len(made.program.jaxpr.constvars)
        return made, numbers[:count], numbers[count:]


def _memory(maker: _Maker, key: Any) -> _Memory | None:
    try:
        return _Memory(maker, key)
    except Unkeyed:
        return None


def _numbers_of(ens: EnsembleProblem) -> list:
    return jtu.tree_leaves((ens.prob.f, ens.prob.u0, ens.prob.p))


def _with_operands(ens: EnsembleProblem, operands: Sequence) -> EnsembleProblem:
    """With these in place of the arrays in its problem."""
    leaves, structure = jtu.tree_flatten((ens.prob.f, ens.prob.u0, ens.prob.p))
    rest = iter(operands)
    leaves = [next(rest) if isinstance(x, jax.Array) else x for x in leaves]
    f, u0, p = jtu.tree_unflatten(structure, leaves)
    return _changed(ens, prob=_changed(ens.prob, f=f, u0=u0, p=p))


def _changed(module: Any, **changes: Any) -> Any:
    """A copy as it is, without its checks."""
    new = object.__new__(type(module))
    for name, value in vars(module).items():
        object.__setattr__(new, name, changes.get(name, value))
    return new


#
# NumPy arrays indexed by a traced index
#


def _with_prob_func(ens: EnsembleProblem, prob_func: Callable) -> EnsembleProblem:
    return EnsembleProblem(ens.prob, prob_func, ens.output_func, ens.reduction, ens.u_init)


def _lift_numpy(fn: Any) -> Callable | None:
    """`fn` with the NumPy arrays it closes over turned into JAX arrays; None if it has none."""
    if isinstance(fn, functools.partial):
        func = _lift_numpy(fn.func)
        args = [_lift(x) for x in fn.args]
        keywords = {k: _lift(x) for k, x in fn.keywords.items()}
        lifted_args = any(map(_is_numpy, [*fn.args, *fn.keywords.values()]))
        if func is None and not lifted_args:
            return None
        return functools.partial(func or fn.func, *args, **keywords)
    if not isinstance(fn, types.FunctionType):
        return None
    cells = fn.__closure__ or ()
    names = set(fn.__code__.co_names)
    lifted_globals = {k: _lift(v) for k, v in fn.__globals__.items() if k in names and _is_numpy(v)}
    defaults, keywords = fn.__defaults__ or (), fn.__kwdefaults__ or {}
    held = [*_contents(cells), *defaults, *keywords.values()]
    if not lifted_globals and not any(map(_is_numpy, held)):
        return None
    lifted = types.FunctionType(
        fn.__code__,
        {**fn.__globals__, **lifted_globals},
        fn.__name__,
        tuple(map(_lift, defaults)) or None,
        tuple(_lift_cell(c) for c in cells),
    )
    lifted.__kwdefaults__ = {k: _lift(x) for k, x in keywords.items()} or None
    return lifted


def _contents(cells: Sequence) -> list:
    return [c.cell_contents for c in cells if c != types.CellType()]


def _lift_cell(cell: types.CellType) -> types.CellType:
    if _contents([cell]) and _is_numpy(cell.cell_contents):
        return types.CellType(_lift(cell.cell_contents))
    return cell


def _is_numpy(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.ndim > 0 and np.issubdtype(x.dtype, np.number)


def _lift(x: Any) -> Any:
    return jnp.asarray(x) if _is_numpy(x) else x
