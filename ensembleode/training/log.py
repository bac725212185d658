"""What a fit says while it goes on: a bar, and a file with a line for each step."""

import contextlib
import json
import os
import pathlib
import time
from typing import Any

from ..progress import bar
from .processes import is_first


class Log(contextlib.AbstractContextManager):
    """A file of JSON lines, of which those up to step `begin` are kept."""

    def __init__(self, path: str | os.PathLike | None, begin: int):
        self._file = None
        if path is None or not is_first():
            return
        place = pathlib.Path(path)
        kept = _lines_until(place, begin) if begin and place.exists() else []
        place.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(place, "w")  # noqa: SIM115
        self._file.writelines(kept)
        self._flushed = 0.0

    def write(self, step: int, epoch: int, loss: float, seconds: float, items: int) -> None:
        if self._file is None:
            return
        line: dict[str, Any] = {"step": step, "epoch": epoch, "loss": loss, "seconds": seconds}
        if items:
            line |= {"items": items, "items_per_second": items / seconds}
        self._file.write(json.dumps(line) + "\n")
        if time.monotonic() - self._flushed > 1:
            self._file.flush()
            self._flushed = time.monotonic()

    def __exit__(self, *exception):
        if self._file is not None:
            self._file.close()


def _lines_until(path: pathlib.Path, step: int) -> list[str]:
    lines = []
    for line in path.read_text().splitlines(keepends=True):
        try:
            done = json.loads(line)["step"] <= step
        except ValueError:  # cut off in the middle
            done = False
        if done:
            lines.append(line)
    return lines


class Bar(contextlib.AbstractContextManager):
    """A bar over the steps, with the loss."""

    def __init__(self, shown: bool, steps: int | None, begin: int):
        self._bar = bar(steps, "step", begin, disable=not (shown and is_first()))

    def update(self, loss: float) -> None:
        if not self._bar.disable:
            self._bar.set_postfix_str(f"loss {loss:.4g}", refresh=False)
            self._bar.update()

    def __exit__(self, *exception):
        self._bar.close()
