"""Progress bars."""

import sys
from typing import Any, TextIO

import numpy as np
from jaxtyping import PyTree

from ..ground.retcode import has_failed


_EACH = 10.0  # the shortest time between two lines of a log, in seconds


def bar(total: int | None, unit: str, done: int = 0, **options: Any) -> Any:
    """A progress bar of tqdm. On a terminal or in a notebook it moves; in a log, it is a line every
    few seconds."""
    from tqdm.auto import tqdm

    if not (sys.stderr.isatty() or _in_notebook()):
        # (By default, tqdm waits for as many counts as came between earlier lines.)
        options |= {"file": _Lines(sys.stderr), "mininterval": _EACH, "miniters": 1, "ncols": 80}
    return tqdm(total=total, initial=done, unit=unit, **options)


def _in_notebook() -> bool:
    """Whether this runs in a notebook. (That a library has imported ipykernel doesn't say so.)"""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return hasattr(shell, "kernel")


class _Lines:
    """A file in which each update of a bar is a line of its own; on a terminal, it would overwrite
    the one before."""

    def __init__(self, file: TextIO):
        self._file = file
        self.encoding = getattr(file, "encoding", None)

    def write(self, text: str) -> None:
        if said := text.strip():
            self._file.write(f"{said}\n")

    def flush(self) -> None:
        self._file.flush()


class Progress:
    """A bar over the trajectories, with the rate, the remaining time and the number of failures."""

    def __init__(self, trajectories: int, done: int = 0):
        self._bar = bar(trajectories, "traj", done, unit_scale=trajectories >= 10_000)
        self._failed = 0

    def report(self, retcode: PyTree) -> None:
        """Count trajectories with these return codes as done."""
        self._failed += int(np.count_nonzero(has_failed(np.asarray(retcode))))
        self._bar.set_postfix_str(f"{self._failed} failed", refresh=False)
        self._bar.update(len(retcode))

    def close(self) -> None:
        self._bar.close()
