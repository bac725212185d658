"""A vector field together with what the user knows about it."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.tree_util as jtu
import numpy as np
from jax import Array
from jaxtyping import PyTree

from ..ground.state_tree import matrix_of_parts, StateTree
from ..solvers.mass_matrix import mass_matrix_of, MassMatrix
from ..tracing.program import is_tracer, Static
from .unknown_options import refuse_unknown


class ODEFunction(eqx.Module):
    """A vector field together with what is known about it, to be given as the `f` of a problem.

    **Arguments:**

    - `f`: the vector field `f(u, p, t)`, as for [`ODEProblem`][ensembleode.ODEProblem].
    - `mass_matrix`: the constant `M` of the equations `M du/dt = f(u, p, t)`, which is the same for
        all trajectories: a matrix `[n, n]` of known numbers; or its diagonal, in the shape of `u`
        (for a state that is a pytree, tuples among them, a pytree like it, of numbers or arrays).
        Rosenbrock methods solve with it, and the implicit methods of a `JuliaAlg`. It may be
        singular: a row of zeros is an algebraic equation, `0 = f_i`, and a column of zeros is a
        component that these equations determine (the index must be one). Then the start has to
        fulfil the algebraic equations to `abstol`: a trajectory whose start doesn't ends with
        `ReturnCode.InitialFailure`.
    - `jac`: the Jacobian `jac(u, p, t) -> [n, n]`, the derivative of each component of `f` with
        respect to each component of `u`, written in JAX, in the dtype of `u`. Rosenbrock methods
        use it in place of the Jacobian that JAX finds. Gradients of any order are exact for the
        steps taken, by the derivatives of `f` and of `jac`. If `jac` is not the Jacobian of `f`,
        the steps are those of a Rosenbrock method with a wrong Jacobian, of a lower order and
        shorter. Zeros that are written in `jac` as numbers are left out of the elimination. (For a
        complex state it is the complex derivative, so `f` has to have one.)
    - `jac_prototype`: the places where the Jacobian may be nonzero, `[n, n]`: an array of booleans
        or numbers, or a sparse matrix of SciPy. By default they are found from the structure of `f`
        (or of `jac`). In the places of its zeros, the Jacobian is taken to be zero.

    The components of a state that is an array are counted in row-major order, and those of a pytree
    in the order in which they are written. Other methods refuse a `mass_matrix`, and use neither
    `jac` nor `jac_prototype`. The Julia engine has no gradients with a `mass_matrix`.

    **Raises:** `TypeError` for an `f` or a `jac` that can't be called, and for a `mass_matrix` or a
    `jac_prototype` that is traced or has no real numbers; `ValueError`, when it is solved, for
    another shape, and for a `mass_matrix` that is singular otherwise than by rows and columns of
    zeros.

    Source of the rules of singular matrices: OrdinaryDiffEq; of the methods with them: Hairer and
    Wanner, "Solving Ordinary Differential Equations II" (1996), VI.3.

    >>> import ensembleode as eo
    >>> import jax.numpy as jnp
    >>> f = eo.ODEFunction(lambda u, p, t: -p * u, jac=lambda u, p, t: -p[None])
    >>> prob = eo.ODEProblem(f, [1.0], (0.0, 1.0), jnp.array([1e3]))
    >>> eo.solve(prob, eo.Rodas5P()).retcode.name
    'Success'
    """

    f: Callable
    mass_matrix: Static | None = eqx.field(static=True)
    jac: Callable | None
    jac_prototype: Static | None = eqx.field(static=True)

    def __init__(
        self,
        f: Callable,
        *,
        mass_matrix: Any = None,
        jac: Callable | None = None,
        jac_prototype: PyTree = None,
        **_unknown: Any,
    ):
        refuse_unknown("ODEFunction", _unknown, ("f", "mass_matrix", "jac", "jac_prototype"))
        if not callable(f) or isinstance(f, ODEFunction):
            raise TypeError(f"f must be a function f(u, p, t) -> du, got {f!r}.")
        if not (jac is None or callable(jac)):
            raise TypeError(f"jac must be a function jac(u, p, t) -> [n, n] or None, got {jac!r}.")
        self.f = f
        self.mass_matrix = None if mass_matrix is None else _known_mass(mass_matrix)
        self.jac = jac
        known = None if jac_prototype is None else _known_numbers("jac_prototype", jac_prototype)
        self.jac_prototype = known

    def __call__(self, u: PyTree, p: PyTree, t: Any) -> PyTree:
        """The vector field."""
        return self.f(u, p, t)


def with_mass_of(f: Callable, other: Callable) -> Callable:
    """A vector field with the mass matrix of another one."""
    mass = other.mass_matrix if isinstance(other, ODEFunction) else None
    return f if mass is None else ODEFunction(f, mass_matrix=mass.value)


def prototype_of(f: ODEFunction, size: int) -> np.ndarray | None:
    """The places where the Jacobian of a state with `size` components may be nonzero, `[n, n]`;
    None without a `jac_prototype`.

    **Raises:** `ValueError` for a prototype of another size.
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


