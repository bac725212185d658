"""The names that modules and classes had in earlier versions, so that their pickles can be read."""

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


_PACKAGE = __name__.partition(".")[0]
# By the former name of a module: its present one. (`core` was a folder.)
_MODULES = {
    "callbacks": "problem.callbacks",
    "core": "plan",
    "core.given": "plan.given",
    "core.reductions": "running.reductions",
    "corrections": "problem.correcting_callbacks",
    "dense": "solution.dense",
    "ensemble": "problem.ensemble",
    "ground.aside": "ground.hidden_object",
    "events": "solution.events",
    "initialization": "problem.initialization",
    "ode_function": "problem.ode_function",
    "problem.corrections": "problem.correcting_callbacks",
    "saving_callback": "problem.saving_callback",
    "sensitivity": "problem.sensitivity",
    "solvers.explicit_rk": "solvers.own_tableau",
    "solvers.runge_kutta": "solvers.explicit_runge_kutta",
    "stats": "solution.stats",
}
# By the former name of a class in one of these modules: its present one.
_NAMES = {"Aside": "HiddenObject", "Kept": "KeptNodes", "Known": "KnownInputs"}


# (No subclass of `importlib.abc`, whose import takes as long as all of the package's.)
class FormerModules:
    """Finds and loads modules under their former names: they have the names of the present
    modules."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, module = name.partition(".")
        if package != _PACKAGE or module not in _MODULES:
            return None
        loader: Any = self
        return ModuleSpec(name, loader, is_package=module == "core")

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        present = _MODULES[module.__name__.partition(".")[2]]

        def get(name: str) -> Any:
            found = importlib.import_module(f"{_PACKAGE}.{present}")
            return getattr(found, _NAMES.get(name, name))

        module.__getattr__ = get


def find_former_modules() -> None:
    """Let `import` find modules under their former names. Present modules take precedence."""
    finder: Any = FormerModules()
    sys.meta_path.append(finder)


def names_of(module: str, names: Sequence[str]) -> Callable[[str], Any]:
    """The `__getattr__` of a folder that was a module with these names. They are in this `module`
    of the folder now."""
    package, _, _ = module.rpartition(".")

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module), name)

    return get
