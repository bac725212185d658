"""What users describe: problems, ensembles and their algorithms, callbacks, options."""

import importlib
from typing import Any


# Earlier versions had these classes in a module of this name, and pickled them so.
_PICKLED = ("EnsembleContext", "EnsembleProblem", "ODEProblem", "remake", "_Rows")


def __getattr__(name: str) -> Any:
    if name not in _PICKLED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(".problem", __name__), name)
