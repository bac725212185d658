"""Bars that show how far something is."""

import sys
from typing import Any

import numpy as np

from .retcode import has_failed


def bar(total: int | None, unit: str, done: int = 0, **options: Any) -> Any:
    """On a terminal or in a notebook it moves; in a log it is a line a minute at most."""
    from tqdm.auto import tqdm

    moving = sys.stderr.isatty() or "ipykernel" in sys.modules
    often = {"mininterval": 0.1} if moving else {"mininterval": 60, "maxinterval": 60}
    return tqdm(total=total, initial=done, unit=unit, **often, **options)


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
