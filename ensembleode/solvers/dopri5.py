"""Dormand and Prince's pair of orders 5 and 4."""

from typing import ClassVar

from .explicit_runge_kutta import ExplicitRungeKutta
from .tableau import Interpolant, Tableau


# fmt: off
_tableau = Tableau(
    c=(0, 1/5, 3/10, 4/5, 8/9, 1, 1),
    a=(
        (1/5,),
        (3/40,        9/40),
        (44/45,      -56/15,       32/9),
        (19372/6561, -25360/2187,  64448/6561, -212/729),
        (9017/3168,  -355/33,      46732/5247,  49/176, -5103/18656),
        (35/384,      0,           500/1113,    125/192, -2187/6784, 11/84),
    ),
    b=(35/384, 0, 500/1113, 125/192, -2187/6784, 11/84, 0),
    order=5,
    error=(71/57600, 0, -71/16695, 71/1920, -17253/339200, 22/525, -1/40),
    embedded_order=4,
    interpolant=Interpolant(
        (
            (1, -8048581381/2820520608,   8663915743/2820520608,     -12715105075/11282082432),
            (0,  0,                       0,                          0),
            (0,  131558114200/32700410799, -68118460800/10900136933,  87487479700/32700410799),
            (0, -1754552775/470086768,    14199869525/1410260304,    -10690763975/1880347072),
            (0,  127303824393/49829197408, -318862633887/49829197408, 701980252875/199316789632),
            (0, -282668133/205662961,     2019193451/616988883,      -1453857185/822651844),
            (0,  40617522/29380423,      -110615467/29380423,         69997945/29380423),
        ),
        order=4,
    ),
)
# fmt: on


class Dopri5(ExplicitRungeKutta):
    """Dormand-Prince 5(4). SciML's `DP5`.

    Sources: Dormand and Prince, "A family of embedded Runge-Kutta formulae", J. Comput. Appl.
    Math. 6 (1980); its interpolant, order 4, from Shampine, "Some practical Runge-Kutta formulas",
    Math. Comp. 46 (1986), with the coefficients in Hairer, Norsett and Wanner, "Solving Ordinary
    Differential Equations I", II.6.
    """

    tableau: ClassVar[Tableau] = _tableau
    references: ClassVar[tuple[str, ...]] = ("dormand1980", "shampine1986")
