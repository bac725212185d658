"""The machines of a fleet: kinds of instances, with their number and their speed."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from .checks import number, PlanError, shown, whole_number


MEASURED = ("seconds", "items", "iterations")
_LONGEST = 100


@dataclasses.dataclass(frozen=True)
class Kind:
    """Equal instances of one kind, such as single GPUs, or groups of eight cores of a node.

    - `name`: its name in tables.
    - `count`: the number of instances.
    - `seconds`, `items`, `iterations`: a measurement of one instance: the time of that many
        iterations over that many items.
    - `unit_time`: instead of these three, the seconds for one item and 1000 iterations.
    - `hours_per_day`: how many hours of a day the instances are available, on average.

    **Raises:** [`PlanError`][ensembleode.planning.PlanError] for values that are not positive,
    contradictory, or missing.

    >>> from ensembleode import planning
    >>> planning.Kind("gpu", 32, seconds=200.0, items=50_000, iterations=2000).cost
    2e-06
    """

    name: str
    count: int
    seconds: int | float | None = None
    items: int | float | None = None
    iterations: int | float | None = None
    unit_time: int | float | None = None
    hours_per_day: int | float = 24.0

    def __post_init__(self):
        name = self.name
        if not isinstance(name, str) or not name.strip():
            raise PlanError(
                f"a kind must have a name, such as 'gpu', got {shown(name)}. (In YAML, quote a "
                "name that is a number.)"
            )
        if not name.isprintable() or len(name) > _LONGEST:
            raise PlanError(
                f"the name of a kind must be one line of at most {_LONGEST} characters, got "
                f"{shown(name)}."
            )
        given = {field: value for field, value in vars(self).items() if value is not None}
        measured = [field for field in MEASURED if field in given]
        missing = [field for field in MEASURED if field not in given]
        if "unit_time" in given and measured:
            raise PlanError(
                f"the kind {name!r} has unit_time and {', '.join(measured)}: give the one or the "
                "other."
            )
        if "unit_time" not in given and missing:
            raise PlanError(
                f"the kind {name!r} lacks {', '.join(missing)}: give seconds, items and iterations "
                "as measured, or unit_time (seconds an item and 1000 iterations)."
            )
        for field, value in given.items():
            if field != "name":
                kind_of_number = (
                    whole_number if field in ("count", "items", "iterations") else number
                )
                value = kind_of_number(value, f"the kind {name!r}: {field}")
                object.__setattr__(self, field, value)
        if "hours_per_day" in given and self.hours_per_day > 24:
            raise PlanError(
                f"the kind {name!r}: hours_per_day must be 24 at most, got "
                f"{shown(given['hours_per_day'])}."
            )

    @property
    def cost(self) -> float:
        """The seconds that one instance takes for one item and one iteration."""
        if self.unit_time is not None:
            return self.unit_time / 1000
        return self.seconds / self.items / self.iterations  # pyright: ignore

    def as_dict(self) -> dict[str, Any]:
        """The entry of a fleet file, without fields that were not given."""
        fields = dataclasses.asdict(self)
        if self.hours_per_day == 24:
            del fields["hours_per_day"]
        return {field: value for field, value in fields.items() if value is not None}


def read_fleet(path: str | os.PathLike) -> list[Kind]:
    """Read a fleet from a YAML file: a list of kinds.

    Each kind has the fields of [`Kind`][ensembleode.planning.Kind]: `name`, `count`, and either
    `seconds`, `items` and `iterations` as measured, or `unit_time`; and optionally `hours_per_day`.

    **Arguments:** `path`: the path of the file.

    **Returns:** the kinds, in the order of the file.

    **Raises:** [`PlanError`][ensembleode.planning.PlanError] for a file that can't be read, and for
    fields that are missing, unknown or wrong. It names the file, the kind and the field.
    """
    import yaml

    name = os.fspath(path)
    try:
        with open(path, encoding="utf-8") as file:
            entries = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else e
        raise PlanError(f"the fleet {name} can't be read: {reason}.") from e
    except (yaml.YAMLError, ValueError) as e:  # (an integer of too many digits)
        raise PlanError(f"the fleet {name} is not YAML: {' '.join(str(e).split())}.") from e
    except RecursionError as e:
        raise PlanError(f"the fleet {name} is no list of kinds: it is nested too deeply.") from e
    try:
        if not isinstance(entries, list):
            raise PlanError(
                "there is no list of kinds: begin each with a dash, as in '- {name: gpu, count: "
                "32, seconds: 185.3, items: 65536, iterations: 2000}'."
            )
        kinds = [_kind(entry, place) for place, entry in enumerate(entries, start=1)]
        check_fleet(kinds)
    except PlanError as e:
        raise PlanError(f"in the fleet {name}, {e}") from None
    return kinds


def check_fleet(fleet: Sequence[Kind]) -> None:
    """**Raises:** `PlanError` for an empty fleet, or for two kinds of the same name."""
    if not fleet:
        raise PlanError("the fleet is empty: give at least one kind.")
    names = [kind.name for kind in fleet]
    for name in names:
        if names.count(name) > 1:
            raise PlanError(f"two kinds are called {name!r}: call one of them something else.")


def _kind(entry: Any, place: int) -> Kind:
    known = [field.name for field in dataclasses.fields(Kind)]
    if not isinstance(entry, dict):
        raise PlanError(
            f"the kind number {place} must have name, count, and so on, got {shown(entry)}."
        )
    called = f"the kind {shown(entry['name'])}" if "name" in entry else f"the kind number {place}"
    for field in entry:
        if field not in known:
            raise PlanError(
                f"{called} has the unknown field {shown(field)}: the fields are {', '.join(known)}."
            )
    for field in ("name", "count"):
        if entry.get(field) is None:
            raise PlanError(f"{called} lacks {field}.")
    # In YAML, a field without a value is None.
    return Kind(**{field: x for field, x in entry.items() if x is not None})
