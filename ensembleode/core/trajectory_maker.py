"""One trajectory: from the problem that `prob_func` makes to its numbers, and `f` traced."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np

from ..options import (
    check_tolerance_shape,
    holds_tolerances,
    resolve,
    STATIC_OPTIONS,
    time_dtype_of,
)
from ..problem import EnsembleContext, EnsembleProblem, ODEProblem
from ..tracing.field_errors import check_signature, explain, is_whole, NeedsNumber
from ..tracing.program import is_tracer, Program, Static, trace
from ..tracing.purity import (
    check_once,
    contents,
    is_known,
    numbers_among,
    numbers_in,
)
from .lane import Lane, Trajectories
from .saving import resolve_saving
from .state_tree import StateTree, tree_of


class Maker:
    """Makes a Lane from the problem of one trajectory, and keeps what is static on the way."""

    def __init__(
        self,
        ens: EnsembleProblem,
        solve_options: dict,
        n: int | None,
        *,
        concrete: bool = False,
    ):
        self.n = n
        self.ens = ens
        self.solve_options = solve_options
        self.concrete = concrete
        self.kept: dict[str, Any] = {}
        self.options: dict[str, Any] = {}
        self._f: tuple | None = None  # what was traced last, and what it closes over
        # Whether whole numbers in p are known to f, which decides by them.
        self.fixes_whole = False

    def __call__(self, index: Any, repeat: Any, key: Any) -> Lane:
        prob = self.ens.make(EnsembleContext(index, repeat, key))
        if self.fixes_whole or not any(map(is_whole, jtu.tree_leaves(prob.p))):
            return self._lane(prob, index)
        # As numbers, new ones compile nothing; only where f has to know them they are none.
        kept = dict(self.kept)
        try:
            return self._lane(prob, index)
        except NeedsNumber:
            self.kept, self.fixes_whole = kept, True
            return self._lane(prob, index)

    def _is_number(self, x: Any) -> bool:
        """Whether a leaf of p is traced."""
        is_numeric = eqx.is_array_like(x) and not isinstance(x, str)
        return is_numeric and not (self.fixes_whole and is_whole(x))

    def _lane(self, prob: ODEProblem, index: Any) -> Lane:
        tree = tree_of(prob.u0, prob._order)
        given = prob.options, self.solve_options
        if tree is not None:
            given = [_with_tolerances(options, tree) for options in given]
        options = resolve(*given)
        u0: Any = prob.u0 if tree is None else tree.ravel(prob.u0)
        dtype = time_dtype_of(u0)
        p = tuple(x for x in jtu.tree_leaves(prob.p) if self._is_number(x))
        types = tuple((np.shape(x), getattr(x, "dtype", type(x))) for x in p)
        self._keep("tree", tree, "the structure or the shapes of u0", index)
        self._keep("u0", (u0.shape, u0.dtype), "the shape or dtype of u0", index)
        self._keep("p", types, "the shapes or dtypes in p", index)
        _check_rows(options["saveat"], self.n)
        saving, times = resolve_saving(options, *prob.tspan, dtype, index, defer=self.concrete)
        self._keep("saving", saving, "which times are saved", index)
        self.options = {k: options[k] for k in (*STATIC_OPTIONS, "maxiters_given")}
        self._keep("options", Static(self.options), "the solver options", index)
        consts = self._trace_field(prob, p, types, dtype, index)
        t0, t1 = (_as_real(t, dtype) for t in prob.tspan)
        abstol = reltol = None
        if not holds_tolerances(options["stepsize_controller"]):
            for name in ("abstol", "reltol"):
                check_tolerance_shape(name, options[name], u0.shape)
            abstol, reltol = (_as_real(options[k], dtype) for k in ("abstol", "reltol"))
        given = (options[k] for k in ("dt", "dtmin", "dtmax"))
        sizes = (None if x is None else _as_real(x, dtype) for x in given)
        return Lane(u0, p, consts, t0, t1, times, None, abstol, reltol, *sizes)

    def _trace_field(self, prob, p, types, dtype, index) -> tuple:
        others = [x for x in jtu.tree_leaves(prob.p) if not self._is_number(x)]
        same = (prob.f, jtu.tree_structure(prob.p), types, *others)
        if self._f is not None and _identical(self._f[0], same):
            field, consts = self._f[1]  # called again, but f is the one traced already
        else:
            field, consts = trace_field(prob, p, dtype, self._is_number)
        self._keep("field", field, "the computation that f does", index)
        self._f = (same, (field, consts))
        return consts

    def trajectories(self, **fields: Any) -> Trajectories:
        """With these fields, and with what it kept."""
        kept = {name: self.kept[name] for name in ("field", "saving", "tree")}
        return Trajectories(**kept, options=self.options, **fields)

    def again(self) -> "Maker":
        """One that is to make the same, to find whether it does."""
        maker = Maker(self.ens, self.solve_options, self.n)
        maker.fixes_whole = self.fixes_whole
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


def _with_tolerances(options: dict, tree: StateTree) -> dict:
    """The options, with tolerances that are pytrees like the state as vectors."""
    names = [k for k in ("abstol", "reltol") if options.get(k) is not None]
    return options | {k: tree.tolerance(k, options[k]) for k in names}


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


def trace_field(
    prob: ODEProblem, p: tuple, dtype: np.dtype, is_number: Callable[[Any], bool]
) -> tuple[Program, tuple]:
    """Trace `f`, and check what it returns.

    **Arguments:** `p`: the leaves of the parameters that are traced, which `is_number` tells from
    the others.

    **Raises:** `TypeError` or `ValueError` when `f` returns another structure, shape or dtype
    than the state's.
    """
    numeric, static = eqx.partition(prob.p, is_number)
    structure = jtu.tree_structure(numeric)
    tree = tree_of(prob.u0, prob._order)

    def field(u, p, t):
        p = eqx.combine(jtu.tree_unflatten(structure, p), static)
        return prob.f(u, p, t) if tree is None else tree.derivative(prob.f(tree.unravel(u), p, t))

    if tree is None:
        u = jax.ShapeDtypeStruct(prob.u0.shape, prob.u0.dtype)
    else:
        u = jax.ShapeDtypeStruct((tree.size,), tree.dtype)
    t = jax.ShapeDtypeStruct((), dtype)
    if not is_known(prob.f):
        check_signature(prob.f)
    try:
        program, consts = trace(field, u, p, t, rules=True)
    except Exception as e:
        paths = [(k, x) for k, x in jtu.tree_leaves_with_path(prob.p) if is_number(x)]
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


def _as_real(x: Any, dtype: np.dtype) -> Any:
    # NumPy keeps a concrete number concrete inside a trace.
    return x.astype(dtype) if is_tracer(x) else np.asarray(x, dtype)
