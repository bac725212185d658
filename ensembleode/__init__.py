"""ensembleode: solve and train on ensembles of differential equations, in JAX.

Write the ODE once, describe the ensemble as in SciML, choose by one argument where it runs, and
differentiate through it.
"""

import importlib as _importlib
import importlib.util as _util
import sys as _sys

import lazy_loader as _lazy_loader

from .ground.former_names import find_former_modules as _find_former_modules


# The public names are those of the stub that type checkers read.
_get, _, _names = _lazy_loader.attach_stub(__name__, __file__)
__all__ = [name for name in _names if not name.startswith("_")]  # pyright: ignore


def __getattr__(name: str) -> object:
    """Import a public name or module when it is first asked for, so that importing the package is
    quick."""
    _prepare_jax()
    if name in _names:
        found = _get(name)
    elif _util.find_spec(f".{name}", __name__) is not None:
        found = _importlib.import_module(f".{name}", __name__)
    else:
        from .problem import unknown_options

        raise unknown_options.missing_attribute(_sys.modules[__name__], name)
    globals()[name] = found
    return found


def _prepare_jax() -> None:
    """Import what makes JAX forget what it has compiled: as early as possible."""
    if "jax" in _sys.modules:
        from .ground.devices import given_device  # noqa: F401


def __dir__() -> list[str]:
    return sorted({*__all__, *(x for x in globals() if x.startswith("__"))})


_find_former_modules()
_prepare_jax()
