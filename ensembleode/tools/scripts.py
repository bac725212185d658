"""Functions of users' scripts by name: "script.py:function" or "package.module:function"."""

import contextlib
import importlib
import importlib.util
import os
import pathlib
import sys
import sysconfig
import traceback
from collections.abc import Callable
from typing import Any


class ScriptError(Exception):
    """The script or function with this name doesn't exist, or isn't what it should be."""


def split(name: str) -> tuple[str, str]:
    """The script (or module) and the function in a name. **Raises:** `ScriptError` for another
    form."""
    source, colon, function = name.rpartition(":")
    if not (source and colon and function.isidentifier()):
        raise ScriptError(
            f"a function must be named as 'script.py:function', or 'module:function', got {name!r}."
        )
    if source.endswith(".py"):
        if not os.path.isfile(source):
            raise ScriptError(f"there is no file {source!r} (from {os.getcwd()}).")
        return os.path.abspath(source), function
    if not all(part.isidentifier() for part in source.split(".")):
        raise ScriptError(
            f"{source!r} is neither a script, which ends in .py, nor the name of a module."
        )
    return source, function


def loaded(source: str, function: str) -> Callable:
    """The function of a script. **Raises:** `ScriptError` where there is none, and any exception of
    the script."""
    found = object_named(source, function)
    if not callable(found):
        raise ScriptError(f"{source} has no function {function}.")
    return found


def in_users_code(error: BaseException) -> bool:
    """Whether an error was raised in the user's code, so that its traceback should be shown."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(not _is_installed(frame.f_code.co_filename) for frame, _ in frames)


def _is_installed(file: str) -> bool:
    """Whether a file is of this package, of the standard library, or of another package."""
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    paths = sysconfig.get_paths()
    folders = [ours, *(paths[x] for x in ("stdlib", "platstdlib", "purelib", "platlib"))]
    scripts = os.path.join(paths["scripts"], "")
    place = os.path.realpath(file)
    return file.startswith(("<", scripts)) or any(
        place.startswith(os.path.join(os.path.realpath(folder), "")) for folder in folders
    )


def object_named(source: str, name: str) -> Any:
    """The object with this name in a script or module, or None. **Raises:** any exception of the
    script."""
    if source.endswith(".py"):
        # Modules next to a script can be imported, as when the script is run.
        sys.path.insert(0, os.path.dirname(source))
        script = f"_script_{pathlib.Path(source).stem}"
        spec = importlib.util.spec_from_file_location(script, source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[script] = module
        with contextlib.suppress(ImportError):  # without cloudpickle there are no workers, either
            import cloudpickle

            # The functions of a script are sent to workers by value, since workers can't import it.
            cloudpickle.register_pickle_by_value(module)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(source)
    return getattr(module, name, None)
