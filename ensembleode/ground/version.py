"""The version of this package."""

from importlib.metadata import version as _version


__version__ = _version("ensembleode")
