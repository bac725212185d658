"""The log of a running fit: files with a line for each step, and functions that are called after
it."""

import contextlib
import csv
import errno
import io
import json
import math
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

from ..ground.files import naming, written_whole
from .fit_result import FitState
from .processes import is_first


_COLUMNS: tuple[str, ...] = (
    "step",
    "epoch",
    "loss",
    "validation_loss",
    "gradient_norm",
    "learning_rate",
    "seconds",
    "items",
    "items_per_second",
)


class Log(contextlib.AbstractContextManager):
    """The files and functions that were given as `log=` for a run that goes on from step `begin`.

    **Raises:** `TypeError` for anything else.
    """

    def __init__(self, given: Any, begin: int):
        several = given if isinstance(given, list | tuple) else [given]
        several = [x for x in several if x is not None] if is_first() else []
        for x in several:
            if not callable(x) and not isinstance(x, str | os.PathLike):
                raise TypeError(
                    "log must be the path of a file, or a function of a FitState, or a list of "
                    f"these; got {x!r}."
                )
        self.functions = [x for x in several if callable(x)]
        self._files: list[LogFile] = []
        for x in several:
            if not callable(x):
                self._files.append(LogFile(x, begin))

    def write(self, told: FitState, seconds: float) -> None:
        """Tell of a step, which took so many seconds (without its validation)."""
        for file in self._files:
            file.write(told, seconds)
        for function in self.functions:
            function(told)

    def flush(self) -> None:
        """Put the lines so far on the disk."""
        for file in self._files:
            file.flush()

    def __exit__(self, kind, error, traceback):
        with contextlib.ExitStack() as stack:
            for file in self._files:
                stack.push(file)


class LogFile(contextlib.AbstractContextManager):
    """A file of JSON lines, or of comma-separated values where its name ends in `.csv`, to which
    lines are appended.

    A run that goes on from step `begin` first removes its own lines of later steps, which will be
    written again. The lines of other runs stay.
    """

    def __init__(self, path: str | os.PathLike, begin: int):
        self._path = place = pathlib.Path(path)
        self._text_of, step_in = (_row, _step_in_row) if place.suffix == ".csv" else (_json, _step)
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists():
            lines = place.read_text().splitlines(keepends=True)
            there = len(lines)
            while lines and not _is_done(lines[-1], begin, step_in):
                lines.pop()
            if len(lines) != there:
                with written_whole(place, "w") as file:
                    file.writelines(lines)
        self._file = open(place, "a", newline="")  # noqa: SIM115
        self._flushed = 0.0
        if place.suffix == ".csv" and not self._file.tell():
            self._file.write(",".join(_COLUMNS) + "\n")

    def write(self, told: FitState, seconds: float) -> None:
        line: dict[str, Any] = {"step": told.step, **told.numbers}
        line["seconds"] = seconds
        if told.items:
            line |= {"items": told.items, "items_per_second": told.items / seconds}
        try:
            self._file.write(self._text_of(line))
            if time.monotonic() - self._flushed > 1:
                self._file.flush()
                self._flushed = time.monotonic()
        except OSError as e:
            raise naming(e, self._path) from e

    def flush(self) -> None:
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as e:
            if e.errno != errno.EINVAL:  # (a pipe, or /dev/null, which has no disk)
                raise naming(e, self._path) from e

    def __exit__(self, kind, error, traceback):
        try:
            self._file.close()
        except OSError as e:
            if error is None:
                raise naming(e, self._path) from e
            error.add_note(f"ensembleode: the last lines of the log are lost: {e}")


def _json(line: dict[str, Any]) -> str:
    # (JSON has no NaN.)
    finite = {name: x if math.isfinite(x) else None for name, x in line.items()}
    return json.dumps(finite) + "\n"


def _row(line: dict[str, Any]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, _COLUMNS, lineterminator="\n").writerow(line)
    return text.getvalue()


def _step(line: str) -> Any:
    return json.loads(line)["step"]


def _step_in_row(line: str) -> int:
    first = next(csv.reader([line]))[0]
    return 0 if first == _COLUMNS[0] else int(first)


def _is_done(line: str, step: int, step_in: Callable) -> bool:
    """Whether a line is complete, and not of a later step."""
    try:
        done = step_in(line)
    except (ValueError, KeyError, TypeError):
        return False
    # A run that begins anew has no lines to remove.
    return line.endswith("\n") and (step == 0 or done <= step)
