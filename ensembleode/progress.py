"""A bar that shows how far an ensemble is."""

import sys
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from .solution import has_failed


class Progress:
    """One bar over the trajectories: how many a second, how long still, and how many failed.

    On a terminal or in a notebook it moves; in a log it is a line a minute at most.
    """

    def __init__(self, trajectories: int, done: int = 0):
        moving = sys.stderr.isatty() or "ipykernel" in sys.modules
        self._bar = tqdm(
            total=trajectories,
            initial=done,
            unit="traj",
            unit_scale=trajectories >= 10_000,
            mininterval=0.1 if moving else 60,
        )
        self._failed = 0

    def report(self, retcode: Any) -> None:
        """Trajectories with these return codes are done."""
        self._failed += int(np.count_nonzero(has_failed(np.asarray(retcode))))
        self._bar.set_postfix_str(f"{self._failed} failed", refresh=False)
        self._bar.update(len(retcode))

    def close(self) -> None:
        self._bar.close()
