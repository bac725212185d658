"""Numbers as text, in columns."""

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """The lines of a table: the first `left` columns are flush left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def hours(value: float) -> str:
    """To the hundredth; small ones to three digits."""
    return f"{value:,.2f}" if value >= 1 else f"{value:.3g}"


def size(count: int) -> str:
    """A number of bytes."""
    return f"{count / 2**20:,.0f} MiB"
