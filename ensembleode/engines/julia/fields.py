"""The vector field of a plan, with its derivatives, as Julia functions."""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ...fields import Inputs, lower, parameters_of, staged, UntranslatableError
from ...tracing.program import Program
from .source import julia_source, JuliaDefinition


# A static Jacobian with more rows takes long to compile.
_LARGEST_STATIC_JACOBIAN = 8


class JuliaField(NamedTuple):
    """A right-hand side in Julia, its derivatives with respect to the state and the time, and the
    diffusion of a stochastic problem.

    Either all of these functions store their results (`in_place`), or all return them. `inputs` is
    the layout of the parameters.
    """

    f: JuliaDefinition
    jac: JuliaDefinition | None
    tgrad: JuliaDefinition | None
    inputs: Inputs
    g: JuliaDefinition | None = None

    @property
    def in_place(self) -> bool:
        return self.f.in_place

    def as_table(self) -> dict[str, Any]:
        """The field's table in a request."""
        functions = {"f": self.f, "jac": self.jac, "tgrad": self.tgrad, "g": self.g}
        tables = {role: x.as_table() for role, x in functions.items() if x is not None}
        return {"in_place": self.in_place, **tables}


def inputs_of(program: Program, batched: Sequence[bool], forward: bool = False) -> Inputs:
    """The layout of the parameters: those that differ by trajectory are in `own`, the others in
    `shared`. With `forward`, the last parameter is the forward solution.
    """
    avals = parameters_of(program)
    dtype: DTypeLike = program.out_avals[0].dtype
    groups = ["own" if b else "shared" for b in batched]
    numbers = avals[:-1] if forward else avals
    if forward:
        groups.append("forward")
    same = all(a.dtype == dtype for a in numbers)
    return Inputs.laid_out(avals, groups, dtype if same else np.float64)


@functools.lru_cache(maxsize=256)
def translate(
    program: Program,
    batched: tuple[bool, ...],
    implicit: bool = False,
    rate: Program | None = None,
    *,
    product: Program | None = None,
    in_place: bool = False,
) -> JuliaField:
    """Translate a field; for an implicit method also its Jacobian and its time derivative.

    **Arguments:**

    - `rate`: given for the field of an adjoint, whose last parameter is the forward solution;
        `rate` is the field of that solution, which changes with the time.
    - `product`: the product of the user's Jacobian with a direction (`ImplicitForm.product`); by
        default the Jacobian is that of the field.
    - `in_place`: whether an implicit method's functions store their results, however few there are.

    **Raises:** `ValueError` for a field that can't be translated, naming the primitive and its
    place.
    """
    inputs = inputs_of(program, batched, rate is not None)
    size = math.prod(program.out_avals[0].shape)
    with _told("f"):
        if not implicit:
            return JuliaField(julia_source(lower(program.jaxpr, inputs)), None, None, inputs)
        jaxprs = (program.jaxpr, _jacobian(program, product), _time_derivative(program, rate))
        largest = size**2 if size <= _LARGEST_STATIC_JACOBIAN and not in_place else 0
        functions = [lower(jaxpr, inputs, largest) for jaxpr in jaxprs]
        if largest and not all(fn.is_scalar for fn in functions):
            functions = [lower(jaxpr, inputs, 0) for jaxpr in jaxprs]
    f, jac, tgrad = functions
    return JuliaField(
        julia_source(f),
        julia_source(jac, "jac", columns=size),
        julia_source(tgrad, "tgrad"),
        inputs,
    )


def translate_stochastic(
    drift: Program, diffusion: Program, batched: tuple[bool, ...], columns: int | None
) -> JuliaField:
    """Translate the drift and the diffusion of a stochastic problem, which have the same constants
    and parameters.

    **Arguments:** `columns`: the number of columns of a diffusion that is a matrix (see
    `noise.field_with_noise`); None for one like the state.

    **Raises:** `ValueError` for a function that can't be translated, as `translate`.
    """
    inputs = inputs_of(drift, batched)
    with _told("f"):
        f = lower(drift.jaxpr, inputs)
    with _told("g"):
        g = lower(diffusion.jaxpr, inputs)
        if f.is_scalar != g.is_scalar:
            f, g = (lower(x.jaxpr, inputs, 0) for x in (drift, diffusion))
    return JuliaField(julia_source(f), None, None, inputs, julia_source(g, "g", columns=columns))


@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
    """**Raises:** `ValueError` that says which function can't be translated, and why."""
    try:
        yield
    except UntranslatableError as e:
        raise ValueError(
            f"{name} can't be translated to Julia: it uses {e.what}, at {e.where}. Write that part "
            "otherwise, or use another engine."
        ) from e


def _jacobian(program: Program, product: Program | None) -> jex.Jaxpr:
    """The Jacobian transposed, so that its row-major order is Julia's column-major one."""
    (state,) = program.out_avals

    def jacobian(consts, u, p, t):
        def along(direction):
            v = direction.reshape(state.shape)
            if product is not None:
                return product(consts, u, (*p, v), t).reshape(-1)
            return jax.jvp(lambda u: program(consts, u, p, t), (u,), (v,))[1].reshape(-1)

        return jax.vmap(along)(jnp.eye(state.size, dtype=state.dtype))

    return staged(program, jacobian)


def _time_derivative(program: Program, rate: Program | None) -> jex.Jaxpr:
    def derivative(consts, u, p, t):
        if rate is None:
            return jax.jvp(lambda t: program(consts, u, p, t), (t,), (jnp.ones_like(t),))[1]
        *numbers, state = p
        n = len(rate.jaxpr.constvars)
        moved = rate(numbers[:n], state, tuple(numbers[n:]), t)

        def along(state, t):
            return program(consts, u, (*numbers, state), t)

        return jax.jvp(along, (state, t), (moved, jnp.ones_like(t)))[1]

    return staged(program, derivative)
