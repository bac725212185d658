"""The choices of how a solve is differentiated (`sensealg`), and the errors where it can't be."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import Array
from jax.interpreters import ad, batching, mlir
from jaxtyping import PyTree


class SensitivityAlgorithm(eqx.Module):
    """Base class of the `sensealg` choices."""


class ReplayAdjoint(SensitivityAlgorithm):
    """Reverse mode by recording the steps and replaying them. It is the default of the compiled
    engine.

    The derivatives are those of the numerical solution with its steps held constant, and are exact.
    Derivatives with respect to times are those of the field, exact up to the tolerances. The memory
    grows with the square root of `maxiters`, up to a limit, and the cost with the number of steps
    taken.

    Forward mode and derivatives of any order work, too, with any nesting: `jax.jvp`, `jax.hessian`,
    `jax.jvp(jax.grad(...), ...)`. Those of higher order are solves of `f` with its tangents, whose
    steps are controlled by the state alone.
    """


class GaussAdjoint(SensitivityAlgorithm):
    """The continuous adjoint along the forward solution. The gradient is accurate to the
    tolerances, but not exact. Reverse mode only.

    It is in the compiled engine on CPUs. Where a problem is stiff, the adjoint falls off after each
    saved time within a small part of a recorded step. So the adjoint ODE is solved back from saved
    time to saved time along the dense output, with the method and `reltol` of the solve, in steps
    of its own, none of which passes over more than about a thirty-second part of the forward steps.
    Each of its components has an absolute tolerance that depends on the size of the state's
    component (where that is near zero, `abstol / reltol` counts as its size), such that the units
    of neither matter. The integrals of the parameters are as accurate as these steps. If the
    adjoint of a trajectory can't be solved within `maxiters` steps between two saved times, its
    gradient is NaN. There is room for `maxiters` steps of some trajectories at a time, and memory
    is taken for the steps that were made. Fixed steps, callbacks, integrands, mass matrices and
    `EnsembleGPUKernel` are refused: `ReplayAdjoint` has them all.

    Source: Chen et al., "Neural ordinary differential equations", NeurIPS 2018, appendix B.
    """


class InterpolatingAdjoint(SensitivityAlgorithm):
    """The continuous adjoint along the interpolated forward solution, in the Julia engine, where it
    is the default if there are many parameters.

    A trajectory is solved again, keeping its dense output, and the adjoint ODE is solved back along
    it with the same method and tolerances. The gradient is accurate to the tolerances, but not
    exact, and stable where the forward solve is stable. Reverse mode only.

    Source: Ma et al., "A comparison of automatic differentiation and continuous sensitivity
    analysis for derivatives of differential equation solutions", IEEE HPEC 2021.
    """


class RecursiveCheckpointAdjoint(SensitivityAlgorithm):
    """Reverse mode through the steps taken, with recursive checkpointing. The diffrax engine uses
    it in reverse mode by default, and then has the other mode and derivatives of any order, too.

    The derivatives of the numerical solution are exact. Reverse mode only.

    - `checkpoints`: the number of states that are kept; by default about `sqrt(2 maxiters)`. Fewer
        need less memory and more recomputation.

    Source: Stumm and Walther, "New algorithms for optimal online checkpointing", SIAM J. Sci.
    Comput. 32 (2010).
    """

    checkpoints: int | None = None


class DirectAdjoint(SensitivityAlgorithm):
    """Differentiates the operations of the solve directly, in forward or reverse mode.

    In reverse mode, the memory is proportional to `maxiters`, so set a tight limit.
    """


class BacksolveAdjoint(SensitivityAlgorithm):
    """The continuous adjoint: a second ODE solved backwards in time.

    The memory is constant. The gradient is accurate to the tolerances, but not exact, and the
    backward solve may be unstable for dissipative problems. Reverse mode only, with `saveat` or the
    ends (not `save_everystep`).

    Source: Chen et al., "Neural ordinary differential equations", NeurIPS 2018, appendix B.
    """


class ForwardDiffSensitivity(SensitivityAlgorithm):
    """Forward mode through the steps taken: `jax.jvp`, `jax.jacfwd`.

    Best where there are few parameters and many outputs. Forward mode only.
    """


_BY_DEFAULT = (
    "Without sensealg, the compiled and diffrax engines have derivatives of any order (diffrax not "
    "with effects in f, nor with save_everystep by methods whose steps it can't make again)."
)
_REVERSE_ONLY = (
    "this solve is differentiated in forward mode (jvp, jacfwd, hessian), but sensealg={} is for "
    "reverse mode only. Pass sensealg=ForwardDiffSensitivity() for forward mode (twice, as "
    "jacfwd(jacfwd(...)), for a Hessian), or sensealg=DirectAdjoint() for both. " + _BY_DEFAULT
)
# The choices that have forward mode.
_HAVE_FORWARD = ("ReplayAdjoint", "DirectAdjoint", "ForwardDiffSensitivity")
_RULES = (
    "this solve needs derivatives in forward mode, of functions that call a jax.custom_vjp "
    "function, which has none: f, an integrand, a condition or an affect. Write that function with "
    "jax.custom_jvp, which has both modes. (Gradients by the parameters and the initial state need "
    "reverse mode only; second derivatives, and derivatives with respect to times, need both.)"
)
_FORWARD_ONLY = (
    "this solve is differentiated in reverse mode (grad, jacrev), but "
    "sensealg=ForwardDiffSensitivity() is for forward mode only. Leave sensealg out for reverse "
    "mode, or pass sensealg=DirectAdjoint() for both."
)


_ONCE = (
    "this solve is differentiated twice, but sensealg={} is for first derivatives, in reverse mode "
    "only. Pass sensealg=DirectAdjoint() (of the diffrax engine), or "
    "sensealg=ForwardDiffSensitivity() for forward mode twice, as jacfwd(jacfwd(...)). "
    + _BY_DEFAULT
)


def reverse_only(tree: PyTree, name: str) -> PyTree:
    """The identity; raises `TypeError` when it is differentiated in forward mode, or twice."""
    errors = {"forward_error": _REVERSE_ONLY.format(name), "second_error": _ONCE.format(name)}
    return _mark(tree, **errors, reverse_error=None)


@contextlib.contextmanager
def explained(
    sensealg: SensitivityAlgorithm | None, adjoint: str, *, closes: bool = False
) -> Iterator[None]:
    """Within this block, JAX's error of forward mode through a `jax.custom_vjp` gets a remedy: that
    is a reverse-only adjoint where JAX notices it before `reverse_only` does, or a function of the
    user's. `adjoint` is the name of the adjoint that is used, also if `sensealg` is None; `closes`
    says whether there are derivatives of any order if it is."""
    try:
        yield
    except TypeError as e:
        if "forward-mode autodiff (jvp) to a custom_vjp" not in str(e):
            raise
        if adjoint in _HAVE_FORWARD or (closes and sensealg is None):
            raise TypeError(_RULES) from e
        raise TypeError(_REVERSE_ONLY.format(label(sensealg))) from e


def label(sensealg: SensitivityAlgorithm | None) -> str:
    """The name of the sensealg in error messages."""
    return "None, the default," if sensealg is None else type(sensealg).__name__ + "()"


def forward_only(tree: PyTree) -> PyTree:
    """The identity; raises `TypeError` when it is differentiated in reverse mode."""
    return _mark(tree, forward_error=None, second_error=None, reverse_error=_FORWARD_ONLY)


def with_zeros(like: Any, cotangents: PyTree) -> PyTree:
    """The cotangents of a named tuple of arrays, with zeros where Equinox has None."""
    cotangents = type(like)(*cotangents)
    return jax.tree.map(lambda x, ct: jnp.zeros_like(x) if ct is None else ct, like, cotangents)


def _mark(tree: PyTree, **errors: str | None) -> PyTree:
    @jax.custom_jvp
    def identity(x):
        return x

    @identity.defjvp
    def _(primals, tangents):
        (x,), (t,) = primals, tangents
        second = errors["second_error"]
        # Marked again, for a derivative of the derivative.
        again = identity(x) if second is None else constant(x, second)
        return again, _tangent_p.bind(x, t, **errors)

    def mark(x):
        return identity(x) if eqx.is_inexact_array(x) else x

    return jax.tree.map(mark, tree)


def constant(x: Array, error: str) -> Array | None:
    """The identity; raises `TypeError` when it is differentiated."""

    @jax.custom_jvp
    def identity(x):
        return x

    @identity.defjvp
    def _(primals, tangents):
        raise TypeError(error)

    return identity(x)


# The identity on the tangent t of x. In forward mode it is evaluated or lowered; in reverse mode it
# is only transposed. That distinguishes the two modes, even if jit is in between.
_tangent_p = jex.Primitive("ensembleode_tangent")


def _evaluate(x, t, *, forward_error, **_):
    if forward_error is not None:
        raise TypeError(forward_error)
    return t


def _jvp(primals, tangents, **params):
    (x, t), (_, dt) = primals, tangents
    _evaluate(x, t, **params)  # this is forward mode
    dt = ad.instantiate_zeros(dt)
    return _tangent_p.bind(x, t, **params), _tangent_p.bind(x, dt, **params)


def _transpose(ct, x, t, *, second_error, reverse_error, **_):
    if reverse_error is not None:
        raise TypeError(reverse_error)
    # The gradient can depend on the variables of differentiation only through ct.
    if second_error is not None and not isinstance(ct, ad.Zero):
        ct = constant(ct, second_error)
    return [None, ct]


def _batch(args, dims, **params):
    (x, t), (x_dim, t_dim) = args, dims
    if t_dim is None:
        return _tangent_p.bind(x, t, **params), t_dim
    if x_dim is None:
        _evaluate(x, t, **params)  # the columns of a Jacobian, in forward mode
        x = jnp.broadcast_to(jnp.expand_dims(x, t_dim), t.shape)
    else:
        x = jnp.moveaxis(x, x_dim, t_dim)
    return _tangent_p.bind(x, t, **params), t_dim


_tangent_p.def_impl(_evaluate)
_tangent_p.def_abstract_eval(lambda x, t, **_: t)
ad.primitive_jvps[_tangent_p] = _jvp
ad.primitive_transposes[_tangent_p] = _transpose
batching.primitive_batchers[_tangent_p] = _batch
_lower: Callable = mlir.lower_fun(_evaluate, multiple_results=False)
mlir.register_lowering(_tangent_p, _lower)
