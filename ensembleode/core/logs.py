"""One logger, and messages worth saying once."""

import functools
import logging
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
