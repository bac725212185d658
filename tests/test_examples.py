"""The examples run, in a short form."""

import pathlib
import subprocess
import sys

import pytest


EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("quickstart.py", ["--updates", "2", "--no-plot"], "EnsembleGPUArray"),
        ("within_ode_batching.py", [], "coupled"),
    ],
)
def test_example(name, arguments, expected):
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "quickstart.py",
        "within_ode_batching.py",
    }
