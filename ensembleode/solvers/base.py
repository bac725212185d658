"""What a solver says of itself."""

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
    - `stages`: evaluations of `f` in a step, `fsal` (first same as last) one less after the
      first; None where the count depends on the solution.
    - `engines`: the engines that can run it.
    - `references`: what to cite for it, keys of `tools/references.bib`.
    """

    order: ClassVar[int]
    adaptive: ClassVar[bool] = True
    implicit: ClassVar[bool] = False
    stages: ClassVar[int | None] = None
    fsal: ClassVar[bool] = False
    engines: ClassVar[tuple[str, ...]] = ("diffrax", "julia")
    references: ClassVar[tuple[str, ...]] = ()


class ExplicitRungeKutta(ODESolver):
    """An explicit Runge-Kutta method: a subclass gives its tableau, and all else follows.

    - `tableau`: its coefficients; `method`: what engines make of it.
    """

    tableau: ClassVar[Tableau]
    engines: ClassVar[tuple[str, ...]] = ("compiled", "lanes", "diffrax", "julia")

    @property
    def method(self) -> RungeKutta:
        return RungeKutta(self.tableau)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if not isinstance(getattr(cls, "tableau", None), Tableau):
            return  # (each of its objects has one)
        cls.order = cls.tableau.order
        cls.adaptive = cls.tableau.error is not None
        cls.stages = cls.tableau.stages
        cls.fsal = cls.tableau.fsal


class Rosenbrock(ODESolver):
    """A Rosenbrock method: a subclass gives what engines make of it, its `method`.

    Each step factorises `1 - gamma h J` once, with the Jacobian `J` of `f` that is derived from it,
    and solves as many systems with that as it has stages.
    """

    method: ClassVar[Rodas | ModifiedRosenbrock]
    implicit: ClassVar[bool] = True
    engines: ClassVar[tuple[str, ...]] = ("compiled", "julia")

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.order, cls.stages = cls.method.order, cls.method.stages
