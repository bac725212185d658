"""SciPy's `solve_ivp`, for a `fun` that is written in JAX."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ..ground.retcode import is_successful, ReturnCode, ReturnCodes, was_ended
from ..problem.callbacks import CallbackSet, ContinuousCallback, Integrator, terminate
from ..problem.ode_function import ODEFunction
from ..problem.problem import ODEProblem, remake
from ..solvers import AutoTsit5, Bosh3, Dopri5, Rodas5P, Vern8
from ..solving import solve
from ..tracing.program import is_tracer


METHODS: dict[str, Callable] = {
    "RK23": Bosh3,
    "RK45": Dopri5,
    "DOP853": Vern8,
    "Radau": Rodas5P,
    "BDF": Rodas5P,
    "LSODA": lambda: AutoTsit5(Rodas5P()),
}
# SciPy's names of options.
_OPTIONS = {
    "rtol": "reltol",
    "atol": "abstol",
    "first_step": "dt",
    "max_step": "dtmax",
    "min_step": "dtmin",
}
_NOT_NEEDED = ("jac_sparsity", "lband", "uband")


class IVPResult(eqx.Module):
    """What [`solve_ivp`][ensembleode.solve_ivp] returns, with SciPy's names; also by an index, such
    as `result["y"]`.

    - `t [time]`, `y [component, time]`: the times and the states.
    - `sol`: the function `sol(t)`, of which the result is `[component]`, or `[component, time]` for
        several times; None without `dense_output`.
    - `t_events`, `y_events`: for each event function its times `[event]` and states
        `[event, component]`; None without `events`. Inside of `jit`, the numbers of events aren't
        known, and NaN follows them.
    - `nfev`, `njev`, `nlu`: how often `fun`, its Jacobian, and a factorisation were computed.
    - `status`: 0 at the end of the span, 1 where an event ended the solve, -1 for a failure.
    - `message`, `success`: the same in words; whether the status is 0 or 1.
    - `retcode`: the [`ReturnCode`][ensembleode.ReturnCode].
    """

    t: Array
    y: Array
    sol: Callable | None
    t_events: list | None
    y_events: list | None
    nfev: ArrayLike
    njev: Any
    nlu: Any
    retcode: ReturnCodes

    @property
    def success(self) -> bool:
        return is_successful(self.retcode)

    @property
    def status(self) -> Any:
        code = jnp.where(was_ended(self.retcode), 1, 0)
        status = jnp.where(self.success, code, -1)
        return status if is_tracer(status) else int(status)

    @property
    def message(self) -> str:
        match self.status:
            case 0:
                return "The solver successfully reached the end of the integration interval."
            case 1:
                return "A termination event occurred."
        return f"The solve failed: {ReturnCode(int(self.retcode)).name}."

    def __getitem__(self, name: str) -> Array:
        return getattr(self, name)


def solve_ivp(
    fun: Callable,
    t_span: Sequence,
    y0: PyTree,
    method: Any = "RK45",
    t_eval: PyTree = None,
    dense_output: bool = False,
    events: Callable | Sequence | None = None,
    vectorized: bool = False,
    args: Sequence | None = None,
    **options: Any,
) -> IVPResult:
    """Solve an initial value problem as `scipy.integrate.solve_ivp` does, with the same arguments.

    `fun` and the events are written in JAX (`jnp` in place of `np`); the solve is compiled, can be
    differentiated by `y0`, `args`, `t_span` and `t_eval`, and works inside of `jit` and `vmap`
    (there with `t_eval`). For many solves at a time see
    [`EnsembleProblem`][ensembleode.EnsembleProblem].

    **Arguments:**

    - `fun`: `fun(t, y, *args)`, the derivatives `[component]`, also as a list.
    - `t_span`: the times `(t0, tf)`.
    - `y0`: the initial state `[component]`; integers become floats.
    - `method`: `"RK23"`, `"RK45"`, `"DOP853"` (here `Vern8`, of the same order), `"Radau"` and
        `"BDF"` (here `Rodas5P`, a Rosenbrock method of order 5), `"LSODA"` (here `AutoTsit5`, which
        switches), or any solver of this library.
    - `t_eval`: the times to return, by default those of the steps.
    - `dense_output`: whether the result has the function `sol`.
    - `events`: `event(t, y, *args)`, or several: real numbers, whose zeros are found. The
        attributes `terminal` (True, or after how many zeros the solve ends) and `direction`
        (positive: only rising zeros; negative: only falling ones) are SciPy's. A step ends at each
        event.
    - `vectorized`: whether `fun` takes states `[component, k]`.
    - `args`: further arguments of `fun`, the events and `jac`, a tuple.
    - `options`: `rtol` (1e-3), `atol` (1e-6), `first_step`, `max_step`, `min_step`, `jac` (a
        matrix, or `jac(t, y, *args)`); `jac_sparsity`, `lband` and `uband` are taken and not
        needed; and those of [`solve`][ensembleode.solve].

    **Returns:** an [`IVPResult`][ensembleode.IVPResult].

    **Raises:** `ValueError` and `TypeError` for wrong arguments.

    >>> import ensembleode as eo
    >>> def fun(t, y, k):
    ...     return -k * y
    >>> result = eo.solve_ivp(fun, (0.0, 1.0), [1.0], args=(2.0,), rtol=1e-6, atol=1e-9)
    >>> result.message, f"{result.y[0, -1]:.5f}"
    ('The solver successfully reached the end of the integration interval.', '0.13534')
    """
    args = _tuple_of(args)
    y0 = _state(y0)
    alg = _method(method)
    t0, t1 = _span(t_span)
    times: Any = _times(t_eval, t0, t1)
    functions = [events] if callable(events) else list(events or ())
    # (The events that end the solve only after several of them are counted in `p`.)
    p = (args, (jnp.zeros((), y0.real.dtype),) * len(functions))
    jac = options.pop("jac", None)
    for name in _NOT_NEEDED:
        options.pop(name, None)
    options = {_OPTIONS.get(name, name): x for name, x in options.items()}
    longest = options.get("dtmax")
    if not is_tracer(longest) and longest == np.inf:  # (SciPy's default)
        del options["dtmax"]
    f = ODEFunction(_field(fun, vectorized), jac=_jacobian(jac))
    callbacks = [_callback(i, event) for i, event in enumerate(functions)]
    callback = CallbackSet(*callbacks) if callbacks else None
    prob = ODEProblem(f, y0, (t0, t1), p, callback=callback)
    by_steps = times is None or dense_output
    no_times = times is not None and times.size == 0
    saved = {"save_everystep": True} if by_steps else {} if no_times else {"saveat": times}
    found = solve(prob, alg, **saved, **options)
    t: Any = found.t
    y: Any = found.u
    if times is not None:
        last = t[-1]
        if dense_output:
            t, y = times, found(times)
        if not is_tracer(last) and not is_tracer(times):
            # (Where an event, or a failure, ended it.)
            reached = (times <= last) if t1 >= t0 else (times >= last)
            t, y = t[: reached.sum()], y[: reached.sum()]
    of_events = _events(found.events, len(functions)) if functions else (None, None)
    return IVPResult(
        t,
        _last_times(y),
        _DenseOutput(found) if dense_output else None,
        *of_events,
        found.stats.nf,
        _or_zero(found.stats.njac),
        _or_zero(found.stats.nw),
        found.retcode,
    )


def _last_times(y: Array) -> Array:
    """States `[time, component]` as `[component, time]`."""
    return jnp.moveaxis(jnp.asarray(y), 0, -1)


def _or_zero(count: Any) -> Any:
    return 0 if count is None else count


class _DenseOutput(eqx.Module):
    """SciPy's `sol(t)` of a solution."""

    solution: Any

    def __call__(self, t: PyTree) -> Array:
        y = self.solution(t)
        return _last_times(y) if np.ndim(t) else y


