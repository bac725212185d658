"""What `ensembleode plan` does, once its options are parsed."""

import functools
import json
import sys
from collections.abc import Callable

from ..cli import failed
from .checks import PlanError, whole
from .estimation import estimate
from .fleet import Kind, read_fleet
from .measurement import measure


def _errors_to_stderr(command: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(command)
    def run(*args, **options) -> int:
        try:
            return command(*args, **options)
        except PlanError as error:
            return failed(error)

    return run


@_errors_to_stderr
def run_measure(
    make_loss: str,
    sizes: str,
    *,
    iterations: float | None,
    cores: str | None,
    repeats: int,
    time_limit: float,
    as_kind: str | None,
    count: int,
    as_json: bool,
) -> int:
    """Print what was measured; with `as_kind` on stderr, and the kind on stdout."""
    if as_kind is not None and (as_json or (cores is not None and "," in cores)):
        raise PlanError("--as-kind is for one number of cores, and without --json.")
    if as_kind is not None:
        Kind(as_kind, count, 1.0, 1, 1)  # wrong ones are refused before anything is measured
    found = measure(
        make_loss,
        _numbers(sizes, "sizes"),
        iterations=None if iterations is None else whole(iterations, "iterations"),
        cores=None if cores is None else _numbers(cores, "cores"),
        repeats=repeats,
        time_limit=time_limit,
        progress=sys.stderr.isatty(),
    )
    if as_kind is not None:
        import yaml

        print(found, file=sys.stderr)
        kind = found.kind(as_kind, count).as_dict()
        print(yaml.safe_dump([kind], sort_keys=False), end="")
    else:
        print(json.dumps(found.as_dict(), indent=2) if as_json else found)
    return 0 if any(row.status == "ok" for row in found.rows) else 1


@_errors_to_stderr
def run_estimate(
    items: float, iterations: float, fleet: str, *, items_per_job: float | None, as_json: bool
) -> int:
    """Print the estimate."""
    found = estimate(items, iterations, read_fleet(fleet), items_per_job=items_per_job)
    print(json.dumps(found.as_dict(), indent=2) if as_json else found)
    return 0


def _numbers(text: str, what: str) -> list[int]:
    """Of "1024,4096" or, from a configuration file, "[1024, 4096]"."""
    return [whole(part, what) for part in text.strip("[] ").split(",")]
