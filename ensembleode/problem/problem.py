"""The problems that can be solved: an ODE problem, and an ensemble of ODE problems."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Inexact, PRNGKeyArray, PyTree

from ..ground.logs import log_once
from ..ground.state_tree import as_parameters, as_state, written_order
from ..tracing.program import is_tracer
from .callbacks import all_of, Integrator
from .options import check_option_names, merge, time_dtype_of
from .unknown_options import refuse_unknown


class ODEProblem(eqx.Module):
    r"""The initial value problem $du/dt = f(u, p, t)$, $u(t_0) = u_0$.

    **Arguments:**

    - `f`: the vector field `f(u, p, t) -> du`, written in JAX; `du` has the structure, shape and
        dtype of `u`. It has the meaning that it has under `jax.vmap`. Any callable is possible,
        including Equinox modules. Arrays that it closes over are inputs of the solve: new values
        never compile again, and derivatives go through them.
    - `u0`: the initial state, an array of any shape and an inexact dtype, or a pytree of such
        arrays of one dtype: a dict, a tuple, an Equinox module. (Lists and tuples that consist only
        of numbers are arrays.) `f` then takes and returns that structure, and solutions have it.
        Time is computed in the same precision. Components are numbered and plotted in the order in
        which they are written here (also those of a dict, though JAX sorts its keys).
    - `tspan`: `(t0, t1)`, with `t1 < t0` for integration backwards in time. If both are the same,
        the solution is `u0`.
    - `p`: the parameters, any pytree. A list of nothing but numbers in it is an array, as
        `[1.5, 1.0]` is in Julia. (A tuple keeps its numbers apart.)
    - `integrand`: `integrand(u, p, t)`, written like `f`, returns the function to be integrated
        along the solution: an array, or any pytree of arrays, in the dtype of `u`. Solutions have
        its integral from `t0` to every saved time, as `sol.integral` and `sim.integral`: an area
        under a curve, a log-determinant, a cost. It is computed with the steps of the solution and
        doesn't change them, so the tolerances apply to `u` alone. (For an integral with its own
        tolerances, make it a component of `u`.)
    - `options`: solver options kept with the problem, as in SciML: any option of
        [`solve`][ensembleode.solve] that describes one trajectory (`saveat=`, `abstol=`, ...).
        Options given to `solve` itself take precedence.

    **Raises:** `TypeError` for an `f` that can't be called, an integer or non-array `u0`, or an
    unknown option; `ValueError` for a malformed `tspan`.
    """

    f: Callable
    u0: PyTree[Inexact[Array, "..."]]
    tspan: tuple[Any, Any]
    p: PyTree
    integrand: Callable | None
    options: dict[str, Any]
    _order: tuple[str, ...] | None = eqx.field(static=True)

    # The arguments that aren't options.
    parts: ClassVar[tuple[str, ...]] = ("f", "u0", "tspan", "p", "integrand")

    def __init__(
        self,
        f: Callable,
        u0: PyTree,
        tspan: tuple[Any, Any],
        p: PyTree = None,
        *,
        integrand: Callable | None = None,
        _order: tuple[str, ...] | None = None,
        **options: Any,
    ):
        if not callable(f):
            raise TypeError(f"f must be a function f(u, p, t) -> du, got {f!r}.")
        if not (integrand is None or callable(integrand)):
            raise TypeError(f"integrand must be a function (u, p, t) or None, got {integrand!r}.")
        check_option_names(options)
        all_of(options.get("callback"))
        self.f = f
        self.u0 = as_state(u0)
        # Components are numbered and named in the order in which they were written.
        self._order = written_order(u0, _order)
        self.tspan = _as_tspan(tspan)
        self.p = as_parameters(p, time_dtype_of(jax.tree.leaves(self.u0)[0]))
        self.integrand = integrand
        self.options = options


@overload
def remake(prob: ODEProblem, /, **changes: Any) -> "ODEProblem": ...


@overload
def remake(prob: "EnsembleProblem", /, **changes: Any) -> "EnsembleProblem": ...


@overload
def remake(prob: Integrator, /, **changes: Any) -> Integrator: ...


def remake(
    prob: "ODEProblem | EnsembleProblem | Integrator", /, **changes: Any
) -> "ODEProblem | EnsembleProblem | Integrator":
    """A copy of `prob` with some parts changed; or a copy of a callback's integrator with another
    state `u` or other parameters `p`.

    **Arguments:**

    - `prob`: an [`ODEProblem`][ensembleode.ODEProblem]; or an
        [`EnsembleProblem`][ensembleode.EnsembleProblem], whose arguments can be changed; or the
        integrator that an affect gets.
    - `changes`: for a problem any of its arguments, such as `f`, `u0`, `tspan`, `p`, and solver
        options (`saveat`, `abstol`, `reltol`, `dt`, ...), which are merged into those that the
        problem has.
        `None` takes an option away from the problem: `remake(prob, saveat=None)`.

    **Raises:** `TypeError` when `prob` is none of these, or a name is unknown; otherwise the errors
    of `ODEProblem` and `EnsembleProblem`.

    >>> import ensembleode as eo
    >>> prob = eo.ODEProblem(lambda u, p, t: -p * u, [1.0, 2.0], (0.0, 1.0), 0.5)
    >>> longer = eo.remake(prob, tspan=(0.0, 3.0), saveat=0.5)
    >>> longer.tspan, longer.p, longer.options
    ((0.0, 3.0), 0.5, {'saveat': 0.5})
    """
    if isinstance(prob, Integrator):
        return prob.remade(changes)
    if isinstance(prob, EnsembleProblem):
        return EnsembleProblem(**vars(prob) | changes)
    if not isinstance(prob, ODEProblem):
        raise TypeError(
            "remake takes an ODEProblem, an EnsembleProblem or an integrator, got "
            f"{type(prob).__name__}."
        )
    fields = {name: getattr(prob, name) for name in prob.parts}
    options = {k: v for k, v in changes.items() if k not in fields}
    check_option_names(options)
    fields |= {k: v for k, v in changes.items() if k in fields}
    kept = {k: v for k, v in prob.options.items() if k not in options}
    return type(prob)(**fields, _order=prob._order, **merge(kept, options))


class EnsembleContext(eqx.Module):
    """The trajectory for which a `prob_func` or `output_func` is called.

    - `index`: its index, counted from 0.
    - `sim_id`: its index counted from 1, as in SciML.
    - `repeat`: 1, and one more for each rerun.
    - `key`: its own JAX PRNG key. The key depends only on the seed, `index` and `repeat`, so it is
        the same for every ensemble algorithm, batch size and number of devices.

    >>> import jax, ensembleode as eo
    >>> prob = eo.ODEProblem(lambda u, p, t: -p * u, [1.0], (0.0, 1.0), 0.5)
    >>> def prob_func(prob, ctx):
    ...     rate = jax.random.uniform(ctx.key)
    ...     return eo.remake(prob, u0=ctx.sim_id * prob.u0, p=rate)
    >>> sim = eo.solve(eo.EnsembleProblem(prob, prob_func), trajectories=3)
    >>> sim.u[:, 0, 0].tolist()
    [1.0, 2.0, 3.0]
    """

    index: ArrayLike
    repeat: ArrayLike
    _base_key: PRNGKeyArray

    @property
    def sim_id(self) -> ArrayLike:
        return self.index + 1

    @property
    def key(self) -> PRNGKeyArray:
        return jax.random.fold_in(jax.random.fold_in(self._base_key, self.index), self.repeat)


class EnsembleProblem(eqx.Module):
    """An ensemble: many trajectories made from one problem.

    **Arguments:**

    - `prob`: the [`ODEProblem`][ensembleode.ODEProblem] that all trajectories are made from.
    - `prob_func`: `prob_func(prob, ctx) -> ODEProblem`, usually by [`remake`][ensembleode.remake],
        with `ctx` an [`EnsembleContext`][ensembleode.EnsembleContext]; or SciML's older
        `prob_func(prob, i, repeat)`, **with `i` counted from 0** (as Python's `u0s[i]` needs). The
        two are told apart by the number of positional parameters without defaults. Each trajectory
        has its own copy of `prob`, of which it may also change the contents of `p`. It is traced
        once over the index, so it should be written in JAX. A function that can't be traced is
        called once for each trajectory instead, which is slow and logged. The same is done for a
        function that makes a different problem each time it is called, which is detected by calling
        it twice. (Random numbers should come from `ctx.key`. Those of NumPy are drawn for each
        trajectory in this way, and are refused inside `jit`.) The returned problem may depend on
        the index in `u0`, `p`, `tspan`, arrays that `f` closes over, and the options `saveat`,
        `abstol`, `reltol`, `dt`; shapes may not.
    - `output_func`: `output_func(sol, ctx) -> (out, rerun)`, applied to the
        [`ODESolution`][ensembleode.ODESolution] of each trajectory. `out` is any pytree of arrays,
        and replaces the trajectory in the result. Where `rerun` is true, the trajectory is made
        again (with `ctx.repeat` larger by one) and solved again, at most `max_repeats` times in
        all.
    - `reduction`: `reduction(u, data, indices) -> (u, converged)`, called after each batch with the
        outputs of that batch (trajectory axis first) and their indices, counted from 0. When
        `converged` is true, the remaining batches are not run.
    - `u_init`: the value that `reduction` starts from. By default, an array like the first batch,
        but with no trajectories in it.
    - `u0`: the initial states of all trajectories, `[trajectory, ...]`; for a state that is a
        pytree, its structure with leaves `[trajectory, ...]`. Then `trajectories` needn't be given
        to `solve`.
    - `p`: the parameters of all trajectories, like the problem's, with another first axis for each
        array that differs between trajectories. What has the shape that it has in the problem is
        shared. (For a problem without parameters, every array has that axis. Rows of a Series or
        a frame of pandas are counted by their positions.) If there is a `prob_func`, it gets the
        problem with these numbers.

    **Raises:** `TypeError` for a `prob` that is not an `ODEProblem`, or functions with the
    wrong number of parameters; `ValueError` for `u_init` without `reduction`, and for `u0` and `p`
    that aren't like the problem's, or have different numbers of trajectories.

    >>> import jax.numpy as jnp, ensembleode as eo
    >>> prob = eo.ODEProblem(lambda u, p, t: -p["k"] * u, [1.0], (0.0, 1.0), {"k": 2.0})
    >>> ens = eo.EnsembleProblem(prob, p={"k": jnp.arange(4.0)})
    >>> [f"{x:.3f}" for x in eo.solve(ens).u[:, -1, 0]]
    ['1.000', '0.368', '0.135', '0.050']
    """

    prob: ODEProblem
    prob_func: Callable | None
    output_func: Callable | None
    reduction: Callable | None
    u_init: PyTree

    def __init__(
        self,
        prob: ODEProblem,
        prob_func: Callable | None = None,
        output_func: Callable | None = None,
        reduction: Callable | None = None,
        u_init: PyTree = None,
        *,
        u0: PyTree = None,
        p: PyTree = None,
        **_unknown: Any,
    ):
        known = ("prob", "prob_func", "output_func", "reduction", "u_init", "u0", "p")
        refuse_unknown("EnsembleProblem", _unknown, known)
        if not isinstance(prob, ODEProblem):
            raise TypeError(
                f"prob must be an ODEProblem, got {type(prob).__name__}. A list of problems "
                "becomes one problem and arrays with a row for each trajectory: "
                "eo.EnsembleProblem(prob, u0=u0s, p=ps)."
            )
        functions = {"prob_func": prob_func, "output_func": output_func, "reduction": reduction}
        for name, fn in functions.items():
            if fn is not None and not callable(fn):
                raise TypeError(f"{name} must be a function or None, got {fn!r}.")
        if u_init is not None and reduction is None:
            raise ValueError("u_init is given without a reduction; pass reduction= too.")
        if prob_func is not None:
            _takes_index(prob_func)
        if u0 is not None or p is not None:
            prob_func = _Rows.of_problem(prob, u0, p, prob_func)
        self.prob = prob
        self.prob_func = prob_func
        self.output_func = output_func
        self.reduction = reduction
        self.u_init = u_init

    def make(self, ctx: EnsembleContext) -> ODEProblem:
        """The problem of the trajectory with this `ctx`."""
        return self.prob if self.prob_func is None else _called(self.prob_func, self.prob, ctx)

    @property
    def rows(self) -> int | None:
        """How many trajectories `u0` and `p` are given for; None where neither is given."""
        return self.prob_func.n if isinstance(self.prob_func, _Rows) else None


class _Rows(eqx.Module):
    """A `prob_func` that gives each of `n` trajectories its rows of arrays, and then calls `then`.

    - `own`: for each leaf of `p`, whether it has a row for each trajectory.
    """

    u0: PyTree
    p: PyTree
    own: PyTree = eqx.field(static=True)
    n: int = eqx.field(static=True)
    then: Callable | None

    @classmethod
    def of_problem(cls, prob: ODEProblem, u0: PyTree, p: PyTree, then: Callable | None) -> "_Rows":
        """The arguments are those of `EnsembleProblem`; where `then` has rows itself, those that
        are given replace them."""
        if isinstance(then, cls):
            u0, p, then = then.u0 if u0 is None else u0, then.p if p is None else p, then.then
        counts: dict[str, int] = {}

        def is_own(name: str, x: ArrayLike, shape: tuple | None) -> bool:
            # (Series and frames of pandas are rows by their positions, as in data.)
            if not (eqx.is_array_like(x) or hasattr(x, "__array__")) or np.shape(x) == shape:
                return False
            if not np.ndim(x) or shape not in (None, np.shape(x)[1:]):
                wanted = f"[trajectory, {', '.join(map(str, shape or ()))}]".replace(", ]", "]")
                raise ValueError(
                    f"{name} of EnsembleProblem has the shape {np.shape(x)}; it must be {wanted}, "
                    "with a row for each trajectory."
                )
            counts[name] = np.shape(x)[0]
            return True

        def own_leaves(name: str, rows: PyTree, like: PyTree) -> list[bool]:
            if like is not None and jax.tree.structure(rows) != jax.tree.structure(like):
                raise ValueError(
                    f"{name} of EnsembleProblem must have the structure of the problem's {name}, "
                    f"{jax.tree.structure(like)}, with a row for each trajectory in arrays that "
                    f"differ; got {jax.tree.structure(rows)}."
                )
            paths = jtu.tree_leaves_with_path(rows)
            shapes = [None] * len(paths) if like is None else map(np.shape, jax.tree.leaves(like))
            names = (name + jtu.keystr(path) for path, _ in paths)
            return [is_own(n, x, s) for n, (_, x), s in zip(names, paths, shapes, strict=True)]

        if u0 is not None:
            u0 = as_state(u0)
            if not all(own_leaves("u0", u0, prob.u0)):
                raise ValueError(
                    "u0 of EnsembleProblem has the shape of one initial state, and must have a row "
                    "for each trajectory; a state that all share belongs to the problem."
                )
        own = None
        if p is not None:
            p = as_parameters(p, time_dtype_of(jax.tree.leaves(prob.u0)[0]))
            own = tuple(own_leaves("p", p, prob.p))
        if len(set(counts.values())) != 1:
            said = ", ".join(f"{name} {n}" for name, n in counts.items()) or "no array of p has any"
            raise ValueError(
                "u0 and p of EnsembleProblem must have rows for the same number of trajectories: "
                f"{said}."
            )
        return cls(u0, p, own, next(iter(counts.values())), then)

    def __call__(self, prob: ODEProblem, ctx: EnsembleContext) -> ODEProblem:
        changes = {}
        if self.u0 is not None:
            changes["u0"] = jax.tree.map(lambda x: x[ctx.index], self.u0)
        if self.p is not None:
            leaves, structure = jax.tree.flatten(self.p)
            rows = zip(leaves, self.own, strict=True)
            changes["p"] = structure.unflatten(
                [jnp.asarray(x)[ctx.index] if own else x for x, own in rows]
            )
        prob = remake(prob, **changes)
        return prob if self.then is None else _called(self.then, prob, ctx)


def _called(prob_func: Callable, prob: ODEProblem, ctx: EnsembleContext) -> ODEProblem:
    """The problem that a `prob_func` makes."""
    try:
        if _takes_index(prob_func):
            log_once(
                "prob_func(prob, i, repeat) is called with i counted from 0 (Julia counts from 1); "
                "use prob_func(prob, ctx) with ctx.sim_id for Julia's numbering."
            )
            new = prob_func(_own(prob), ctx.index, ctx.repeat)
        else:
            with said_of_context("prob_func(prob, ctx)"):
                new = prob_func(_own(prob), ctx)
    except dataclasses.FrozenInstanceError as e:
        raise TypeError(
            f"prob_func {e}: a problem's own fields don't change (what p holds may); write "
            "`return eo.remake(prob, u0=...)`."
        ) from e
    if not isinstance(new, ODEProblem):
        hint = " (is a `return` missing?)" if new is None else ""
        raise TypeError(
            f"prob_func must return an ODEProblem, got {type(new).__name__}{hint}; write "
            "`return eo.remake(prob, u0=...)`."
        )
    return new


@contextlib.contextmanager
def said_of_context(call: str) -> Iterator[None]:
    """**Raises:** `TypeError` in place of an error of a function `call` that takes its context for
    a number."""
    try:
        yield
    except (TypeError, IndexError) as e:
        said = str(e).partition("\n")[0]
        # NumPy doesn't say what it got.
        if "EnsembleContext" not in said and "are valid indices" not in said:
            raise
        raise TypeError(
            f"{call} gets a context, which is no number: its index is ctx.index, counted from 0, "
            f"and ctx.sim_id from 1. ({said})"
        ) from e


def _own(prob: ODEProblem) -> ODEProblem:
    """A copy whose containers and NumPy arrays may be changed (SciML's `safetycopy`)."""
    # What is traced is known again by its identity.
    kept = (prob.f, prob.integrand, prob.options.get("callback"), getattr(prob, "g", None))
    return jax.tree.map(
        lambda x: x.copy() if isinstance(x, np.ndarray) else x,
        prob,
        is_leaf=lambda x: any(x is y for y in kept),
    )


def _takes_index(prob_func: Callable) -> bool:
    """Whether `prob_func` has SciML's older form `(prob, i, repeat)`."""
    try:
        parameters = inspect.signature(prob_func).parameters.values()
    except ValueError:  # builtins without a signature
        return False
    positional = [x for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
    required = [x for x in positional if x.default is x.empty]
    if len(required) == 3:
        return True
    variadic = any(x.kind == x.VAR_POSITIONAL for x in parameters)
    if len(required) > 3 or (len(positional) < 2 and not variadic):
        raise TypeError(
            "prob_func must take (prob, ctx), or (prob, i, repeat); it takes "
            f"{len(required)} required positional parameters: {inspect.signature(prob_func)}."
        )
    return False


def _is_real_number(x: Any) -> bool:
    if not (eqx.is_array_like(x) and np.shape(x) == ()):
        return False
    dtype = jnp.result_type(x)
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def _as_tspan(tspan: Any) -> tuple[Any, Any]:
    try:
        t0, t1 = tspan
    except (TypeError, ValueError):
        raise ValueError(f"tspan must be a pair (t0, t1), got {tspan!r}.") from None
    for name, t in (("t0", t0), ("t1", t1)):
        if not _is_real_number(t):
            raise ValueError(f"tspan must be a pair of real numbers, got {name}={t!r}.")
    if not is_tracer(t0) and not is_tracer(t1) and not (np.isfinite(t0) and np.isfinite(t1)):
        raise ValueError(f"tspan must be finite, got ({t0}, {t1}).")
    return t0, t1
