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
        ("neural_ode.py", ["--updates", "10", "--no-plot"], "held out"),
        ("parameter_sweep.py", ["--trajectories", "1000", "--no-plot"], "lanes engine"),
        ("uncertainty.py", ["--trajectories", "100", "--no-plot"], "in batches of 37: True"),
        ("digits_neural_ode.py", ["--ensemble", "columns", "--epochs", "1", "--no-plot"], "%"),
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
        "neural_ode.py",
        "digits_neural_ode.py",
        "parameter_sweep.py",
        "uncertainty.py",
    }
