"""The compiled engine: a solve as one loop of machine code.

The whole solve of many trajectories is one function, a kernel, which is generated as LLVM IR around
the field and called from JAX's programs without copies of arrays. Every lane has its own step size,
acceptance, end and return code, and takes the next trajectory when it has finished one.

From the bottom up:

- `llvm/`: LLVM IR and machine code from Python. `xla/`: a function in LLVM IR as an operation of
    JAX. `algebra/`: products, linear equations and sums in memory.
- `field/`: the vector field as instructions. `steps/`: what a kernel computes. `loop/`: the time
    loop and its events. `reverse/`: reverse mode of the time loop.
- `kernel.py`: the kernels, made of these parts. `solves.py`: the kernels as functions of arrays.
    `gauss_adjoint.py`: the adjoint ODE. `gpu_engine.py`: the engine on NVIDIA GPUs.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ...fields import Inputs, parameters_of, UntranslatableError
from ...fields.derivatives.sparsity import structure
from ...fields.derivatives.transposes import transposed
from ...fields.walking import statements
from ...ground.devices.alone import alone
from ...ground.devices.placement import platform
from ...ground.logs import log_once
from ...plan.events import TracedCallbacks
from ...plan.noise import NoiseTerms
from ...plan.plan import Plan, Result
from ...plan.trajectory_numbers import TrajectoryNumbers
from ...problem import sensitivity
from ...solvers.switching import Switching
from ...tracing.program import Program, Static
from ..base.engine import Engine
from ..base.results import with_times
from ..derivatives.derivatives import differentiable
from ..derivatives.flow import Flow, inexact_of, own_and_shared, RecordedSolve
from ..derivatives.rest import at_rest
from . import gauss_adjoint, solves, tuning
from .field.field import by_loops, lower
from .field.operations import check
from .llvm.compiler import available
from .steps import method
from .steps.description import least_in_memory


@functools.lru_cache(maxsize=256)
def _entries(field: Program) -> int:
    """How many entries of the field's Jacobian may be nonzero; 0 if all of them are."""
    places = structure(field)
    return 0 if places.all() else int(places.sum())


def lines(method: Any, field: Program) -> int:
    """About how many lines of LLVM IR the step of an implicit method has for this field."""
    size = math.prod(field.out_avals[0].shape)
    parts = (method.nonstiff, method.stiff) if isinstance(method, Switching) else (method,)
    stages = sum(part.stages for part in parts)
    found = size * (len(parts) * tuning.LINES_OF_COMPONENT + stages * tuning.LINES_OF_STAGE)
    # (Where the sparsity doesn't decide, it isn't looked for.)
    if found <= tuning.MOST_LINES < found + tuning.LINES_OF_ENTRY * size**2:
        found += tuning.LINES_OF_ENTRY * _entries(field)
    return found


class _FieldReading(NamedTuple):
    """The result of translating a field: why it can't be translated, or how long its code is."""

    refusal: str | None
    statements: int = 0


@functools.lru_cache(maxsize=256)
def _read(field: Program) -> _FieldReading:
    return _read_program(field, "f")


@functools.lru_cache(maxsize=1024)
def _read_derivative(field: Program, is_own: tuple[bool, ...]) -> _FieldReading:
    inexact = inexact_of(field)
    own = [i for i in inexact if is_own[i]]
    try:
        jaxpr = transposed(field, [*own, *(i for i in inexact if not is_own[i])])
    except Exception:
        # No engine can differentiate this field, and whoever asks for the derivative is told so.
        return _FieldReading(None)
    return _read_program(Program(jaxpr, None, ()), "the derivative of f")


def _read_program(program: Program, what: str) -> _FieldReading:
    avals = parameters_of(program)
    inputs = Inputs.laid_out(avals, ["own"] * len(avals))
    # The loops of a large state stay loops.
    outs: list = program.jaxpr.outvars
    is_large = any(math.prod(x.aval.shape) >= least_in_memory() for x in outs)
    try:
        fn = by_loops(program.jaxpr, inputs) if is_large else lower(program.jaxpr, inputs)
        check(fn)
    except UntranslatableError as e:
        return _FieldReading(f"{what} can't be translated: it uses {e.what}, at {e.where}.")
    return _FieldReading(None, sum(1 for _ in statements(fn.body)))


