"""Solvers, under SciML's names.

A method is a file of its own, which is named here and in the package's `__init__.pyi`. How it is
written: `explicit_runge_kutta.py`, `rosenbrock.py`, and for noise `stochastic.py`. `own_tableau.py`
is the method of a user's tableau, and `julia_alg.py` Julia's by their names.
"""

from .auto import (
    AutoTsit5 as AutoTsit5,
    AutoVern6 as AutoVern6,
    AutoVern7 as AutoVern7,
    AutoVern8 as AutoVern8,
    AutoVern9 as AutoVern9,
)
from .base import ODESolver as ODESolver
from .bosh3 import Bosh3 as Bosh3
from .bs5 import BS5 as BS5
from .direct import Direct as Direct
from .dopri5 import Dopri5 as Dopri5
from .dopri8 import Dopri8 as Dopri8
from .em import EM as EM
from .euler import Euler as Euler
from .euler_heun import EulerHeun as EulerHeun
from .explicit_runge_kutta import ExplicitRungeKutta as ExplicitRungeKutta
from .heun import Heun as Heun
from .implicit import (
    ImplicitEuler as ImplicitEuler,
    KenCarp3 as KenCarp3,
    KenCarp4 as KenCarp4,
    KenCarp5 as KenCarp5,
    Kvaerno3 as Kvaerno3,
    Kvaerno4 as Kvaerno4,
    Kvaerno5 as Kvaerno5,
)
from .julia_alg import JuliaAlg as JuliaAlg
from .midpoint import Midpoint as Midpoint
from .own_tableau import ExplicitRK as ExplicitRK
from .ralston import Ralston as Ralston
from .rk4 import RK4 as RK4
from .rk_mil import RKMil as RKMil
from .rodas4 import Rodas4 as Rodas4
from .rodas5p import Rodas5P as Rodas5P
from .rosenbrock23 import Rosenbrock23 as Rosenbrock23
from .sosra import SOSRA as SOSRA
from .sosri import SOSRI as SOSRI
from .sra1 import SRA1 as SRA1
from .sriw1 import SRIW1 as SRIW1
from .ssprk33 import SSPRK33 as SSPRK33
from .stochastic import SDESolver as SDESolver
from .tsit5 import Tsit5 as Tsit5
from .vern6 import Vern6 as Vern6
from .vern7 import Vern7 as Vern7
from .vern8 import Vern8 as Vern8
from .vern9 import Vern9 as Vern9
