"""What a problem says of its vector field besides the field itself."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.tree_util as jtu
import numpy as np

from .aliases import refuse_unknown
from .tracing.program import is_tracer, Static


class ODEFunction(eqx.Module):
    """A vector field with what is known of it, in the place of the `f` of a problem.

    **Arguments:**

    - `f`: the vector field `f(u, p, t) -> du`, as [`ODEProblem`][ensembleode.ODEProblem] takes it.
    - `jac`: `jac(u, p, t) -> [n, n]`, the derivative of each component of `f` by each component of
        `u`, written in JAX, in the dtype of `u`. Rosenbrock methods use it in place of the Jacobian
        that JAX finds: of the steps that it makes, gradients of any order are exact, by the
        derivatives of `f` and of `jac`. (Where it is not the Jacobian, steps are as those of a
        Rosenbrock method with a wrong Jacobian: of a lower order, and shorter.) Zeros that are
        written in it, as numbers, are left out of the elimination.
    - `jac_prototype`: where the Jacobian may be other than zero, `[n, n]`: an array of booleans or
        numbers, or a sparse matrix of SciPy. Without it the structure of `f` (or of `jac`) says so.
        Where it has a zero, the Jacobian is taken to be zero.

    Components are counted in the order in which they lie in a state that is an array, and are
    written in one that is a pytree. Methods other than Rosenbrock's look at neither.

    **Raises:** `TypeError` for an `f` or a `jac` that can't be called, and for a `jac_prototype`
    that is traced or no matrix; `ValueError`, when it is solved, for a `jac` or a `jac_prototype`
    that is not `[n, n]`.

    >>> import ensembleode as eo
    >>> import jax.numpy as jnp
    >>> f = eo.ODEFunction(lambda u, p, t: -p * u, jac=lambda u, p, t: -p[None])
    >>> prob = eo.ODEProblem(f, [1.0], (0.0, 1.0), jnp.array([1e3]))
    >>> eo.solve(prob, eo.Rodas5P()).retcode.name
    'Success'
    """

    f: Callable
    jac: Callable | None
    jac_prototype: Static | None = eqx.field(static=True)

    def __init__(
        self,
        f: Callable,
        *,
        jac: Callable | None = None,
        jac_prototype: Any = None,
        **_unknown: Any,
    ):
        refuse_unknown("ODEFunction", _unknown, ("f", "jac", "jac_prototype"))
        if not callable(f) or isinstance(f, ODEFunction):
            raise TypeError(f"f must be a function f(u, p, t) -> du, got {f!r}.")
        if not (jac is None or callable(jac)):
            raise TypeError(f"jac must be a function jac(u, p, t) -> [n, n] or None, got {jac!r}.")
        self.f = f
        self.jac = jac
        self.jac_prototype = (
            None if jac_prototype is None else _known("jac_prototype", jac_prototype)
        )

    def __call__(self, u: Any, p: Any, t: Any) -> Any:
        """The vector field."""
        return self.f(u, p, t)


def prototype_of(f: ODEFunction, size: int) -> np.ndarray | None:
    """Where the Jacobian of a state of so many components may be other than zero, `[n, n]`; None
    where nobody has said so.

    **Raises:** `ValueError` for another size.
    """
    if f.jac_prototype is None:
        return None
    matrix = f.jac_prototype.value
    if matrix.shape != (size, size):
        raise ValueError(
            f"jac_prototype has the shape {matrix.shape}; it must be [n, n] with one row and one "
            f"column for each component of u0, {(size, size)}."
        )
    return matrix != 0


def _known(name: str, value: Any) -> Static:
    """Numbers that are known, as one array."""
    dense = next((getattr(value, x) for x in ("toarray", "todense") if hasattr(value, x)), None)
    value = value if dense is None else dense()
    if any(map(is_tracer, jtu.tree_leaves(value))):
        raise TypeError(
            f"{name} is traced: it decides what is compiled, so it must be made of known numbers, "
            "the same for all trajectories."
        )
    try:
        array = np.asarray(value)
    except ValueError:  # ragged
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{name} must be an array of real numbers, got {value!r}.")
    return Static(array)
