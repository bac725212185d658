"""States that are pytrees or complex to the user, and real vectors inside of the library; and the
arrays that lists of numbers stand for, in states and in parameters.

A state is an array, or a pytree of arrays of one dtype (a dict, a tuple, an Equinox module). Lists
and tuples that consist only of numbers are arrays. Engines see only real arrays: the flattened
leaves of a pytree, one after the other; of complex numbers, all real parts and then all imaginary
parts.
"""

import collections
import itertools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PyTree

from ..tracing.program import is_tracer
from .keys import is_key


class StateTree(NamedTuple):
    """The structure of a state that is a pytree, or complex.

    - `structure`: the pytree's structure; `shapes`: the shapes of its leaves, in JAX's order.
    - `dtype`: the dtype of all leaves.
    - `order`: the names of its leaves in the order in which they were written (see
        `written_order`); None for an array.
    """

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype
    order: tuple[str, ...] | None

    @property
    def is_complex(self) -> bool:
        return np.issubdtype(self.dtype, np.complexfloating)

    @property
    def components(self) -> int:
        """The number of components, each a real or a complex number."""
        return sum(map(math.prod, self.shapes))

    @property
    def size(self) -> int:
        """The length of the vector."""
        return self.components * (2 if self.is_complex else 1)

    def ravel(self, u: PyTree) -> Array:
        """The vector of a state."""
        return real_vector(jnp.concatenate([jnp.reshape(x, -1) for x in jtu.tree_leaves(u)]))

    def unravel(self, x: Array) -> Any:
        """The state from a vector, or from several: `[..., number]` becomes leaves
        `[..., *shape]`."""
        if not self.is_complex:
            return self.leaves_of(x)
        n = self.components
        if isinstance(x, np.ndarray):
            both = np.empty((*x.shape[:-1], n), self.dtype)
            both.real, both.imag = x[..., :n], x[..., n:]
            return self.leaves_of(both)
        return self.leaves_of(jax.lax.complex(x[..., :n], x[..., n:]))

    def leaves_of(self, x: Array | np.ndarray) -> Any:
        """The state from its components `[..., component]`."""
        lead = x.shape[:-1]
        ends = list(itertools.accumulate(map(math.prod, self.shapes)))
        parts = zip([0, *ends[:-1]], ends, self.shapes, strict=True)
        leaves = [x[..., a:b].reshape((*lead, *shape)) for a, b, shape in parts]
        return jtu.tree_unflatten(self.structure, leaves)

    def written(self) -> np.ndarray:
        """For each component of the state, in the order in which the leaves were written, its
        place among the components."""
        return flattened(self.leaves_of(np.arange(self.components)), 0, self.order).reshape(-1)

    def places_of(self, components: Sequence[int]) -> tuple[int, ...]:
        """The places of these components in the vector: of their real parts, and then, where they
        are complex, of their imaginary parts."""
        imaginary = [self.components + i for i in components] if self.is_complex else []
        return (*components, *imaginary)

    def derivative(self, du: Any) -> Array | None:
        """The return value of `f` as a vector.

        **Raises:** `TypeError` or `ValueError` where its structure isn't that of the state.
        """
        structure = jtu.tree_structure(du)
        if structure != self.structure:
            raise TypeError(
                "f must return a pytree of the structure of the state u, "
                f"{self.structure}; it returned {structure}."
            )
        for (path, x), shape in zip(jtu.tree_leaves_with_path(du), self.shapes, strict=True):
            name = jtu.keystr(path)
            if np.shape(x) != shape:
                raise ValueError(
                    f"f must return arrays of the shapes of the state u: du{name} has the shape "
                    f"{np.shape(x)}, and u{name} {shape}."
                )
            if jnp.result_type(x) != self.dtype:
                raise TypeError(
                    f"f must return the dtype of the state u, {self.dtype}; du{name} is "
                    f"{jnp.result_type(x)}. Give u0 that dtype, or cast inside f."
                )
        return self.ravel(du)

    def tolerance(self, name: str, value: PyTree) -> Any:
        """A tolerance as a vector, if it was given as a pytree like the state, with a number or an
        array for each leaf. Any other tolerance is returned as it is.

        **Raises:** `ValueError` for a pytree that is not like the state.
        """
        leaves, structure = jtu.tree_flatten(value)
        is_list = isinstance(value, list) and _is_array(value)
        if self.order is None or jtu.treedef_is_leaf(structure) or is_list:
            if not self.is_complex or not np.ndim(value):
                return value
            shape = self.shapes[0] if self.order is None else (self.components,)
            check_tolerance_shape(name, value, shape)
            traced = any(map(is_tracer, leaves))
            return for_both_parts(jnp.asarray(value) if traced else np.asarray(value))
        try:
            if structure != self.structure:
                raise ValueError
            xp: ModuleType = jnp if any(map(is_tracer, leaves)) else np
            parts = [xp.broadcast_to(x, s) for x, s in zip(leaves, self.shapes, strict=True)]
        except ValueError:
            raise ValueError(
                f"{name} must be a number, or a pytree like u0 with numbers or arrays of the same "
                f"shapes, got {value!r}."
            ) from None
        flat = xp.concatenate([xp.reshape(x, -1) for x in parts])
        return for_both_parts(flat) if self.is_complex else flat