def _tuple_of(args: PyTree) -> tuple:
    if args is None:
        return ()
    try:
        return (*args,)
    except TypeError as e:
        raise TypeError(
            f"args must be a tuple, got {args!r}: for one further argument, (value,)."
        ) from e


def _state(y0: PyTree) -> Array | None:
    y0 = jnp.asarray(y0)
    y0 = y0 if jnp.issubdtype(y0.dtype, jnp.inexact) else y0.astype(float)
    if y0.ndim > 1:
        raise ValueError(f"y0 must be 1-dimensional, got the shape {y0.shape}.")
    return jnp.atleast_1d(y0)


def _method(method: Any) -> Any:
    if not isinstance(method, str):
        return method
    if method not in METHODS:
        raise ValueError(
            f"method must be one of {', '.join(METHODS)}, or a solver such as eo.Tsit5(); got "
            f"{method!r}."
        )
    return METHODS[method]()


def _span(t_span: PyTree) -> tuple:
    try:
        t0, t1 = t_span
    except (TypeError, ValueError) as e:
        raise ValueError(f"t_span must be the times (t0, tf), got {t_span!r}.") from e
    return tuple(x if is_tracer(x) else float(x) for x in (t0, t1))


def _times(t_eval: PyTree, t0: Any, t1: Any) -> Any:
    if t_eval is None:
        return None
    if is_tracer(t_eval):
        return t_eval
    times = np.asarray(t_eval, float)
    if times.ndim != 1:
        raise ValueError(f"t_eval must be 1-dimensional, got the shape {times.shape}.")
    if is_tracer(t0) or is_tracer(t1):
        return times
    low, high = min(t0, t1), max(t0, t1)
    if ((times < low) | (times > high)).any():
        raise ValueError("t_eval has times that are not within t_span.")
    if (np.sign(t1 - t0) * np.diff(times) <= 0).any():
        raise ValueError("t_eval is not sorted from t0 to tf.")
    return times


