"""The package's logger, messages that are given only once, and the failure of a command."""

import functools
import logging
import sys


logger = logging.getLogger("ensembleode")


@functools.cache
def log_once(message: str, of: int = 0) -> None:
    """Log a warning, but only the first time in this process, or the first time for this value of
    `of`."""
    logger.warning(message)


def failed(error: object) -> int:
    """Print an error to stderr, and return the exit code of a failed command."""
    print(f"ensembleode: {error}", file=sys.stderr)
    return 1
