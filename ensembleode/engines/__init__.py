"""How one trajectory, or one chunk of them, is integrated.

An engine is a module with

- `name`, and `default_sensealg`, the name of the adjoint used without `sensealg`;
- `refusal(alg, options, dtype) -> str | None`: why it can't run a solver with these options on a
  state of this dtype;
- `method(alg, options, has_dt=...) -> Static`: the solver as a hashable thing, options checked;
- `integrate(plan, lane) -> Result`: the solution of one trajectory, a pure function;
- `solve_trajectories(plan, lanes, n, mask) -> Result`: that of several, whose axis comes first (`t`
  has it where the trajectories have their own times); those that the mask leaves out needn't be;
- `width(state, n)`: how many of `n` trajectories of such a state belong together;
- `chunked`: whether it takes a large ensemble apart into chunks itself;
- `executor(ensemblealg)`, only where it runs ensembles itself: the executor, or None for the usual
  one (see `ensembleode.executors`).

A new engine is a module here and a line in `ENGINES`, in order of preference.
"""

from typing import Any

from ..solution import EngineChoice
from . import diffrax as _diffrax, julia as _julia, lanes as _lanes


ENGINES = (_lanes, _diffrax, _julia)


def choose(engine: str, alg: Any, options: dict, dtype: Any) -> tuple[Any, EngineChoice]:
    """The engine that runs `alg` with these (resolved) options on a state of this dtype.

    **Raises:** `ValueError` for an unknown engine, or one that can't run `alg`.
    """
    named = {e.name: e for e in ENGINES}

    def chosen(module, why):
        sensealg = options["sensealg"]
        adjoint = module.default_sensealg if sensealg is None else _name(sensealg)
        return module, EngineChoice(module.name, why, _name(alg), adjoint)

    if engine != "auto":
        if engine not in named:
            raise ValueError(f"engine must be 'auto' or one of {sorted(named)}, got {engine!r}.")
        if reason := named[engine].refusal(alg, options, dtype):
            raise ValueError(f"engine={engine!r} can't run {_name(alg)}: {reason}")
        return chosen(named[engine], "asked for")
    reasons = []
    for candidate in ENGINES:
        reason = candidate.refusal(alg, options, dtype)
        if reason is None:
            why = "; ".join(["auto: the first that runs " + _name(alg), *reasons])
            return chosen(candidate, why)
        reasons.append(f"not {candidate.name}: {reason.removesuffix('.')}")
    raise ValueError(f"no engine can run {_name(alg)} ({'; '.join(reasons)})")


def _name(alg: Any) -> str:
    return type(alg).__name__
