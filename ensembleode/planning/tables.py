"""Results as text in columns, and as values for JSON."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any


def plain(found: Any) -> Any:
    """Dataclasses, with their contents, as dictionaries, lists and numbers; NaN becomes None."""
    if dataclasses.is_dataclass(found):
        return {name: plain(x) for name, x in vars(found).items()}
    if isinstance(found, tuple):
        return list(map(plain, found))
    return None if isinstance(found, float) and math.isnan(found) else found


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table: the first column is flush left, the others are flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        right = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *right]).rstrip())
    return lines


def hours(value: float) -> str:
    """Hours with two decimals; small values with three digits."""
    return f"{value:,.2f}" if value >= 1 else f"{value:.3g}"
