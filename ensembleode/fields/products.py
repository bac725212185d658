"""Products of arrays: whether they are large, and which components of the operands they
multiply."""

import math
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from . import tuning


def is_large(eqn: Any) -> bool:
    """Whether a product should stay a matrix product instead of loops."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    inner = math.prod(eqn.invars[0].aval.shape[a] for a in contracted)
    return math.prod(eqn.outvars[0].aval.shape) * inner >= tuning.LEAST_PRODUCT


def layouts(eqn: JaxprEqn, *shapes: tuple) -> list[np.ndarray]:
    """The numbers of the components of both operands, each as an array
    `[batch, free, contracted]`."""
    contracted, batch = eqn.params["dimension_numbers"]
    layouts = []
    for shape, c, b in zip(shapes, contracted, batch, strict=True):
        free = [i for i in range(len(shape)) if i not in c and i not in b]
        numbers = np.arange(math.prod(shape)).reshape(shape).transpose([*b, *free, *c])
        sizes = [math.prod(shape[i] for i in axes) for axes in (b, free, c)]
        layouts.append(numbers.reshape(sizes))
    return layouts