def check_tolerance_shape(name: str, value: PyTree, shape: tuple[int, ...]) -> None:
    """**Raises:** `ValueError` for a tolerance that is no number and not of the shape of `u0`."""
    if np.shape(value) not in ((), shape):
        raise ValueError(
            f"{name} has the shape {np.shape(value)}; it must be a number, or an array of the "
            f"shape of u0, {shape}."
        )


def as_state(u0: PyTree) -> PyTree:
    """An initial state as an array, or as a pytree of arrays.

    **Raises:** `TypeError` for an object that is neither, and for leaves that are no inexact
    numbers or have several dtypes; `ValueError` for a state without components.
    """
    leaves, structure = jtu.tree_flatten(u0, is_leaf=_is_array)
    if jtu.treedef_is_leaf(structure) or not leaves:
        return _as_array(u0, "u0")
    paths = jtu.tree_leaves_with_path(u0, is_leaf=_is_array)
    names = [f"u0{jtu.keystr(path)}" for path, _ in paths]
    arrays = [_as_array(x, name, may_be_empty=True) for x, name in zip(leaves, names, strict=True)]
    weak = [isinstance(x, float | complex) for x in leaves]
    dtypes = {a.dtype for a, is_weak in zip(arrays, weak, strict=True) if not is_weak}
    if len(dtypes) > 1:
        each = ", ".join(f"{n} {a.dtype}" for n, a in zip(names, arrays, strict=True))
        raise TypeError(f"all leaves of u0 must have one dtype, got {each}: use .astype.")
    if not sum(a.size for a in arrays):
        raise ValueError("u0 is empty: none of its leaves has an entry.")
    # Python numbers take the dtype of the arrays beside them.
    dtype = jnp.result_type(
        *dtypes, *(x for x, is_weak in zip(leaves, weak, strict=True) if is_weak)
    )
    return jtu.tree_unflatten(structure, [a.astype(dtype) for a in arrays])


def with_real_numbers(u0: PyTree) -> PyTree:
    """An array, or a state, whose whole numbers are real, where a leaf has no others."""

    def real(x: PyTree) -> ArrayLike:
        if isinstance(x, int) and not isinstance(x, bool):
            return float(x)
        x = jnp.asarray(x) if _is_array(x) else x
        is_whole = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.integer)
        return x.astype(float) if is_whole else x

    return jtu.tree_map(real, u0, is_leaf=_is_array)


def as_parameters(p: PyTree, dtype: DTypeLike) -> PyTree:
    """Parameters in which lists of nothing but numbers, at any depth, are arrays.

    Such an array has the dtype of the NumPy numbers, and arrays without axes, in the list. If there
    are none, a list of integers becomes an array of integers, and any other has the precision
    `dtype`, that of the state. Tuples, and lists with booleans or anything else in them, stay what
    they are.

    **Raises:** `TypeError` for NumPy arrays of objects, strings or dates.
    """

    def is_vector(x: Any) -> bool:
        return type(x) is list and _shape_of(x) is not None

    def array(x: Any) -> Any:
        if not is_vector(x):
            return x
        numbers = jtu.tree_leaves(x)
        typed = [y.dtype for y in numbers if hasattr(y, "dtype")]
        if not typed and all(isinstance(y, int) for y in numbers):
            return jnp.asarray(x)
        with jax.numpy_dtype_promotion("standard"):
            plain = [y for y in numbers if not hasattr(y, "dtype")]
            return jnp.asarray(x, jnp.result_type(*(typed or [dtype]), *plain))

    paths = jtu.tree_leaves_with_path(p, is_leaf=is_vector)
    for path, x in paths:
        _refuse_objects("p" + jtu.keystr(path), x)
    if not any(is_vector(x) for _, x in paths):
        return p
    return jtu.tree_map(array, p, is_leaf=is_vector)


