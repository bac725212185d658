"""The log of a running fit: a file with a line for each step."""

import contextlib
import errno
import json
import os
import pathlib
import time
from typing import Any

from ..ground.files import naming, written_whole
from .processes import is_first


class Log(contextlib.AbstractContextManager):
    """A file of JSON lines, to which lines are appended.

    A run that goes on from step `begin` first removes its own lines of later steps, which will be
    written again. The lines of other runs stay.
    """

    def __init__(self, path: str | os.PathLike | None, begin: int):
        self._file = None
        if path is None or not is_first():
            return
        self._path = place = pathlib.Path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists():
            lines = place.read_text().splitlines(keepends=True)
            there = len(lines)
            while lines and not _is_done(lines[-1], begin):
                lines.pop()
            if len(lines) != there:
                with written_whole(place, "w") as file:
                    file.writelines(lines)
        self._file = open(place, "a")  # noqa: SIM115
        self._flushed = 0.0

    def write(self, step: int, epoch: int, loss: float, seconds: float, items: int) -> None:
        if self._file is None:
            return
        line: dict[str, Any] = {"step": step, "epoch": epoch, "loss": loss, "seconds": seconds}
        if items:
            line |= {"items": items, "items_per_second": items / seconds}
        try:
            self._file.write(json.dumps(line) + "\n")
            if time.monotonic() - self._flushed > 1:
                self._file.flush()
                self._flushed = time.monotonic()
        except OSError as e:
            raise naming(e, self._path) from e

    def flush(self) -> None:
        """Put the lines so far on the disk."""
        if self._file is None:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as e:
            if e.errno != errno.EINVAL:  # (a pipe, or /dev/null, which has no disk)
                raise naming(e, self._path) from e

    def __exit__(self, kind, error, traceback):
        if self._file is None:
            return
        try:
            self._file.close()
        except OSError as e:
            if error is None:
                raise naming(e, self._path) from e
            error.add_note(f"ensembleode: the last lines of the log are lost: {e}")


def _is_done(line: str, step: int) -> bool:
    """Whether a line is complete, and not of a later step."""
    try:
        done = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return False
    # A run that begins anew has no lines to remove.
    return line.endswith("\n") and (step == 0 or done <= step)
