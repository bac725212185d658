"""How this process was launched: alone, or as one of several that run the same script.

A launcher tells each process by environment variables how many there are and which one it is. Only
some launchers also tell the address of the first process. Otherwise each process derives the same
address from variables that identify the job.
"""

import os
import pathlib
import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple


ADDRESS, PORT = "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT"
# Both are in use for the number of processes; the first is named after an argument of
# `jax.distributed.initialize`.
COUNTS, NUMBER = ("JAX_NUM_PROCESSES", "JAX_PROCESS_COUNT"), "JAX_PROCESS_ID"
_HERE = "127.0.0.1"


class Launch(NamedTuple):
    """One process of several."""

    by: str  # the launcher; "JAX" for the variables of that name, and for arguments
    processes: int
    process: int  # the number of this process, from 0
    host: str  # the address of process 0, with `port`
    port: int


def launch_given(coordinator: str, processes: int, process: int) -> Launch | None:
    """The launch that arguments describe; None for one process.

    **Raises:** `ValueError` for an address without a port, and for a number out of range.
    """
    if not 0 <= process < processes:
        raise ValueError(
            f"process must be a number from 0 to {processes - 1}, as there are "
            f"processes={processes!r}; got {process!r}."
        )
    if processes == 1:
        return None
    return Launch("JAX", processes, process, *_address("coordinator", coordinator))


def launch_found(environ: Mapping[str, str], address: str | None = None) -> Launch | None:
    """The launch that environment variables describe; None for a process that runs alone.

    The variables of JAX come first, then those of the innermost launcher: `torchrun` may run under
    `srun`, and `mpirun` within an allocation of Slurm.

    **Arguments:** `address`: where process 0 can be reached, by default what the variables say.

    **Raises:** `ValueError` where variables contradict one another, and where some are missing.
    """
    address = address or environ.get(ADDRESS)
    for launcher in (_by_jax, _by_torchrun, _by_open_mpi, _by_mpich, _by_slurm):
        launch = launcher(environ, address)
        if launch is None:
            continue
        if launch.processes == 1:
            return None
        if address:
            host, port = _address(ADDRESS, address)
            launch = launch._replace(host=host, port=port)
        elif environ.get(PORT):
            launch = launch._replace(port=_number(environ, PORT))
        return launch
    if address:
        raise ValueError(
            f"{ADDRESS} is set, and nothing says how many processes there are: set {COUNTS[0]} and "
            f"{NUMBER}, too, or unset it to run one process."
        )
    return None


def _by_jax(environ: Mapping[str, str], address: str | None) -> Launch | None:
    names = [name for name in COUNTS if environ.get(name)]
    if not names and not environ.get(NUMBER):
        return None
    counts = {name: _number(environ, name) for name in names}
    if len(set(counts.values())) > 1:
        raise ValueError(f"{COUNTS[0]} and {COUNTS[1]} differ: {counts}. Unset one of the two.")
    count = names[0] if names else COUNTS[0]
    processes = _number(environ, count, f"{NUMBER} is set")
    if processes == 1:
        return Launch("JAX", 1, 0, _HERE, 0)
    process = _rank(environ, NUMBER, count, processes)
    if not address:
        raise ValueError(
            f"{count}={processes} is set, and {ADDRESS} isn't: set it to the host and a free port "
            "of process 0, such as 10.0.0.1:12345, in all processes."
        )
    return Launch("JAX", processes, process, *_address(ADDRESS, address))


def _by_torchrun(environ: Mapping[str, str], address: str | None) -> Launch | None:
    rank, size = "RANK", "WORLD_SIZE"
    if not environ.get(rank) and not environ.get(size):
        return None
    processes = _number(environ, size, f"{rank} is set, as torchrun does")
    if processes == 1:
        return Launch("torchrun", 1, 0, _HERE, 0)
    process = _rank(environ, rank, size, processes)
    if not environ.get("TORCHELASTIC_RUN_ID"):  # (by hand, or by a script)
        for other in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
            if environ.get(other) and _number(environ, other) not in (1, processes):
                raise ValueError(
                    f"{size}={processes} contradicts {other}={environ[other]}: unset {rank} and "
                    f"{size}, unless torchrun is to set them."
                )
    if address:
        return Launch("torchrun", processes, process, *_address(ADDRESS, address))
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise ValueError(
                f"{size}={processes} is set, and {name} isn't: set it in all processes, as "
                f"torchrun does, or set {ADDRESS} to the host and a free port of process 0."
            )
    # The port itself is taken by torchrun's own store.
    port = _port(f"torchrun {_number(environ, 'MASTER_PORT')}")
    return Launch("torchrun", processes, process, environ["MASTER_ADDR"], port)


