"""The job of the page on Slurm. Two commands stand in for Slurm, and run jobs at once."""

import ast
import os
import pathlib
import signal

import numpy as np
import pytest

import ensembleode as eo

from .problems import decay, scaled
from .test_docs import blocks_of


# Importing it makes Ctrl-C a sys.exit(), for all tests that come after.
_ctrl_c = signal.getsignal(signal.SIGINT)
from dask_jobqueue import SLURMCluster  # noqa: E402


signal.signal(signal.SIGINT, _ctrl_c)

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "clusters" / "slurm.md"


def test_ctrl_c_is_left_alone():
    assert signal.getsignal(signal.SIGINT) is _ctrl_c
    assert getattr(_ctrl_c, "__module__", None) != "dask_jobqueue.runner"


def arguments():
    """What the page gives to `SLURMCluster`."""
    (block,) = (block for block in blocks_of(PAGE.read_text()) if "SLURMCluster(\n" in block.text)
    calls = [node for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.Call)]
    (call,) = (call for call in calls if ast.unparse(call.func) == "SLURMCluster")
    names = {"eo": eo, "environment": eo.worker_environment(threads=8)}
    assert "environment = eo.worker_environment(threads=8)\n" in block.text
    return {keyword.arg: eval(ast.unparse(keyword.value), names) for keyword in call.keywords}


def cluster(**changed):
    """The page's, but that its scheduler listens on the loopback interface only."""
    listen = {"host": "127.0.0.1", "dashboard": False, "dashboard_address": "127.0.0.1:0"}
    return SLURMCluster(**(arguments() | changed), scheduler_options=listen)


def test_job_script():
    with cluster() as made:
        lines = made.job_script().splitlines()
        address = made.scheduler_address
    asked = {line for line in lines if line.startswith("#SBATCH")}
    assert asked >= {
        "#SBATCH -p standard",
        "#SBATCH -A mygroup",
        "#SBATCH -n 1",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --mem=16G",
        "#SBATCH -t 02:00:00",
    }
    exports = {line for line in lines if line.startswith("export ")}
    environment = eo.worker_environment(threads=8)
    assert environment["JAX_ENABLE_X64"] == "1"
    assert exports == {f"export {name}={value}" for name, value in environment.items()}
    # Set before the worker starts, in one process with a thread a core.
    command = lines[-1]
    assert f"distributed.cli.dask_worker {address} " in command
    assert "--nthreads 8 " in command
    assert "--nworkers" not in command
    assert "--lifetime 110m --lifetime-stagger 5m" in command
    assert "--interface ib0" in command


@pytest.mark.slow
def test_job_runs(tmp_path, monkeypatch):
    """The job as it is, but for the network: its worker solves."""
    commands = {
        "sbatch": f'cp "$1" {tmp_path}/job.sh\n'
        f"setsid bash {tmp_path}/job.sh >{tmp_path}/job.log 2>&1 &\n"
        'echo "Submitted batch job $!"',
        "scancel": 'kill -- "-$1"',
    }
    for name, does in commands.items():
        path = tmp_path / name
        path.write_text(f"#!/usr/bin/env bash\n{does}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    ens = eo.EnsembleProblem(decay(), scaled)
    here = eo.solve(ens, eo.Tsit5(), eo.EnsembleSerial(), trajectories=1000)
    loopback = ["--no-dashboard", "--dashboard-address", "127.0.0.1:0"]
    changed = {
        "interface": "lo",
        "worker_extra_args": arguments()["worker_extra_args"] + loopback,
        "local_directory": str(tmp_path),
    }
    with cluster(**changed) as made:
        made.scale(jobs=1)
        sim = eo.solve(ens, eo.Tsit5(), eo.EnsembleDistributed(made), trajectories=1000)
    np.testing.assert_array_equal(sim.u, here.u)
    assert "Registered to" in (tmp_path / "job.log").read_text()
