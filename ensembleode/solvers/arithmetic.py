"""The operations over which the formulas of solvers are written: on JAX arrays, or on values of
generated code."""

import functools
import operator
from typing import Any, Protocol, runtime_checkable, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


# What formulas compute with: numbers of JAX or NumPy, or values of generated code, which have their
# operators in common, but no type. A number may be an array with one for each trajectory.
Number: TypeAlias = Any
# A number that is true or false.
Mask: TypeAlias = Any
# A state, as a tuple of numbers.
Components: TypeAlias = tuple[Number, ...]


@runtime_checkable
class Arithmetic(Protocol):
    """The operations besides `+ - * / & | ~ << >> < <= > >=`, which numbers have as operators.

    Each acts element by element; Python numbers take the dtype of the other operands.
    """

    def where(self, mask: Mask, x: Number, y: Number, /) -> Number: ...

    def minimum(self, x: Number, y: Number, /) -> Number: ...

    def maximum(self, x: Number, y: Number, /) -> Number: ...

    def abs(self, x: Number, /) -> Number: ...

    def sign(self, x: Number, /) -> Number: ...

    def floor(self, x: Number, /) -> Number: ...

    def sqrt(self, x: Number, /) -> Number: ...

    def equal(self, x: Number, y: Number, /) -> Mask: ...

    def cast(self, x: Number, dtype: DTypeLike, /) -> Number:
        """The number converted to another dtype."""

    def bitcast(self, x: Number, dtype: DTypeLike, /) -> Number:
        """The bits of the number as another dtype of the same size."""

    def stopped(self, x: Number, /) -> Number:
        """The number itself, regarded as a constant by derivatives."""

    def broadcast_over(self, number: Number, component: Number, /) -> Number:
        """One number for each trajectory, in a shape that combines with a component of the
        state."""

    def once(self, x: Number, /) -> Number:
        """The number itself, computed only once instead of for every use."""

    def mean(self, components: Components, /) -> Number:
        """The mean of all components of a state, one number for each trajectory; NaN where one of
        them is NaN."""

    def total(self, components: Components, /) -> Number:
        """The sum of all components, like `mean`."""

    def largest(self, components: Components, /) -> Number:
        """The largest of all components, like `mean`."""


class PlainArithmetic:
    """The operations for the case that a component is one number for each trajectory, which is
    computed only once anyway and isn't differentiated."""

    def stopped(self, x: Number) -> Number:
        return x

    def broadcast_over(self, number: Number, component: Number) -> Number:
        return number

    def once(self, x: Number) -> Number:
        return x

    def mean(self, components: Components) -> Number:
        return self.total(components) * (1.0 / len(components))

    def total(self, components: Components) -> Number:
        return functools.reduce(operator.add, components)


class ArrayArithmetic(PlainArithmetic):
    """Arrays of NumPy, or of a module like it, with one number for each trajectory."""

    def __init__(self, module: Any):
        self.where, self.minimum, self.maximum = module.where, module.minimum, module.maximum
        self.abs, self.sign, self.floor = module.abs, module.sign, module.floor
        self.sqrt, self.equal = module.sqrt, module.equal

    def cast(self, x: Number, dtype: DTypeLike) -> Number:
        return x.astype(dtype)

    def bitcast(self, x: Number, dtype: DTypeLike) -> Number:
        return x.view(dtype)

    def largest(self, components: Components) -> Number:
        return functools.reduce(self.maximum, components)


class JaxArithmetic(ArrayArithmetic):
    """JAX arrays, which are differentiated."""

    def __init__(self):
        super().__init__(jnp)

    def bitcast(self, x: Number, dtype: DTypeLike) -> Number:
        return jax.lax.bitcast_convert_type(x, dtype)

    def stopped(self, x: Number) -> Number:
        return jax.lax.stop_gradient(x)


class StateArithmetic(JaxArithmetic):
    """JAX arrays for one trajectory: a state is a tuple of arrays, and its numbers are arrays of
    shape `[]`."""

    def mean(self, components: Components) -> Number:
        return self.total(components) / sum(x.size for x in components)

    def total(self, components: Components) -> Number:
        return super().total(tuple(map(jnp.sum, components)))

    def largest(self, components: Components) -> Number:
        return super().largest(tuple(map(jnp.max, components)))


NUMBERS: Arithmetic = ArrayArithmetic(np)
ARRAYS: Any = StateArithmetic()
