"""The base classes of solvers, with the properties that each of them declares."""

from typing import ClassVar

import equinox as eqx

from .rosenbrock import ModifiedRosenbrock, Rodas
from .runge_kutta import RungeKutta
from .tableau import Tableau


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


class ExplicitRungeKutta(ODESolver):
    """An explicit Runge-Kutta method. A subclass gives its tableau, and everything else follows
    from it.

    - `tableau`: its coefficients; `method`: the method as engines use it.
    """

    tableau: ClassVar[Tableau]
    engines: ClassVar[tuple[str, ...]] = ("compiled", "diffrax", "julia")

    @property
    def method(self) -> RungeKutta:
        return RungeKutta(self.tableau)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if not isinstance(getattr(cls, "tableau", None), Tableau):
            return  # each of its objects has a tableau of its own
        cls.order = cls.tableau.order
        cls.adaptive = cls.tableau.error is not None
        cls.stages = cls.tableau.stages
        cls.fsal = cls.tableau.fsal


class Rosenbrock(ODESolver):
    """A Rosenbrock method. A subclass gives its `method`, as engines use it.

    Each step factorises `1 - gamma h J` once, with the Jacobian `J` that is derived from `f`, and
    solves one system with that matrix for each stage.
    """

    method: ClassVar[Rodas | ModifiedRosenbrock]
    implicit: ClassVar[bool] = True
    engines: ClassVar[tuple[str, ...]] = ("compiled", "julia")

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.order, cls.stages = cls.method.order, cls.method.stages
