"""What the formulas of solvers are written over: JAX arrays, or values of generated code."""

import functools
import operator
from typing import Any, Protocol, runtime_checkable, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np


# A state, as a tuple of numbers.
Components: TypeAlias = tuple[Any, ...]


@runtime_checkable
class Arithmetic(Protocol):
    """The operations besides `+ - * / & | ~ << >> < <= > >=`, which numbers have themselves.

    Each acts element by element; Python numbers take the dtype of the other operands.
    """

    def where(self, mask: Any, x: Any, y: Any, /) -> Any: ...

    def minimum(self, x: Any, y: Any, /) -> Any: ...

    def maximum(self, x: Any, y: Any, /) -> Any: ...

    def abs(self, x: Any, /) -> Any: ...

    def sign(self, x: Any, /) -> Any: ...

    def floor(self, x: Any, /) -> Any: ...

    def sqrt(self, x: Any, /) -> Any: ...

    def equal(self, x: Any, y: Any, /) -> Any: ...

    def cast(self, x: Any, dtype: Any, /) -> Any:
        """As another dtype."""
        ...

    def bitcast(self, x: Any, dtype: Any, /) -> Any:
        """The bits as another dtype of the same size."""
        ...

    def stopped(self, x: Any, /) -> Any:
        """The number itself, as a constant to derivatives."""
        ...

    def over(self, number: Any, component: Any, /) -> Any:
        """A number a trajectory, to be combined with a component of the state."""
        ...

    def once(self, x: Any, /) -> Any:
        """The number itself, computed once and not again for every use."""
        ...

    def mean(self, components: Components, /) -> Any:
        """The mean of all components of a state, one number a trajectory; NaN where one of them
        is."""
        ...

    def total(self, components: Components, /) -> Any:
        """The sum over all components, likewise."""
        ...

    def largest(self, components: Components, /) -> Any:
        """The largest of all components, likewise."""
        ...


class PlainArithmetic:
    """What is the same wherever a component is a number a trajectory, which nobody differentiates
    and which is computed once anyway."""

    def stopped(self, x: Any) -> Any:
        return x

    def over(self, number: Any, component: Any) -> Any:
        del component
        return number

    def once(self, x: Any) -> Any:
        return x

    def mean(self, components: Components) -> Any:
        return self.total(components) * (1.0 / len(components))

    def total(self, components: Components) -> Any:
        return functools.reduce(operator.add, components)


class ArrayArithmetic(PlainArithmetic):
    """The arrays of a module, NumPy or one like it: numbers of a trajectory each."""

    def __init__(self, module: Any):
        self.where, self.minimum, self.maximum = module.where, module.minimum, module.maximum
        self.abs, self.sign, self.floor = module.abs, module.sign, module.floor
        self.sqrt, self.equal = module.sqrt, module.equal

    def cast(self, x: Any, dtype: Any) -> Any:
        return x.astype(dtype)

    def bitcast(self, x: Any, dtype: Any) -> Any:
        return x.view(dtype)

    def largest(self, components: Components) -> Any:
        return functools.reduce(self.maximum, components)


class JaxArithmetic(ArrayArithmetic):
    """JAX's arrays, which are differentiated."""

    def __init__(self):
        super().__init__(jnp)

    def bitcast(self, x: Any, dtype: Any) -> Any:
        return jax.lax.bitcast_convert_type(x, dtype)

    def stopped(self, x: Any) -> Any:
        return jax.lax.stop_gradient(x)


NUMBERS: Arithmetic = ArrayArithmetic(np)
