"""One logger, messages worth saying once, and what a command fails with."""

import functools
import logging
import sys
import warnings


logger = logging.getLogger("ensembleode")


@functools.cache
def log_once(message: str) -> None:
    """Log a warning the first time it is due in this process."""
    logger.warning(message)


@functools.cache
def warn_once(message: str) -> None:
    """Warn the first time it is due in this process."""
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def failed(error: object) -> int:
    """Say so on stderr; the exit code."""
    print(f"ensembleode: {error}", file=sys.stderr)
    return 1
