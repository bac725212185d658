"""How a process finds out with which others it was launched."""

import subprocess
import sys

import pytest

import ensembleode as eo
from ensembleode.training.launch import Launch, launch_found, launch_given

from . import several


LAUNCHERS = ["JAX", "torchrun", "Open MPI", "MPICH", "Slurm"]


@pytest.mark.parametrize("by", LAUNCHERS)
def test_each_launcher(by):
    """All processes find the same place, of this job, and each its own number."""
    launches = [launch_found(several.variables(by, 3, i, 45000)) for i in range(3)]
    assert [x.process for x in launches] == [0, 1, 2]
    assert {x.by for x in launches} == {by}
    assert {x.processes for x in launches} == {3}
    assert {x.host for x in launches} <= {"127.0.0.1", "localhost"}
    assert len({x.port for x in launches}) == 1
    if by != "MPICH":  # (whose job is known by a process)
        assert launch_found(several.variables(by, 3, 0, 45001)).port != launches[0].port
    if by == "torchrun":  # whose own store is there
        assert launches[0].port != 45000
    assert launch_found(several.variables(by, 1, 0, 45000)) is None  # one process is alone


BATCH_SCRIPT = {"SLURM_JOB_ID": "2", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
ALONE = {
    "nothing": {},
    "a script of sbatch": BATCH_SCRIPT,
    "a notebook of srun": {**BATCH_SCRIPT, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0"},
    "an address of torch": {"MASTER_ADDR": "localhost", "MASTER_PORT": "1234"},
    "WORLD_SIZE of 1": {"WORLD_SIZE": "1"},
    "empty": {"RANK": "", "JAX_PROCESS_ID": ""},
}


@pytest.mark.parametrize("environ", ALONE.values(), ids=ALONE)
def test_alone(environ):
    assert launch_found(environ) is None


@pytest.mark.slow
def test_alone_nothing_is_touched():
    """JAX isn't started, nor configured; the signals, threads and cores are as they were."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, signal, threading, jax, ensembleode as eo\n"
            "state = lambda: (dict(jax.config.values), signal.getsignal(signal.SIGTERM),\n"
            "    threading.active_count(), os.sched_getaffinity(0), dict(os.environ))\n"
            "before = state(); eo.initialize(); eo.initialize(processes=1, process=0)\n"
            "assert state() == before\n"
            "jax.config.update('jax_num_cpu_devices', 3)  # refused once it has started\n",
        ],
        env=several.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


NODES = {
    "node001": "node001",
    "node001,host2": "node001",
    "node[001-015],host2": "node001",
    "node[001,007-015]": "node001",
    "rack1-node[07-15]-ib,host2": "rack1-node07-ib",
}


@pytest.mark.parametrize(("nodes", "first"), NODES.items())
def test_nodes_of_slurm(nodes, first):
    several_nodes = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": nodes}
    assert launch_found(several.variables("Slurm", 4, 1, 1) | several_nodes).host == first


@pytest.mark.parametrize(
    ("uri", "first"),
    [
        ("1531576320.0;tcp://10.96.0.1,10.148.0.1:34911", "10.96.0.1"),
        ("1314521088.0;tcp6://[fe80::b9b:ac5d,2620:10d::2]:43370", "fe80::b9b:ac5d"),
    ],
)
def test_nodes_of_open_mpi(uri, first):
    two = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_orte_hnp_uri": uri}
    assert launch_found(several.variables("Open MPI", 4, 1, 1) | two).host == first


def test_the_inner_launcher_counts():
    allocation = several.variables("Slurm", 2, 1, 1)
    torchrun = several.variables("torchrun", 16, 9, 1)
    assert launch_found(allocation | torchrun) == launch_found(torchrun)
    mpirun = several.variables("Open MPI", 16, 9, 1)
    assert launch_found(BATCH_SCRIPT | mpirun) == launch_found(mpirun)
    pmi = {"PMI_RANK": "1", "PMI_SIZE": "2"}
    assert launch_found(allocation | pmi) == launch_found(allocation)


@pytest.mark.parametrize("by", LAUNCHERS)
def test_an_address_that_is_given(by):
    """By an argument, before one in the environment; the launcher says the rest."""
    environ = several.variables(by, 2, 1, 45000)
    there = {"JAX_COORDINATOR_ADDRESS": "there:1"}
    assert launch_found(environ | there) == Launch(by, 2, 1, "there", 1)
    assert launch_found(environ | there, "[fd00::1]:2") == Launch(by, 2, 1, "fd00::1", 2)
    if by != "JAX":
        assert launch_found(environ | {"JAX_COORDINATOR_PORT": "77"}).port == 77


FIRST_OF_TWO = {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}
WRONG = {
    "RANK is set, as torchrun does, and WORLD_SIZE isn't": {"RANK": "1"},
    "WORLD_SIZE=2 is set, and RANK isn't": {"WORLD_SIZE": "2"},
    "RANK=2 contradicts WORLD_SIZE=2": {"RANK": "2", "WORLD_SIZE": "2"},
    "RANK must be a whole number, got '-1'": {"RANK": "-1", "WORLD_SIZE": "2"},
    "and MASTER_ADDR isn't": {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"},
    "and MASTER_PORT isn't": {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "there"},
    "WORLD_SIZE=2 contradicts OMPI_COMM_WORLD_SIZE=4": {
        **several.variables("torchrun", 2, 0, 1),
        **several.variables("Open MPI", 4, 0, 1),
        "TORCHELASTIC_RUN_ID": "",
    },
    "JAX_PROCESS_ID is set, and JAX_NUM_PROCESSES isn't": {"JAX_PROCESS_ID": "0"},
    "JAX_PROCESS_COUNT=2 is set, and JAX_PROCESS_ID isn't": {"JAX_PROCESS_COUNT": "2"},
    "and JAX_COORDINATOR_ADDRESS isn't: set it to the host and a free port": FIRST_OF_TWO,
    "JAX_NUM_PROCESSES and JAX_PROCESS_COUNT differ": FIRST_OF_TWO | {"JAX_PROCESS_COUNT": "3"},
    "JAX_COORDINATOR_ADDRESS is set, and nothing says how many": {
        "JAX_COORDINATOR_ADDRESS": "there:1"
    },
    "JAX_COORDINATOR_ADDRESS must be a host and a port, .* got 'there'": FIRST_OF_TWO
    | {"JAX_COORDINATOR_ADDRESS": "there"},
    "OMPI_COMM_WORLD_SIZE=2 is set, and OMPI_COMM_WORLD_RANK isn't": {"OMPI_COMM_WORLD_SIZE": "2"},
    "mpirun runs processes on several nodes .* give mpirun -x JAX_COORDINATOR_ADDRESS": {
        **several.variables("Open MPI", 4, 1, 1),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_MCA_orte_hnp_uri": "",
    },
    "mpiexec runs processes on several nodes .* -genv JAX_COORDINATOR_ADDRESS": {
        **several.variables("MPICH", 4, 1, 1),
        "MPI_LOCALNRANKS": "2",
    },
    "SLURM_STEP_NUM_TASKS=2 is set, and SLURM_PROCID isn't": {"SLURM_STEP_NUM_TASKS": "2"},
    "SLURM_STEP_NUM_TASKS=2 is set, and SLURM_STEP_NODELIST isn't": {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": "0",
    },
}


@pytest.mark.parametrize(("message", "environ"), WRONG.items())
def test_what_is_missing_or_contradicts(message, environ):
    with pytest.raises(ValueError, match=message):
        launch_found(environ)


def test_arguments():
    assert launch_given("there:1", 2, 1) == Launch("JAX", 2, 1, "there", 1)
    with pytest.raises(ValueError, match="process must be a number from 0 to 1"):
        launch_given("there:1", 2, 2)
    with pytest.raises(ValueError, match="coordinator must be a host and a port"):
        launch_given("there", 2, 1)
    for some in ({"processes": 2}, {"process": 1}, {"processes": 2, "process": 1}):
        with pytest.raises(ValueError, match="initialize wants all of coordinator, processes and"):
            eo.initialize(**some)
