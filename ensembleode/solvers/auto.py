"""Methods that switch automatically between an explicit and a Rosenbrock method."""

import dataclasses
import math
import numbers
from typing import ClassVar

import equinox as eqx

from .base import ODESolver
from .explicit_runge_kutta import ExplicitRungeKutta
from .rosenbrock import Rosenbrock
from .switching import Switching, SwitchingRule
from .tsit5 import Tsit5
from .vern6 import Vern6
from .vern7 import Vern7
from .vern8 import Vern8
from .vern9 import Vern9


class AutoSwitch(ODESolver):
    """An explicit method that a Rosenbrock method replaces where the problem is stiff. Each
    trajectory switches for itself, in both directions. A subclass names its explicit method,
    `nonstiff`, and the `boundary` of that method's stability region.

    The options are those of `AutoTsit5`.
    """

    nonstiff: ClassVar[ExplicitRungeKutta]
    boundary: ClassVar[float]
    implicit: ClassVar[bool] = True
    engines: ClassVar[tuple[str, ...]] = ("compiled", "julia")

    stiff: Rosenbrock = eqx.field(static=True)
    maxstiffstep: int = eqx.field(static=True, default=10, kw_only=True)
    maxnonstiffstep: int = eqx.field(static=True, default=3, kw_only=True)
    nonstifftol: float = eqx.field(static=True, default=0.9, kw_only=True)
    stifftol: float = eqx.field(static=True, default=0.9, kw_only=True)
    dtfac: float = eqx.field(static=True, default=2.0, kw_only=True)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.order, cls.stages = cls.nonstiff.order, cls.nonstiff.stages
        cls.references = ("rackauckas2017", *cls.nonstiff.references)

    def __check_init__(self):
        name = type(self).__name__
        if not isinstance(self.stiff, Rosenbrock):
            raise TypeError(
                f"{name} takes the Rosenbrock method for where it is stiff, such as "
                f"{name}(eo.Rosenbrock23()), got {self.stiff!r}."
            )
        for option in ("maxstiffstep", "maxnonstiffstep"):
            value = getattr(self, option)
            if not isinstance(value, numbers.Integral) or isinstance(value, bool):
                raise TypeError(f"{option} of {name} must be an integer, got {value!r}.")
            if value < 0:
                raise ValueError(f"{option} of {name} must be 0 or more, got {value}.")
        for option in ("nonstifftol", "stifftol", "dtfac"):
            value = getattr(self, option)
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise TypeError(f"{option} of {name} must be a number, got {value!r}.")
            if not 0 < value < math.inf:
                raise ValueError(f"{option} of {name} must be positive and finite, got {value}.")

    @property
    def method(self) -> Switching:
        """The method that engines run."""
        options = (self.nonstifftol, self.stifftol, self.dtfac)
        rule = SwitchingRule(
            self.boundary, self.maxstiffstep, self.maxnonstiffstep, *map(float, options)
        )
        return Switching(self.nonstiff.method, self.stiff.method, rule)

    @property
    def changed(self) -> dict[str, int | float]:
        """The options that don't have their defaults."""
        fields = {x.name: x.default for x in dataclasses.fields(self) if x.name != "stiff"}
        return {x: getattr(self, x) for x in fields if getattr(self, x) != fields[x]}


class AutoTsit5(AutoSwitch):
    """`Tsit5` where the problem is not stiff, and the given Rosenbrock method where it is:
    `AutoTsit5(Rosenbrock23())`. It is for ensembles of which it isn't known whether, when or in
    which trajectories they are stiff. The steps are those of OrdinaryDiffEq.

    A step looks stiff if it is about as long as the longest step at which `Tsit5` is stable.

    **Arguments:**

    - `stiff`: the Rosenbrock method, `eo.Rosenbrock23()`, `eo.Rodas4()` or `eo.Rodas5P()`.
    - `maxstiffstep`: the Rosenbrock method takes over after more than this many attempts in a row
        that look stiff.
    - `maxnonstiffstep`: the explicit method takes over after more than this many attempts in a row
        that don't look stiff.
    - `nonstifftol`, `stifftol`: a step looks stiff from this fraction of the longest stable step
        on, while the explicit method and while the Rosenbrock method makes the steps, respectively.
    - `dtfac`: the step size is multiplied by this factor on a switch to the Rosenbrock method, and
        divided by it on a switch back.

    **Raises:** `TypeError` if `stiff` isn't a Rosenbrock method, or an option isn't a number;
    `ValueError` for a number out of its range.

    >>> import ensembleode as eo
    >>> prob = eo.ODEProblem(lambda u, p, t: -1e3 * u, [1.0], (0.0, 1.0))
    >>> sol = eo.solve(prob, eo.AutoTsit5(eo.Rosenbrock23()))
    >>> 0 < int(sol.stats.nw) < int(sol.stats.naccept)
    True

    Source: Rackauckas and Nie, "DifferentialEquations.jl", J. Open Res. Softw. 5 (2017), 15.
    """

    nonstiff: ClassVar[ExplicitRungeKutta] = Tsit5()
    boundary: ClassVar[float] = 3.5068


class AutoVern6(AutoSwitch):
    """`Vern6` where the problem is not stiff, and the given Rosenbrock method where it is; see
    `AutoTsit5`.

    **Arguments:** `stiff`, `maxstiffstep`, `maxnonstiffstep`, `nonstifftol`, `stifftol`, `dtfac`:
    as of [`AutoTsit5`][ensembleode.AutoTsit5].
    """

    nonstiff: ClassVar[ExplicitRungeKutta] = Vern6()
    boundary: ClassVar[float] = 4.8553


class AutoVern7(AutoSwitch):
    """`Vern7` where the problem is not stiff, and the given Rosenbrock method where it is, for
    tighter tolerances: `AutoVern7(Rodas5P())`; see `AutoTsit5`.

    **Arguments:** `stiff`, `maxstiffstep`, `maxnonstiffstep`, `nonstifftol`, `stifftol`, `dtfac`:
    as of [`AutoTsit5`][ensembleode.AutoTsit5].
    """

    nonstiff: ClassVar[ExplicitRungeKutta] = Vern7()
    boundary: ClassVar[float] = 4.64


class AutoVern8(AutoSwitch):
    """`Vern8` where the problem is not stiff, and the given Rosenbrock method where it is; see
    `AutoTsit5`.

    **Arguments:** `stiff`, `maxstiffstep`, `maxnonstiffstep`, `nonstifftol`, `stifftol`, `dtfac`:
    as of [`AutoTsit5`][ensembleode.AutoTsit5].
    """

    nonstiff: ClassVar[ExplicitRungeKutta] = Vern8()
    boundary: ClassVar[float] = 5.8641


class AutoVern9(AutoSwitch):
    """`Vern9` where the problem is not stiff, and the given Rosenbrock method where it is; see
    `AutoTsit5`.

    **Arguments:** `stiff`, `maxstiffstep`, `maxnonstiffstep`, `nonstifftol`, `stifftol`, `dtfac`:
    as of [`AutoTsit5`][ensembleode.AutoTsit5].
    """

    nonstiff: ClassVar[ExplicitRungeKutta] = Vern9()
    boundary: ClassVar[float] = 4.4762