class CompiledEngine(Engine):
    """Solves as one loop of machine code, on CPUs, whose derivatives are solves again."""

    name = "compiled"
    default_sensealg = "ReplayAdjoint"
    chooses = True
    closed = True
    shares_work = True
    noise_in_field = True
    numbers_apart = True
    rows = staticmethod(solves.rows)

    def method(self, alg: Any, options: dict, *, has_dt: bool) -> Static:
        return method.method(alg, options, has_dt=has_dt)

    def solve_trajectories(
        self, plan: Plan, lanes: TrajectoryNumbers, n: int, mask: Array | None = None
    ) -> Result:
        """Solve `n` trajectories."""
        solver = plan.method.value
        mask = jnp.ones(n, bool) if mask is None else mask
        if solver.direction == "reverse" and solver.adjoint != self.default_sensealg:
            lanes = sensitivity.reverse_only(lanes, solver.adjoint + "()")
        fixed = jax.tree.map(jax.lax.stop_gradient, lanes)
        result = alone(functools.partial(solves.solve, plan), fixed, mask)
        result = at_rest(plan, lanes, differentiable(plan, lanes, mask, result))
        if solver.direction == "forward":
            result = sensitivity.forward_only(result)
        return with_times(plan, lanes, result)

    @staticmethod
    def pull_back(
        flow: Flow, lanes: TrajectoryNumbers, known: RecordedSolve, cotangents: Sequence
    ) -> list:
        """See `Engine`."""
        is_gauss = flow.plan.method.value.adjoint == "GaussAdjoint"
        pull_back = gauss_adjoint.pull_back if is_gauss else solves.pull_back
        return pull_back(flow, lanes, known, cotangents)

    def missing(self) -> str | None:
        """Why there is no compiler on this machine; None where there is one."""
        if reason := available():
            log_once(f"diffrax takes the place of the compiled engine, more slowly: {reason}")
        return reason

    def unreadable(self, field: Program, state: Any, batched: TrajectoryNumbers) -> str | None:
        """Why this engine can't run this field on such a state; None when it can."""
        if 0 in state.shape:
            return "the state has no components."
        if field.jaxpr.effects:
            return f"f has effects ({', '.join(sorted(map(str, field.jaxpr.effects)))})."
        return _read(field).refusal

    def unreadable_callbacks(self, events: TracedCallbacks) -> str | None:
        """Why this engine can't run these callbacks; None when it can."""
        what = "a condition or an affect of a callback"
        for part in events.parts:
            if part.program.jaxpr.effects:
                return f"{what} has effects, such as printing."
            if reason := _read_program(part.program, what).refusal:
                return reason
        return None

    def unreadable_noise(self, noise: NoiseTerms) -> str | None:
        """Why this engine can't run a stochastic problem with this noise; None when it can."""
        if noise.diffusion.jaxpr.effects:
            return "g has effects, such as printing."
        return _read_program(noise.diffusion, "g").refusal

    def slower(
        self, field: Program, state: Any, batched: TrajectoryNumbers, *, is_extended: bool
    ) -> str | None:
        """Why another engine is better with this field; None where none is."""
        if is_extended and (size := math.prod(state.shape)) > tuning.MOST_WRITTEN_OUT:
            return f"{size} components with integrands take long to compile."
        if (statements := _read(field).statements) > tuning.MOST_STATEMENTS:
            return f"an f of {statements} operations takes long to compile."
        own, shared = own_and_shared(field, batched)
        if own > tuning.MOST_OWN_ON_GPU and platform() != "cpu":
            return f"{own} numbers of each trajectory's own are better kept as arrays."
        if shared > tuning.MOST_SHARED_ON_GPU and platform() != "cpu":
            return f"{shared} numbers that all trajectories share are better kept as arrays."
        return _read_derivative(field, tuple(map(bool, batched.parameters))).refusal

    def too_long(self, method: Any, field: Program) -> str | None:
        """Why the step of an implicit method is too long to compile; None where it isn't."""
        if (found := lines(method, field)) <= tuning.MOST_LINES:
            return None
        size = field.out_avals[0].size
        most = tuning.MOST_LINES
        return f"{size} components take some {found:,} lines of code, more than {most:,}."

    def is_stoppable(self) -> bool:
        return True

    def width(self, state: Any, n: int) -> int:
        """How many neighbouring trajectories stay on the same device."""
        return 2 ** max(0, min(6, int(math.log2(max(1, n))) - 4))


ENGINE = CompiledEngine()
