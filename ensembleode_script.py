"""The command `ensembleode`.

To import a module of a package is to import the package, and so JAX, which takes seconds: too long
for `--help`. So `ensembleode/cli.py` is loaded as a file; what a command needs of the package is
imported within it.
"""

import importlib.util
import sys
from pathlib import Path


def main() -> None:
    """Run what the command line says, and exit with its code."""
    package = importlib.util.find_spec("ensembleode")  # (which doesn't import it)
    assert package is not None
    assert package.submodule_search_locations is not None
    path = Path(package.submodule_search_locations[0]) / "cli.py"
    # (A name with dots would have jsonargparse import the package.)
    spec = importlib.util.spec_from_file_location("_ensembleode_cli", path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
