"""`citation`: the works to cite for a solve."""

import functools
import re
from importlib import resources
from typing import Any

from .. import solvers
from ..solution.solution import EnsembleSolution, ODESolution


def citation(sim: Any) -> str:
    """BibTeX entries for the methods that a solve used.

    These are the software, the solver, the engine (and its step-size control, where that is its
    own), and the adjoint (for those who differentiate), each under a comment that says what it is
    for.

    **Arguments:** `sim`: the [`EnsembleSolution`][ensembleode.EnsembleSolution] or
    [`ODESolution`][ensembleode.ODESolution] that [`solve`][ensembleode.solve] returned.

    **Raises:** `TypeError` for anything else, or for a solution made inside of an `output_func`,
    which doesn't know its engine.

    >>> import ensembleode as eo
    >>> sol = eo.solve(eo.ODEProblem(lambda u, p, t: -u, 1.0, (0.0, 1.0)), eo.Vern7())
    >>> "verner2010" in eo.citation(sol)
    True
    """
    engine = getattr(sim, "engine", None)
    if not isinstance(sim, EnsembleSolution | ODESolution) or engine is None:
        raise TypeError(f"citation takes a solution that solve returned, got {type(sim).__name__}.")
    solver = engine.solver
    parts = [
        ("This software", ["ensembleode"]),
        ("The interface of ensembles, and SciML's names", ["rackauckas2017"]),
        ("Automatic differentiation and compilation", ["jax"]),
        (f"The solver {solver}", _of_solver(solver)),
        (f"The engine {engine.name}", _ENGINES.get(engine.name, [])),
        (f"Gradients by {engine.sensealg}", _ADJOINTS.get(engine.sensealg, [])),
    ]
    text, cited = [], set()
    for purpose, keys in parts:
        text.append(f"% {purpose}" + ("" if keys else ": no reference is on record here"))
        text += [_entries()[key] for key in keys if key not in cited]
        text += [f"% see {key} above\n" for key in keys if key in cited]
        cited.update(keys)
    return "\n".join(text).rstrip() + "\n"


def _of_solver(solver: str) -> list[str]:
    """The references of a solver, and of the one in brackets that it switches to."""
    found = [vars(solvers).get(name) for name in re.findall(r"\w+", solver)]
    return list(dict.fromkeys(key for cls in found for key in getattr(cls, "references", ())))


@functools.cache
def _entries() -> dict[str, str]:
    """The BibTeX entries by their keys."""
    text = (resources.files("ensembleode.tools") / "references.bib").read_text()
    entries = re.findall(r"^(@\w+{(\w+),.*?^}$)", text, re.MULTILINE | re.DOTALL)
    return {key: entry + "\n" for entry, key in entries}


# The compiled engine has its own first step (hairer1993) and step-size controller.
_ENGINES = {
    "compiled": ["hairer1993", "gustafsson1991"],
    "diffrax": ["kidger2021"],
    "julia": ["rackauckas2017"],
}
_ADJOINTS = {
    "ReplayAdjoint": ["hager2000", "stumm2010"],
    "RecursiveCheckpointAdjoint": ["stumm2010"],
    "DirectAdjoint": ["griewank2008"],
    "ForwardDiffSensitivity": ["griewank2008"],
    "ForwardMode": ["griewank2008"],
    "BacksolveAdjoint": ["chen2018"],
    "GaussAdjoint": ["chen2018", "norcliffe2023"],
    "InterpolatingAdjoint": ["ma2021"],
    "forward sensitivities or InterpolatingAdjoint": ["griewank2008", "ma2021"],
}