def mass_of(f: ODEFunction, shape: tuple[int, ...], tree: StateTree | None) -> MassMatrix | None:
    """The mass matrix for a state of this shape, or for one that is a pytree to the user; None for
    the identity.

    **Raises:** `ValueError` for a mass matrix of another shape, and the errors of `mass_matrix_of`.
    """
    if f.mass_matrix is None:
        return None
    value = f.mass_matrix.value
    if tree is not None and tree.order is None:
        shape = tree.shapes[0]
    size = math.prod(shape) if tree is None else tree.components
    if isinstance(value, list | tuple) and not _is_like(value, tree):
        value = _known_numbers("mass_matrix", value).value
    if isinstance(value, np.ndarray):
        if value.shape == (size, size):
            return _in_order(value, tree)
        if value.shape == shape and (tree is None or tree.order is None):
            return _in_order(np.diag(value.ravel()), tree)
        if value.shape == (size,) and tree is not None and not any(tree.shapes):
            return _in_order(np.diag(value), tree)
    elif tree is not None and _is_like(value, tree):
        leaves = jtu.tree_leaves(value)
        if all(np.shape(x) in ((), s) for x, s in zip(leaves, tree.shapes, strict=True)):
            parts = [np.broadcast_to(x, s) for x, s in zip(leaves, tree.shapes, strict=True)]
            return _of_components(np.diag(np.concatenate([x.ravel() for x in parts])), tree)
    is_array = tree is None or tree.order is None
    like = f"of the shape {shape}" if is_array else "that is a pytree like u0"
    given = value.shape if isinstance(value, np.ndarray) else jtu.tree_map(np.shape, value)
    raise ValueError(
        f"mass_matrix has the shape {given}; it must be a matrix {(size, size)}, or a diagonal "
        f"{like}."
    )


def _in_order(matrix: np.ndarray, tree: StateTree | None) -> MassMatrix | None:
    """The mass matrix whose rows and columns are in the order in which the leaves of a state were
    written."""
    return _of_components(matrix if tree is None else in_order_of(matrix, tree.written()), tree)


def _of_components(matrix: np.ndarray, tree: StateTree | None) -> MassMatrix | None:
    """The mass matrix of the components."""
    is_complex = tree is not None and tree.is_complex
    return mass_matrix_of((matrix_of_parts(matrix) if is_complex else matrix).astype(float))


def singular_mass_of(
    f: Callable, shape: tuple[int, ...], tree: StateTree | None
) -> MassMatrix | None:
    """The mass matrix of a vector field with algebraic equations; None if it has none. For the
    arguments and errors see `mass_of`."""
    mass = mass_of(f, shape, tree) if isinstance(f, ODEFunction) else None
    return mass if mass is not None and mass.is_singular else None


def _is_like(value: PyTree, tree: StateTree | None) -> bool:
    return tree is not None and jtu.tree_structure(value) == tree.structure


def in_order_of(matrix: Array | np.ndarray, order: np.ndarray) -> Any:
    """The matrix, whose rows and columns belong to the components `order`, with both sorted by
    component."""
    place = np.argsort(order)
    return matrix[place][:, place]


def _known_mass(value: Any) -> Static:
    """The known numbers in a mass matrix, or in a pytree. Lists and tuples of numbers, also nested
    ones, are arrays."""
    leaves, structure = jtu.tree_flatten(value)
    is_list = isinstance(value, list | tuple) and not any(map(np.ndim, leaves))
    if is_list or jtu.treedef_is_leaf(structure):
        return _known_numbers("mass_matrix", value)
    return Static(
        jtu.tree_unflatten(structure, [_known_numbers("mass_matrix", x).value for x in leaves])
    )


def _known_numbers(name: str, value: Any) -> Static:
    """The known numbers in `value` as one array."""
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
