"""What a solve returns: solutions, their events, statistics of their work, named dimensions."""

import importlib
from typing import Any


# Earlier versions pickled these classes by the name of this module.
_PICKLED = ("EngineChoice", "EnsembleError", "EnsembleSolution", "ODESolution")


def __getattr__(name: str) -> Any:
    if name not in _PICKLED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(".solution", __name__), name)
