"""The examples run, in a short form."""

import os
import pathlib
import subprocess
import sys

import pytest

from .marks import on_julia, slow_unless


EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


# The examples, their arguments for a short run, and what they print then.
CASES = [
    ("quickstart.py", ["--updates", "2", "--no-plot"], "EnsembleGPUArray"),
    slow_unless(False, "within_ode_batching.py", [], "coupled"),
    slow_unless(False, "neural_ode.py", ["--updates", "10", "--no-plot"], "held out"),
    slow_unless(False, "neural_sde.py", ["--updates", "40", "--no-plot"], "autocorrelation"),
    slow_unless(
        False,
        "chemical_langevin.py",
        ["--trajectories", "2000", "--no-plot"],
        "without repression",
    ),
    slow_unless(False, "neural_cde.py", ["--updates", "10", "--no-plot"], "held out"),
    slow_unless(False, "ode_rnn.py", ["--updates", "10", "--no-plot"], "held out"),
    slow_unless(False, "universal_ode.py", ["--updates", "10", "--no-plot"], "dx/dt"),
    slow_unless(False, "augmented_ode.py", ["--updates", "100", "--no-plot"], "second order"),
    slow_unless(False, "latent_ode.py", ["--updates", "60", "--no-plot"], "held out"),
    slow_unless(
        False, "multiple_shooting.py", ["--updates", "10", "--no-plot"], "whole trajectory"
    ),
    slow_unless(False, "normalizing_flow.py", ["--updates", "100", "--no-plot"], "integrates to"),
    slow_unless(
        False,
        "physics_informed.py",
        ["--optimizer", "lm", "adam", "lbfgs", "--points", "400", "--steps", "2", "--no-plot"],
        "relative L2 error",
    ),
    slow_unless(
        False,
        "physics_informed.py",
        ["--equation", "burgers", "wave", "--points", "2000", "--steps", "8", "--no-plot"],
        "wave, Levenberg-Marquardt: 32 steps",
    ),
    slow_unless(
        False, "parameter_sweep.py", ["--trajectories", "1000", "--no-plot"], "compiled engine"
    ),
    slow_unless(
        False,
        "uncertainty.py",
        ["--trajectories", "100", "--no-plot"],
        "in batches of 37: True",
    ),
    slow_unless(
        False,
        "chemistry.py",
        ["--trajectories", "100", "--updates", "5", "--no-plot"],
        "constants found",
    ),
    slow_unless(
        False,
        "digits_neural_ode.py",
        ["--ensemble", "columns", "--epochs", "1", "--no-plot"],
        "%",
    ),
    slow_unless(
        False, "distributed_training.py", ["--updates", "2", "--workers", "2"], "published"
    ),
    on_julia("julia_engine.py", [], "published"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments", "expected"), CASES)
def test_example(name, arguments, expected):
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


@pytest.mark.slow
def test_example_without_julia(tmp_path):
    environment = {"PYTHON_JULIACALL_EXE": "no/julia", "PYTHON_JULIACALL_PROJECT": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, EXAMPLES / "julia_engine.py"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    (said,) = done.stderr.splitlines()
    assert "Set it to the path of julia" in said


def test_every_example_is_run():
    run = {getattr(case, "values", case)[0] for case in CASES}
    assert {path.name for path in EXAMPLES.glob("*.py")} == run
