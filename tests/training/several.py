"""Processes that train together."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys


ROOT = pathlib.Path(__file__).parents[2]


def environment(devices=1, **more):
    """The environment of a process with so many devices, by default its share where that is
    None."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_ENABLE_X64": "1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "ENSEMBLEODE_NUM_THREADS": "" if devices is None else str(devices),
        **more,
    }


def free_port():
    with contextlib.closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def variables(launcher, count, number, port):
    """What a launcher sets in the process of this number, on one computer."""
    count, number, port = str(count), str(number), str(port)
    if launcher == "JAX":
        return {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": count,
            "JAX_PROCESS_ID": number,
        }
    if launcher == "torchrun":
        names = ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
        more = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
    elif launcher == "Open MPI":
        of = "OMPI_COMM_WORLD"
        names = (f"{of}_RANK", f"{of}_LOCAL_RANK"), (f"{of}_SIZE", f"{of}_LOCAL_SIZE")
        uri = f"{port}.0;tcp://192.0.2.2:36435;tcp6://[fd00::2]:54229"
        more = {"OMPI_MCA_orte_hnp_uri": uri, "PMIX_NAMESPACE": port}
    elif launcher == "MPICH":
        names = ("PMI_RANK", "MPI_LOCALRANKID"), ("PMI_SIZE", "MPI_LOCALNRANKS")
        more = {"PMI_FD": "6"}
    else:
        names = ("SLURM_PROCID", "SLURM_LOCALID"), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
        more = {
            "SLURM_JOB_ID": port,
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": "node001",
            "SLURM_STEP_NUM_NODES": "1",
        }
    return dict.fromkeys(names[0], number) | dict.fromkeys(names[1], count) | more


def start(script, count, *arguments, launcher="JAX", devices=1, port=None, cwd=None):
    """The processes, which have in the environment what a launcher sets."""
    port = port or free_port()
    return [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            env=environment(devices, **variables(launcher, count, i, port)),
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]


def finish(processes, timeout=120):
    """What each has printed; all are ended."""
    try:
        return [p.communicate(timeout=timeout) for p in processes]
    finally:
        for p in processes:
            if p.poll() is None:
                p.send_signal(signal.SIGKILL)
