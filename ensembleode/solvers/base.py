"""What a solver says of itself."""

from typing import ClassVar

import equinox as eqx


class ODESolver(eqx.Module):
    """A method for ordinary differential equations, named as in SciML.

    - `order`: its order of convergence.
    - `adaptive`: whether it has an error estimate, and so can choose its steps.
    - `implicit`: whether each step solves equations (for stiff problems).
    - `stages`: evaluations of `f` in a step, `fsal` (first same as last) one less after the
        first; None where the count depends on the solution.
    - `engines`: the engines that can run it.
    """

    order: ClassVar[int]
    adaptive: ClassVar[bool] = True
    implicit: ClassVar[bool] = False
    stages: ClassVar[int | None] = None
    fsal: ClassVar[bool] = False
    engines: ClassVar[tuple[str, ...]] = ("diffrax",)
