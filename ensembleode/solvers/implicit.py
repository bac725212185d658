"""Implicit methods, for stiff problems. Each step solves equations with the Jacobian of `f`."""

from typing import ClassVar

from .base import ODESolver


class ImplicitEuler(ODESolver):
    """Implicit Euler, order 1, L-stable."""

    order: ClassVar[int] = 1
    implicit: ClassVar[bool] = True
    references: ClassVar[tuple[str, ...]] = ("hairer1996",)


class Kvaerno3(ODESolver):
    """Kvaerno 3(2), an L-stable, stiffly accurate ESDIRK method.

    Source: Kvaerno, "Singly diagonally implicit Runge-Kutta methods with an explicit first
    stage", BIT 44 (2004).
    """

    order: ClassVar[int] = 3
    implicit: ClassVar[bool] = True
    references: ClassVar[tuple[str, ...]] = ("kvaerno2004",)


class Kvaerno4(ODESolver):
    """Kvaerno 4(3), an L-stable, stiffly accurate ESDIRK method. Source: see `Kvaerno3`."""

    order: ClassVar[int] = 4
    implicit: ClassVar[bool] = True
    references: ClassVar[tuple[str, ...]] = ("kvaerno2004",)


class Kvaerno5(ODESolver):
    """Kvaerno 5(4), an L-stable, stiffly accurate ESDIRK method. Source: see `Kvaerno3`."""

    order: ClassVar[int] = 5
    implicit: ClassVar[bool] = True
    references: ClassVar[tuple[str, ...]] = ("kvaerno2004",)


class KenCarp3(ODESolver):
    """Kennedy-Carpenter 3(2), an L-stable, stiffly accurate ESDIRK method.

    All of `f` is treated implicitly, as SciML does for a problem that is not split.
    Source: Kennedy and Carpenter, "Additive Runge-Kutta schemes for
    convection-diffusion-reaction equations", Appl. Numer. Math. 44 (2003).
    """

    order: ClassVar[int] = 3
    implicit: ClassVar[bool] = True
    references: ClassVar[tuple[str, ...]] = ("kennedy2003",)


class KenCarp4(ODESolver):
    """Kennedy-Carpenter 4(3). Implicit in all of `f`; source: see `KenCarp3`."""

    order: ClassVar[int] = 4
    implicit: ClassVar[bool] = True
    references: ClassVar[tuple[str, ...]] = ("kennedy2003",)


class KenCarp5(ODESolver):
    """Kennedy-Carpenter 5(4). Implicit in all of `f`; source: see `KenCarp3`."""

    order: ClassVar[int] = 5
    implicit: ClassVar[bool] = True
    references: ClassVar[tuple[str, ...]] = ("kennedy2003",)
