"""Explicit Runge-Kutta methods, for problems that are not stiff."""

from typing import ClassVar

from .base import ODESolver


class Euler(ODESolver):
    """Euler's method, order 1, fixed step (give `dt`)."""

    order: ClassVar[int] = 1
    adaptive: ClassVar[bool] = False
    stages: ClassVar[int | None] = 1


class Heun(ODESolver):
    """Heun's method, order 2, embedded Euler error estimate."""

    order: ClassVar[int] = 2
    stages: ClassVar[int | None] = 2


class Midpoint(ODESolver):
    """The explicit midpoint method, order 2, embedded Euler error estimate."""

    order: ClassVar[int] = 2
    stages: ClassVar[int | None] = 2


class Ralston(ODESolver):
    """Ralston's method, order 2, embedded Euler error estimate.

    Source: Ralston, "Runge-Kutta methods with minimum error bounds", Math. Comp. 16 (1962).
    """

    order: ClassVar[int] = 2
    stages: ClassVar[int | None] = 2


class Bosh3(ODESolver):
    """Bogacki-Shampine 3(2), for loose tolerances. SciML's `BS3`.

    Source: Bogacki and Shampine, "A 3(2) pair of Runge-Kutta formulas", Appl. Math. Lett. 2
    (1989).
    """

    order: ClassVar[int] = 3
    stages: ClassVar[int | None] = 4
    fsal: ClassVar[bool] = True


class Tsit5(ODESolver):
    """Tsitouras 5(4), the default, and a good choice for most non-stiff problems.

    Source: Tsitouras, "Runge-Kutta pairs of order 5(4) satisfying only the first column
    simplifying assumption", Comput. Math. Appl. 62 (2011).
    """

    order: ClassVar[int] = 5
    stages: ClassVar[int | None] = 7
    fsal: ClassVar[bool] = True


class Dopri5(ODESolver):
    """Dormand-Prince 5(4). SciML's `DP5`.

    Source: Dormand and Prince, "A family of embedded Runge-Kutta formulae", J. Comput. Appl.
    Math. 6 (1980).
    """

    order: ClassVar[int] = 5
    stages: ClassVar[int | None] = 7
    fsal: ClassVar[bool] = True


class Dopri8(ODESolver):
    """Prince-Dormand 8(7), for tight tolerances. (SciML's `DP8` is Hairer's 8(5,3).)

    Source: Prince and Dormand, "High order embedded Runge-Kutta formulae", J. Comput. Appl.
    Math. 7 (1981).
    """

    order: ClassVar[int] = 8
    stages: ClassVar[int | None] = 14
    fsal: ClassVar[bool] = True