def _refuse_objects(name: str, x: Any) -> None:
    if isinstance(x, np.ndarray) and x.dtype.kind in "OSUMm":
        raise TypeError(
            f"{name} is an array of the dtype {x.dtype}, which holds no numbers to compute with: "
            f"use {name}.astype(float), or give each string or object by itself."
        )


def _shape_of(x: Any) -> tuple[int, ...] | None:
    """The shape of a number, or of a list of numbers at any depth; None for anything else."""
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        return () if not x.ndim and jnp.issubdtype(x.dtype, jnp.number) else None
    if type(x) is not list:
        return () if isinstance(x, int | float | complex) and not isinstance(x, bool) else None
    shapes = set(map(_shape_of, x))
    shape = shapes.pop() if len(shapes) == 1 else None
    return None if shape is None else (len(x), *shape)


def is_tree(u: PyTree) -> bool:
    """Whether a state, or an array of states, is a pytree; false for an array and for None."""
    return u is not None and not jtu.treedef_is_leaf(jtu.tree_structure(u))


def tree_of(u0: PyTree, order: tuple[str, ...] | None = None) -> StateTree | None:
    """The structure of a state whose leaves were written in this order; None for a real array."""
    order = written_order(u0, order)
    if order is None and not jnp.iscomplexobj(u0):
        return None
    leaves, structure = jtu.tree_flatten(u0)
    shapes = tuple(x.shape for x in leaves)
    return StateTree(structure, shapes, np.dtype(leaves[0].dtype), order)


def real_vector(x: Array) -> Array:
    """The numbers of an array as a vector of real numbers: of complex ones, all real parts and then
    all imaginary parts."""
    flat = jnp.reshape(x, -1)
    return jnp.concatenate([flat.real, flat.imag]) if jnp.iscomplexobj(flat) else flat


def for_both_parts(values: Array | np.ndarray) -> Array | np.ndarray:
    """Real numbers, one for each complex number, as a vector of one for each part of these."""
    xp: ModuleType = np if isinstance(values, np.ndarray) else jnp
    return xp.concatenate([values.reshape(-1)] * 2)


def matrix_of_parts(matrix: Any) -> Any:
    """The matrix of a linear map of complex numbers as that of the map of all their real and then
    all their imaginary parts."""
    xp: ModuleType = np if isinstance(matrix, np.ndarray) else jnp
    real, imag = matrix.real, matrix.imag
    return xp.block([[real, -imag], [imag, real]])


def written_order(u0: PyTree, before: tuple[str, ...] | None = None) -> tuple[str, ...] | None:
    """The names of the leaves of a state that is a pytree, in the order in which they were written;
    None for an array. A state with the same names as `before` gets their order, since JAX sorts the
    keys of every dict that it makes.

    **Raises:** `ValueError` where several leaves have the same name.
    """
    if _is_array(u0) or not is_tree(u0):
        return None

    def unsorted(u: PyTree) -> PyTree:
        return jtu.tree_map(lambda x: _unsorted(x) if type(x) is dict else x, u, is_leaf=is_leaf)

    def _unsorted(x: dict) -> collections.OrderedDict:
        return collections.OrderedDict((key, unsorted(value)) for key, value in x.items())

    def is_leaf(x: Any) -> bool:
        return type(x) is dict or _is_array(x)

    paths = jtu.tree_leaves_with_path(unsorted(u0), is_leaf=_is_array)
    names = tuple(jtu.keystr(path, simple=True, separator=".") for path, _ in paths)
    if len(set(names)) < len(names):
        raise ValueError(f"u0 has leaves of the same name: {', '.join(names)}.")
    return before if before is not None and sorted(before) == sorted(names) else names


