"""How one trajectory, or one chunk of them, is integrated.

An engine is a module with

- `name`, and `default_sensealg`, the name of the adjoint used without `sensealg`;
- `refusal(alg, options, dtype) -> str | None`: why it can't run a solver with these options on a
  state of this dtype;
- `field_refusal(field, state, batched) -> str | None`, only where it can't run every field: why it
  can't run this one;
- `slower(field, state, batched) -> str | None`, only where another may be faster: why one is;
- `method(alg, options, has_dt=...) -> Static`: the solver as a hashable thing, options checked;
- `versions(method) -> dict`: of what its numbers depend on, besides ensembleode and JAX;
- `integrate(plan, lane) -> Result`: the solution of one trajectory, a pure function;
- `solve_trajectories(plan, lanes, n, mask) -> Result`: that of several, whose axis comes first (`t`
  has it where the trajectories have their own times); those that the mask leaves out needn't be;
- `width(state, n)`: how many of `n` trajectories of such a state belong together;
- `solves_columns`, only where it is false: whether it can solve the matrix of all states as one
  state;
- `chunked`: whether it takes a large ensemble apart into chunks itself;
- `shares_work`, only where it is true: it shares a batch out to threads of the CPU itself, as many
  as `plan.threads`; it needs no devices for that;
- `executor(ensemblealg)`, only where it runs ensembles itself: the executor, or None for the usual
  one (see `ensembleode.executors`).

A new engine is a module here and a line in `ENGINES`, in order of preference.
"""

from typing import Any

from ..core.trajectories import Lane
from ..solution import EngineChoice
from ..tracing.program import Program
from . import compiled as _compiled, diffrax as _diffrax, julia as _julia, lanes as _lanes


ENGINES = (_compiled, _lanes, _diffrax, _julia)


def choose(
    engine: str, alg: Any, options: dict, field: Program, batched: Lane, *, columns: bool = False
) -> tuple[Any, EngineChoice]:
    """The engine that runs `alg` with these (resolved) options on this field.

    **Arguments:** `batched`: what differs by trajectory, a Lane of booleans; `columns`: whether it
    is to solve the matrix of all states as one state.

    **Raises:** `ValueError` for an unknown engine, or one that can't run `alg` or the field.
    """
    (state,) = field.out_avals
    named = {e.name: e for e in ENGINES}

    def chosen(module, why):
        sensealg = options["sensealg"]
        adjoint = module.default_sensealg if sensealg is None else _name(sensealg)
        return module, EngineChoice(module.name, why, _name(alg), adjoint)

    def unfit(module):
        reason = module.refusal(alg, options, state.dtype)
        if reason is None and columns and not getattr(module, "solves_columns", True):
            reason = "it solves trajectories one by one, not as the columns of a matrix."
        return reason

    if engine != "auto":
        if engine not in named:
            raise ValueError(f"engine must be 'auto' or one of {sorted(named)}, got {engine!r}.")
        if reason := unfit(named[engine]):
            raise ValueError(f"engine={engine!r} can't run {_name(alg)}: {reason}")
        if reason := _asked(named[engine], "field_refusal", field, state, batched):
            raise ValueError(f"engine={engine!r} can't run this f: {reason}")
        return chosen(named[engine], "asked for")
    reasons = []
    for candidate in ENGINES:
        reason = unfit(candidate)
        reason = reason or _asked(candidate, "field_refusal", field, state, batched)
        reason = reason or _asked(candidate, "slower", field, state, batched)
        if reason is None:
            why = "; ".join(["auto: the first that runs " + _name(alg), *reasons])
            return chosen(candidate, why)
        reasons.append(f"not {candidate.name}: {reason.removesuffix('.')}")
    raise ValueError(f"no engine can run {_name(alg)} ({'; '.join(reasons)})")


def _asked(module: Any, what: str, field: Program, state: Any, batched: Lane) -> str | None:
    """What an engine says of a field, where it has something to say of fields."""
    says = getattr(module, what, None)
    return says and says(field, state, batched)


def _name(alg: Any) -> str:
    return type(alg).__name__
