"""The README's figures are those of the table that it links to."""

import json
import pathlib
import re

import pytest

from .problems import of_benchmarks


TOP = pathlib.Path(__file__).parents[1]
README, TABLES = TOP / "README.md", TOP / "docs" / "measured" / "limits.md"
RESULTS = TOP / "benchmarks" / "limits.json"
report = of_benchmarks("limits_report")

SAID = re.compile(
    r"the solve takes ([\d.,]+) ms .*?takes ([\d.,]+) ms, a vmapped\s+diffrax ([\d.,]+) ms\);.*?"
    r"gradient .*? takes ([\d.,]+) ms\s+\(C\+\+ ([\d.,]+) ms, diffrax ([\d.,]+) ms\);.*?"
    r"takes ([\d.,]+) s\s+and ([\d.,]+) s \(diffrax ([\d.,]+) s\s+and ([\d.,]+) s\)",
    re.DOTALL,
)


def said(readme):
    """Of the solve and of its gradient: ours, C++, diffrax; of first calls: ours, diffrax."""
    (found,) = SAID.findall(readme)
    return [float(x.replace(",", "")) for x in found]


def tabled(page, place, *beginning):
    """The row of this place that begins so: its numbers by column, without ratios, and without
    what was found on disk."""
    text = re.search(rf"<!-- limits: {place} -->(.*?)<!-- end of limits -->", page, re.DOTALL)[1]
    columns, _, *rows = [
        [cell.strip() for cell in row.strip()[1:-1].split("|")] for row in text.strip().splitlines()
    ]
    (row,) = [row for row in rows if tuple(row[: len(beginning)]) == beginning]
    return {
        column: float(re.split(r" \(|, ", cell)[0].replace(",", ""))
        for column, cell in zip(columns, row, strict=True)
        if cell[:1].isdigit()
    }


def of_table(page):
    solve = tabled(page, "solve float64", "Lorenz, Tsit5")
    gradient = tabled(page, "gradient", "Lorenz, Tsit5", "float64")
    first = [tabled(page, "first calls", "Lorenz, Tsit5", x) for x in ("solve", "gradient")]
    return [
        *(of[way] for of in (solve, gradient) for way in ("compiled", "C++", "diffrax")),
        *(of[way] for way in ("compiled", "diffrax") for of in first),
    ]


def test_the_figures_of_the_readme():
    assert said(README.read_text()) == of_table(TABLES.read_text())
    assert "docs/measured/limits.md" in README.read_text()


@pytest.mark.parametrize("scale", [0.013, 1.0, 170.0])
def test_what_the_report_writes(scale):
    """Into every place of both pages, from one run; a second time, nothing changes."""
    rows = {
        way: {"ms": scale * (1.2345 + i), "error": 1e-7, "first": scale * (i + 0.3), "cached": 0.1}
        for i, way in enumerate(report.WAYS)
    }
    tables = [
        [name, dtype, back, rows]
        for name in report.LABELS
        for dtype in ("float64", "float32")
        for back in (False, True)
    ]
    versions = {"Python": "3.0", "jax": "0.1", "diffrax": "0.2"}
    machine = {"cpu": "Abacus", "cores": 1, "vectors": "AVX-9", "versions": versions}
    made = report.blocks(report.Results({"machine": machine, "tables": tables}))
    before = [path.read_text() for path in report.PAGES]
    assert {x for text in before for _, x, *_ in report.PLACE.findall(text)} == set(made)
    readme, page = after = [report.filled(text, made) for text in before]
    assert said(readme) == of_table(page)
    assert said(readme)[0] == pytest.approx(scale * 2.2345, rel=5e-3)
    assert "Abacus" in readme
    assert "Abacus" in page
    assert [report.filled(text, made) for text in after] == after
    for text, other in zip(before, after, strict=True):
        assert report.PLACE.sub("", text) == report.PLACE.sub("", other)


@pytest.mark.skipif(not RESULTS.exists(), reason="the tables are older than the report")
def test_the_pages_are_what_was_measured():
    made = report.blocks(report.Results(json.loads(RESULTS.read_text())))
    for path in report.PAGES:
        assert report.filled(path.read_text(), made) == path.read_text()