def flattened(u: PyTree, lead: int, order: Sequence[str] | None = None) -> PyTree:
    """States as one array. The components of a pytree are flattened, leaf by leaf in this order,
    after the first `lead` axes."""
    if not is_tree(u):
        return u
    leaves = [x for _, x in leaf_names(u, order)]
    # Arrays on disk are read here.
    arrays = [x if isinstance(x, jax.Array) else np.asarray(x) for x in leaves]
    xp = jnp if any(isinstance(x, jax.Array) for x in arrays) else np
    return xp.concatenate([x.reshape(*x.shape[:lead], -1) for x in arrays], axis=-1)


def component_names(
    u: PyTree, lead: int = 0, order: Sequence[str] | None = None
) -> tuple[str, ...] | None:
    """The names of the components of a state that is a pytree, in the order of `flattened`. A name
    is that of the leaf with the component's index in it. None for an array."""
    if not is_tree(u):
        return None
    return tuple(
        f"{name}[{','.join(map(str, index))}]" if index else name
        for name, x in leaf_names(u, order)
        for index in np.ndindex(x.shape[lead:])
    )


def array_names(shape: Sequence[int]) -> tuple[str, ...]:
    """The names of the components of a state that is an array of this shape."""
    if len(shape) == 1:
        return tuple(f"u{i}" for i in range(shape[0]))
    return tuple(f"u[{','.join(map(str, i))}]" if i else "u" for i in np.ndindex(*shape))


def components_of(name: str, names: Sequence[str]) -> list[int]:
    """The index of the component of this name; or, for the name of a leaf, the indices of all its
    components.

    **Raises:** `ValueError` for an unknown name.
    """
    found = [i for i, x in enumerate(names) if x == name or x.startswith(f"{name}[")]
    if not found:
        raise ValueError(f"no component has the name {name!r}; there are {', '.join(names)}.")
    return found


def refuse_tree(u0: PyTree, what: str) -> None:
    """**Raises:** `TypeError` for a state that is a pytree."""
    if is_tree(u0):
        raise TypeError(
            f"{what} takes states that are arrays, and this u0 is a pytree, a {type(u0).__name__}: "
            "write f on an array, such as jnp.concatenate of the parts."
        )


def leaf_names(u: PyTree, order: Sequence[str] | None = None) -> list[tuple[str, Any]]:
    """The leaves of a state that is a pytree, each with its name, in this order or in JAX's."""
    paths = jtu.tree_leaves_with_path(u)
    leaves = {jtu.keystr(path, simple=True, separator="."): x for path, x in paths}
    names = order if order is not None and set(order) == set(leaves) else leaves
    return [(name, leaves[name]) for name in names]


def _is_array(x: Any) -> bool:
    """Whether `x` is a list or a plain tuple of numbers, at any depth, which becomes an array. A
    number may be an array without axes; but a tuple of nothing but arrays is a pytree."""
    if type(x) not in (list, tuple):
        return False
    if type(x) is tuple and x and all(isinstance(y, jax.Array | np.ndarray) for y in x):
        return False
    return all(
        _is_array(y) if type(y) in (list, tuple) else jtu.all_leaves([y]) and not np.ndim(y)
        for y in x
    )


def _as_array(x: Any, name: str, *, may_be_empty: bool = False) -> Any:
    _refuse_objects(name, x)
    try:
        # A copy of a NumPy array: if an array is overwritten after it has been traced, JAX still
        # uses its old content as long as the trace lives.
        x = np.array(x) if isinstance(x, np.ndarray) else x
        array = x if isinstance(x, jax.Array) else jnp.asarray(x)
    except (TypeError, ValueError) as e:
        raise TypeError(
            f"{name} must be an array (or a number, or nested lists of numbers), or a pytree of "
            f"them such as a dict, got {x!r}."
        ) from e
    if is_key(array):
        raise TypeError(
            f"{name} is a PRNG key, and the state of an ODE is real or complex. Pass keys in p."
        )
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        raise TypeError(
            f"{name} has the integer dtype {array.dtype}; the state of an ODE is real or complex. "
            f"Write it with a decimal point (1.0, not 1), or use {name}.astype(float)."
        )
    if array.dtype == jnp.bfloat16:
        raise TypeError(
            f"{name} has the dtype bfloat16, too coarse for time; use {name}.astype('float32')."
        )
    if not array.size and not may_be_empty:
        raise ValueError(f"{name} is empty: its shape is {array.shape}.")
    return jax.lax.convert_element_type(array, array.dtype) if array.weak_type else array
