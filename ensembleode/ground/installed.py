"""Functions and classes that can be identified by their names, since an installed package has
them."""

import functools
import importlib.metadata
import os
import site
import sys
import sysconfig
from typing import Any

from .version import __version__


def name_of(thing: Any) -> str | None:
    """The name and version of a function or class of an installed package or of the standard
    library. None for others, such as those of a script or of an editable installation."""
    module = "numpy" if type(thing).__name__ == "ufunc" else getattr(thing, "__module__", None)
    name = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    version = _version_of(module) if found is thing else None
    return version and f"{module}.{name} {version}"


@functools.cache
def _version_of(module: str) -> str | None:
    top = module.partition(".")[0]
    if top == __name__.partition(".")[0]:
        return __version__
    file = getattr(sys.modules.get(module), "__file__", None)
    if top in sys.stdlib_module_names:
        return f"Python {sys.version_info.major}.{sys.version_info.minor}"
    paths = sysconfig.get_paths()
    folders = {paths["purelib"], paths["platlib"], *site.getsitepackages()}
    place = os.path.realpath(file or "")
    if not any(place.startswith(os.path.join(os.path.realpath(x), "")) for x in folders):
        return None
    names = _distributions().get(top, ())
    return ", ".join(sorted({importlib.metadata.version(x) for x in names})) or None


# (Reading the files of all installed packages takes half a second.)
_distributions = functools.cache(importlib.metadata.packages_distributions)
