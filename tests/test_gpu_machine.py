"""What the README, the pages and the examples do on a machine where JAX computes on a GPU, which is
simulated (see `gpu_machine.py`)."""

import os
import pathlib
import subprocess
import sys

import pytest

from . import gpu_machine
from .on_gpus import test_around, test_solves
from .test_docs import blocks_of, has_python, PAGES, script_of
from .test_examples import CASES as EXAMPLES, EXAMPLES as FOLDER


ROOT = pathlib.Path(__file__).parents[1]


def run(*command, folder=ROOT, gpus=0):
    environment = os.environ | {"MPLBACKEND": "Agg", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    if gpus:
        environment[gpu_machine.VARIABLE] = str(gpus)
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "tests",
    [
        pytest.param(("tests/on_gpus", "-m", "not slow"), id="quick"),
        *(
            pytest.param((f"{module.__file__}::{name}", "-m", ""), id=name)
            for module in (test_around, test_solves)
            for name in vars(module)
            if name.startswith("test_")
        ),
    ],
)
def test_what_runs_on_gpus(tests):
    said = run("-m", "pytest", "-q", "-n", "0", *tests, gpus=2)
    assert "passed" in said
    assert "skipped" not in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name for name, page in PAGES.items() if has_python(page)],
)
def test_page(name, tmp_path):
    """(What it prints is that of a CPU.)"""
    script = tmp_path / "page.py"
    script.write_text(script_of(blocks_of(PAGES[name].read_text())))
    run(gpu_machine.__file__, script, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param(*case.values[:2], marks=case.marks)
        for case in (x if hasattr(x, "values") else pytest.param(*x) for x in EXAMPLES)
    ],
)
def test_example(name, arguments, tmp_path):
    run(gpu_machine.__file__, FOLDER / name, *arguments, folder=tmp_path)
