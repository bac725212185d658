"""The base class of solvers, with the properties that each of them declares."""

from typing import ClassVar

import equinox as eqx


class ODESolver(eqx.Module):
    """A method for ordinary differential equations, named as in SciML.

    - `order`: its order of convergence.
    - `adaptive`: whether it has an error estimate, and so can choose its steps.
    - `implicit`: whether each step solves equations (for stiff problems).
    - `stages`: the evaluations of `f` in a step; None where the number depends on the solution.
    - `fsal`: first same as last: steps after the first take one evaluation less.
    - `engines`: the engines that can run it.
    - `references`: what to cite for it, as keys of `tools/references.bib`.
    """

    order: ClassVar[int]
    adaptive: ClassVar[bool] = True
    implicit: ClassVar[bool] = False
    stages: ClassVar[int | None] = None
    fsal: ClassVar[bool] = False
    engines: ClassVar[tuple[str, ...]] = ("diffrax", "julia")
    references: ClassVar[tuple[str, ...]] = ()
