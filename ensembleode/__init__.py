"""ensembleode: solve and train on ensembles of differential equations, in JAX.

Write the ODE once, describe the ensemble as in SciML, choose by one argument where it runs, and
differentiate through it.
"""

import ast as _ast
import importlib as _importlib
import importlib.util as _util
import pathlib as _pathlib
import sys as _sys

from .ground.former_names import find_former_modules as _find_former_modules


# The modules of the public names, from the stub that type checkers read.
_STUB = _ast.parse(_pathlib.Path(__file__).with_suffix(".pyi").read_text()).body
_IMPORTS = [x for x in _STUB if isinstance(x, _ast.ImportFrom)]
_PLACES = {name.name: x.module or name.name for x in _IMPORTS for name in x.names}
__all__ = [name for name in _PLACES if not name.startswith("_")]  # pyright: ignore


def __getattr__(name: str) -> object:
    """Import a public name or module when it is first asked for, so that importing the package is
    quick."""
    _prepare_jax()
    place = _PLACES.get(name, name)
    if name not in _PLACES and _util.find_spec(f".{place}", __name__) is None:
        from .problem import aliases

        raise aliases.missing_attribute(_sys.modules[__name__], name)
    module = _importlib.import_module(f".{place}", __name__)
    globals()[name] = found = module if place == name else getattr(module, name)
    return found


def _prepare_jax() -> None:
    """Import what makes JAX forget what it has compiled: as early as possible."""
    if "jax" in _sys.modules:
        from .ground.devices import given_device  # noqa: F401


def __dir__() -> list[str]:
    return sorted({*__all__, *(x for x in globals() if x.startswith("__"))})


_find_former_modules()
_prepare_jax()
