"""Where the trajectories of an ensemble run: plain descriptions, no machinery."""

import equinox as eqx


class EnsembleAlgorithm(eqx.Module):
    """Base class of the ensemble algorithms."""


class EnsembleSerial(EnsembleAlgorithm):
    """One trajectory after the other.

    The reference for everything else: each trajectory is solved by the program that `solve`
    runs on its problem alone, and gives the same bits.

    **Cost:** one solve a trajectory, and about 0.5 ms of Python each when called eagerly; the
    memory of one trajectory. Under `jit` it is a loop inside the program.

    **Limitations:** none.
    """


class EnsembleColumns(EnsembleAlgorithm):
    """One solve whose state is the matrix of all trajectories (within-ODE batching).

    The state is `[*state, trajectory]`: each trajectory is a column, and `f` is mapped over the
    columns, so that they are independent by construction and a product with shared weights
    is one matrix product. All columns take the same steps, chosen by the root-mean-square norm
    over the whole matrix, as in Julia; so a hard column is outvoted by many easy ones, and makes
    them all slower when it is not.

    **Cost:** one solve, with as many steps as the matrix as a whole needs, and the memory of all
    columns. Fastest for neural ODEs whose trajectories are alike. With a `batch_size` the columns
    of each batch are a matrix of their own, with steps of their own; and so are those rerun.

    **Limitations:** one return code for all (a column that fails fails the whole solve); the
    statistics give each trajectory the shared steps, so don't add them up.

    **Throws:** `ValueError` when `tspan`, `saveat`, `abstol`, `reltol` or `dt` differ by
    trajectory.
    """


class EnsembleGPUArray(EnsembleAlgorithm):
    """All trajectories of a batch at once, as arrays on JAX's default device.

    Each has its own steps, its own end and its own return code. The device is the
    accelerator where there is one, and the CPU otherwise (in one thread).

    **Cost:** one program; the loop runs until the slowest trajectory of the batch is done.
    Memory is that of a batch (`batch_size`).

    **Limitations:** one device.
    """
