"""The version of this package."""

import importlib.metadata
import pathlib
import tomllib


def _version() -> str:
    """The version of the installed package; of a checkout that is only on the path, the one in its
    files.

    **Raises:** `PackageNotFoundError` where there is neither.
    """
    try:
        return importlib.metadata.version("ensembleode")
    except importlib.metadata.PackageNotFoundError:
        about = pathlib.Path(__file__).parents[2] / "pyproject.toml"
        if not about.exists():
            raise
        return tomllib.loads(about.read_text(encoding="utf-8"))["project"]["version"]


__version__ = _version()
