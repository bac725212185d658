"""Any explicit Runge-Kutta method, from a tableau of the user's. (Those of the library are files of
their own: see `explicit_runge_kutta.py`.)"""

from typing import ClassVar

import equinox as eqx

from .explicit_runge_kutta import ExplicitRungeKutta
from .order_conditions import missed
from .tableau import Tableau


class ExplicitRK(ExplicitRungeKutta):
    """An explicit Runge-Kutta method of your own; OrdinaryDiffEq's `ExplicitRK`.

    It runs like the methods of this library, with gradients and dense output.

    **Arguments:** `tableau`: an [`eo.Tableau`][ensembleode.Tableau]. The method is adaptive if the
    tableau has an `error`.

    **Raises:** `TypeError` for anything else; `ValueError` where the coefficients don't have the
    orders that the tableau claims.

    >>> import ensembleode as eo
    >>> heun3 = eo.Tableau(c=(0, 1/3, 2/3), a=((1/3,), (0, 2/3)), b=(1/4, 0, 3/4), order=3)
    >>> prob = eo.ODEProblem(lambda u, p, t: -u, [1.0], (0.0, 1.0))
    >>> sol = eo.solve(prob, eo.ExplicitRK(heun3), dt=0.01)
    >>> round(float(sol.u[-1, 0]), 6)
    0.367879
    """

    engines: ClassVar[tuple[str, ...]] = ("compiled", "diffrax")

    tableau: Tableau = eqx.field(static=True)  # pyright: ignore[reportIncompatibleVariableOverride]

    def __check_init__(self):
        if not isinstance(self.tableau, Tableau):
            raise TypeError(f"ExplicitRK takes an eo.Tableau, got {self.tableau!r}.")
        if miss := missed(self.tableau):
            raise ValueError(
                f"the tableau is not what it claims to be: {miss}. Check the coefficients (write "
                "them as fractions, or with all digits), or claim a lower order."
            )

    @property
    def order(self) -> int:  # pyright: ignore
        return self.tableau.order

    @property
    def adaptive(self) -> bool:  # pyright: ignore
        return self.tableau.error is not None

    @property
    def stages(self) -> int:  # pyright: ignore
        return self.tableau.stages

    @property
    def fsal(self) -> bool:  # pyright: ignore
        return self.tableau.fsal
