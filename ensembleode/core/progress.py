"""Bars that show how far something is."""

import sys
from typing import Any, TextIO

import numpy as np

from ..ground.retcode import has_failed


# Seconds between two lines of a log, at least.
_EACH = 10.0


def bar(total: int | None, unit: str, done: int = 0, **options: Any) -> Any:
    """On a terminal or in a notebook it moves; in a log it is a line now and then."""
    from tqdm.auto import tqdm

    if not (sys.stderr.isatty() or "ipykernel" in sys.modules):
        # (Steps of one, as tqdm would wait for as many as before.)
        options |= {"file": _Lines(sys.stderr), "mininterval": _EACH, "miniters": 1, "ncols": 80}
    return tqdm(total=total, initial=done, unit=unit, **options)


class _Lines:
    """A file in which what is written over itself on a terminal is a line of its own."""

    def __init__(self, file: TextIO):
        self._file = file
        self.encoding = getattr(file, "encoding", None)

    def write(self, text: str) -> None:
        said = text.strip()
        if said:
            self._file.write(f"{said}\n")

    def flush(self) -> None:
        self._file.flush()


class Progress:
    """One bar over the trajectories: how many a second, how long still, and how many failed."""

    def __init__(self, trajectories: int, done: int = 0):
        self._bar = bar(trajectories, "traj", done, unit_scale=trajectories >= 10_000)
        self._failed = 0

    def report(self, retcode: Any) -> None:
        """Trajectories with these return codes are done."""
        self._failed += int(np.count_nonzero(has_failed(np.asarray(retcode))))
        self._bar.set_postfix_str(f"{self._failed} failed", refresh=False)
        self._bar.update(len(retcode))

    def close(self) -> None:
        self._bar.close()