def _field(fun: Callable, vectorized: bool) -> Callable:
    def f(u: PyTree, p: PyTree, t: Array) -> Array:
        args, _ = p
        found = fun(t, u[:, None] if vectorized else u, *args)
        return jnp.asarray(found, u.dtype).reshape(u.shape)

    return f


def _jacobian(jac: np.ndarray | None) -> Callable | None:
    if jac is None:
        return None

    def of(u: PyTree, p: PyTree, t: Array) -> Array:
        return jnp.asarray(jac(t, u, *p[0]) if callable(jac) else jac, u.dtype)

    return of


def _callback(i: int, event: Callable) -> ContinuousCallback:
    direction, terminal = getattr(event, "direction", 0), getattr(event, "terminal", False)
    if terminal != int(terminal) or terminal < 0:
        raise ValueError(
            f"the terminal of an event must be True, False, or how many zeros there may be, got "
            f"{terminal!r}."
        )

    def condition(u: PyTree, t: Array, integrator: Integrator) -> Array:
        args, _ = integrator.p
        return event(t, u, *args)

    def affect(integrator: Integrator) -> Integrator:
        if not terminal:
            return integrator
        if terminal == 1:
            return terminate(integrator)
        args, counts = integrator.p
        count = counts[i] + 1
        counted = remake(integrator, p=(args, (*counts[:i], count, *counts[i + 1 :])))
        return dataclasses.replace(terminate(counted), _ends=count >= terminal)

    up, down = (affect if direction >= 0 else None), (affect if direction <= 0 else None)
    return ContinuousCallback(condition, up, down, save_positions=(True, False))


def _events(events: Any, count: int) -> tuple[list, list]:
    """The times and states for each event function."""

    def padded(x: Array, those: Array) -> Array:
        wanted = jnp.where(those.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.nan)
        return wanted[jnp.argsort(~those, stable=True)]

    rows = padded if is_tracer(events.t) else np.ndarray.__getitem__
    each = [events.which == i for i in range(count)]
    return [rows(events.t, x) for x in each], [rows(events.u_before, x) for x in each]
