"""The work that a solve took."""

import dataclasses
from typing import Any

import equinox as eqx


class Stats(eqx.Module):
    """The work that a solve took, as counted in SciML.

    - `naccept` accepted and `nreject` rejected steps.
    - `nf`: evaluations of `f`. For implicit methods they are those in all steps that were tried,
        without those for Jacobians. None for diffrax's own solvers, except for explicit Runge-Kutta
        methods.
    - `njac`: Jacobians of `f`; `nw`: factorisations of the matrix made from one; `nsolve`: solves
        with its factors. None for explicit methods, for diffrax's own solvers, and for `JuliaAlg`.
        With `engine="julia"`, OrdinaryDiffEq counts them: in each step of a small system, it
        computes two Jacobians, and does not count the first solve of a Rodas method.

    They are arrays over the trajectories (totals, where a `reduction` was given).
    """

    naccept: Any
    nreject: Any
    nf: Any
    njac: Any = None
    nw: Any = None
    nsolve: Any = None


COUNTS = tuple(field.name for field in dataclasses.fields(Stats))