def _by_open_mpi(environ: Mapping[str, str], address: str | None) -> Launch | None:
    size = "OMPI_COMM_WORLD_SIZE"
    if not environ.get(size):
        return None
    processes = _number(environ, size)
    process = _rank(environ, "OMPI_COMM_WORLD_RANK", size, processes)
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    port = _port(f"mpirun {environ.get('PMIX_NAMESPACE') or uri.partition(';')[0]}")
    if environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == environ[size]:
        return Launch("Open MPI", processes, process, _HERE, port)
    # 1514321088.0;tcp://10.96.0.1,10.148.0.1:34911, or tcp6://[fe80::b9b,fe80::2]:43370
    match = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri)
    if match is None and not address:
        raise ValueError(_several_nodes("mpirun", "mpirun -x"))
    return Launch("Open MPI", processes, process, match[1] or match[2] if match else _HERE, port)


def _by_mpich(environ: Mapping[str, str], address: str | None) -> Launch | None:
    size, rank = "PMI_SIZE", "PMI_RANK"
    if not environ.get(size):
        return None
    processes = _number(environ, size)
    process = _rank(environ, rank, size, processes)
    if environ.get("SLURM_STEP_NUM_TASKS") == environ[size]:
        return None  # the variables are those of srun, which knows the address
    if environ.get("MPI_LOCALNRANKS") != environ[size] and not address:
        raise ValueError(_several_nodes("mpiexec", "mpiexec -genv"))
    return Launch("MPICH", processes, process, _HERE, _port(f"mpiexec {_proxy()}"))


def _by_slurm(environ: Mapping[str, str], address: str | None) -> Launch | None:
    # The variables of the job step: in a job for eight tasks, SLURM_NTASKS is 8 even for a script
    # that runs alone.
    size = "SLURM_STEP_NUM_TASKS"
    if not environ.get(size) or (processes := _number(environ, size)) == 1:
        return None
    process = _rank(environ, "SLURM_PROCID", size, processes)
    port = _port(f"srun {environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}")
    if environ.get("SLURM_STEP_NUM_NODES") == "1":
        return Launch("Slurm", processes, process, _HERE, port)
    # node001, or node001,host2, or node[001-015],host2, or node[001,007-015]-ib
    nodes = "SLURM_STEP_NODELIST"
    match = re.match(r"([^,\[]+)(?:\[([^,\-\]]+)[^\]]*\]([^,\[]*))?", environ.get(nodes, ""))
    if match is None and not address:
        raise ValueError(
            f"{size}={processes} is set, and {nodes} isn't: pass on the environment of srun, or "
            f"set {ADDRESS} to the host and a free port of process 0."
        )
    host = "".join(part or "" for part in match.groups()) if match else _HERE
    return Launch("Slurm", processes, process, host, port)


def _several_nodes(launcher: str, option: str) -> str:
    return (
        f"{launcher} runs processes on several nodes and doesn't say where the first can be "
        f"reached: give {option} {ADDRESS} with its host and a free port, such as 10.0.0.1:12345."
    )


def _proxy() -> int:
    """The ancestor of this process by which MPICH launches processes on a node; scripts may be in
    between."""
    pid = os.getppid()
    while pid > 1 and (stat := pathlib.Path(f"/proc/{pid}/stat")).exists():
        if pathlib.Path(f"/proc/{pid}/comm").read_text().startswith("hydra"):
            return pid
        pid = int(stat.read_text().rpartition(")")[2].split()[1])
    return os.getppid()


def _port(job: str) -> int:
    """A port for a job, the same in all its processes; above those that systems give out."""
    return 61440 + zlib.crc32(job.encode()) % 4096


def _address(name: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{name} must be a host and a port, such as 10.0.0.1:12345; got {text!r}.")
    return host.strip("[]"), int(port)


def _number(environ: Mapping[str, str], name: str, why: str = "") -> int:
    text = environ.get(name, "").strip()
    if not text:
        raise ValueError(
            f"{why}, and {name} isn't: set both in all processes (each has a number of its own, "
            "from 0), or neither to run one process."
        )
    if not text.isdecimal():
        raise ValueError(f"{name} must be a whole number, got {environ[name]!r}.")
    return int(text)


def _rank(environ: Mapping[str, str], name: str, size: str, processes: int) -> int:
    process = _number(environ, name, f"{size}={processes} is set")
    if process >= processes:
        raise ValueError(
            f"{name}={process} contradicts {size}={processes}: the processes have the numbers 0 to "
            f"{processes - 1}."
        )
    return process
