"""The compiled engine: small systems as one loop of machine code.

The whole solve of many trajectories is one function, generated as LLVM IR around the field and
called from JAX's programs without a copy. Every lane has its own step size, its own acceptance, its
own end and its own return code, and takes the next trajectory when it has finished one.

- `builder.py`, `values.py`: LLVM IR from Python. `functions/`: elementary functions in it.
- `field.py`: the vector field, from the small language of `fields`; `operations.py`,
    `products.py`, `reading.py` and `uniformity.py`: its parts.
- `numbers.py`: where the numbers of a trajectory are. `loop.py`: the time loop. `replay.py`: its
    reverse mode, of the steps that were recorded; `steps.py`: of a method's step.
- `kernel.py`: both as kernels. `solves.py`: these as functions of arrays.
- `gpu.py`: the same on NVIDIA GPUs, a thread a trajectory. `entry.py`, `launch.py`: to a launch of
    XLA's; `ptxas.py`: what it takes there.
- `machine.py`, `compiler.py`, `object_cache.py`: from IR to machine code, kept on disk.
    `handler.py` (with `sharing.py`, among threads, and `writer.py`), `call.py`: to an operation of
    JAX.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ... import sensitivity
from ...core.events import Events
from ...core.lane import Lane
from ...ensemble import EnsembleGPUKernel
from ...fields import Inputs, lower, parameters_of, UntranslatableError
from ...fields.walking import length
from ...ground.logs import log_once
from ...tracing.program import Program
from ..checks import refusal_of_ours
from ..closed import Closed
from . import solves
from .compiler import available
from .equations import transposed
from .operations import check


_SENSEALGS = (sensitivity.ReplayAdjoint, sensitivity.ForwardDiffSensitivity)


# Where the lanes engine is faster (see benchmarks/engine_limits.py), or compiles in less time: a
# large state, an `f` so long that its code leaves the cache, many sums of gradients.
_MOST_COMPONENTS, _MOST_STATEMENTS, _MOST_SHARED = 200, 1500, 100


class _Reading(NamedTuple):
    """What is known of a field: why it can't be translated, or how long it is."""

    refusal: str | None
    statements: int = 0


@functools.lru_cache(maxsize=256)
def _read(field: Program) -> _Reading:
    return _read_program(field, "f")


@functools.lru_cache(maxsize=1024)
def _read_derivative(field: Program) -> _Reading:
    avals = parameters_of(field)
    real = [i for i, a in enumerate(avals) if jnp.issubdtype(a.dtype, jnp.floating)]
    try:
        jaxpr = transposed(field, real)
    except Exception:
        # There is none, for any engine: whoever takes it is told, and a solve doesn't need it.
        return _Reading(None)
    return _read_program(Program(jaxpr, None, ()), "the derivative of f")


def _read_program(program: Program, what: str) -> _Reading:
    avals = parameters_of(program)
    inputs = Inputs.laid_out(avals, ["own"] * len(avals))
    try:
        fn = lower(program.jaxpr, inputs)
        check(fn)
    except UntranslatableError as e:
        return _Reading(f"{what} can't be translated: it uses {e.what}, at {e.where}.")
    return _Reading(None, length(fn.body))


class Compiled(Closed):
    """Small systems as one loop of machine code, on CPUs."""

    name = "compiled"
    default_sensealg = "ReplayAdjoint"
    solved = staticmethod(solves.solve)
    rows = staticmethod(solves.rows)
    pull_back = staticmethod(solves.pull_back)
    solves_columns = False
    shares_work = True
    numbers_apart = True
    has_mass_matrices = True

    def refusal(self, alg: Any, options: dict, dtype: Any, ensemblealg: Any) -> str | None:
        """Why this engine can't run `alg` with these options on such a state; None when it can."""
        if reason := available():
            log_once(f"small systems are solved by the lanes engine, more slowly: {reason}")
            return reason
        if reason := refusal_of_ours(self.name, alg, options, dtype):
            return reason
        sensealg = options["sensealg"]
        if sensealg is not None and not isinstance(sensealg, _SENSEALGS):
            return f"sensealg={type(sensealg).__name__}() is of other engines."
        if jax.default_backend() != "cpu" and not isinstance(ensemblealg, EnsembleGPUKernel):
            return f"it runs on CPUs, and JAX computes on {jax.default_backend()}."
        return None

    def field_refusal(self, field: Program, state: Any, batched: Lane) -> str | None:
        """Why this engine can't run this field, on such a state; None when it can."""
        del batched
        if 0 in state.shape:
            return "the state has no components."
        if field.jaxpr.effects:
            return f"f has effects ({', '.join(sorted(map(str, field.jaxpr.effects)))})."
        return _read(field).refusal

    def extended_refusal(self, options: dict) -> str | None:
        """None: it can."""
        del options
        return None

    def events_refusal(self, events: Events) -> str | None:
        """Why this engine can't solve with these callbacks; None when it can."""
        for part in events.parts:
            if part.program.jaxpr.effects:
                return "a condition or an affect of a callback has effects, such as printing."
            what = "a condition or an affect of a callback"
            if reason := _read_program(part.program, what).refusal:
                return reason
        return None

    def slower(self, field: Program, state: Any, batched: Lane) -> str | None:
        """Why another engine is faster with this field, or alone has its derivative; else None."""
        if (size := math.prod(state.shape)) > _MOST_COMPONENTS:
            return f"{size} components are better solved as arrays."
        if (statements := _read(field).statements) > _MOST_STATEMENTS:
            return f"an f of {statements} operations is better solved as arrays."
        shares = (not own for own in batched.parameters)
        shared = sum(
            math.prod(x.shape)
            for x, is_shared in zip(parameters_of(field), shares, strict=True)
            if is_shared and jnp.issubdtype(x.dtype, jnp.floating)
        )
        if shared > _MOST_SHARED:
            return f"with {shared} numbers that all share, an f is better solved as arrays."
        return _read_derivative(field).refusal

    def is_stoppable(self) -> bool:
        """It can be stopped: its loop looks at the flag itself."""
        return True

    def width(self, state: Any, n: int) -> int:
        """How many trajectories stay together on a device, though each is solved by itself."""
        # (Neighbours in memory, where there are many.)
        del state
        return 2 ** max(0, min(6, int(math.log2(max(1, n))) - 4))


ENGINE = Compiled()
