"""The command `ensembleode train`. Its imports are inside of the function, so that `--help` is
quick."""

import os
import sys
import tempfile
from typing import Any, Literal

from ..ground.files import check_writable, written_whole
from ..ground.logs import failed
from ..tools.scripts import in_users_code, loaded, ScriptError, split


def train(
    problem: str,
    *,
    epochs: int | None = None,
    maxiters: int | None = None,
    batch_size: int | None = None,
    optimizer: str = "adam",
    learning_rate: float = 1e-3,
    n_gpus: int | None = None,
    devices: int | None = None,
    dist: bool = False,
    scaling: Literal["strong", "weak"] = "strong",
    microbatch: int | Literal["auto"] | None = None,
    accumulate: int = 1,
    validate_every: int | None = None,
    patience: int | None = None,
    seed: int = 0,
    checkpoint: str | None = None,
    fresh: bool = False,
    log: str | None = None,
    output: str | None = None,
    distributed: bool = False,
    quiet: bool = False,
) -> int:
    """Fit the parameters of a model to data, as `fit` does.

    Args:
        problem: A function without arguments, as "script.py:problem". It returns a dict with the
            loss and params of fit, and optionally data, validation, state, optimizer, callback and
            callback_state.
        epochs: The number of passes over the data.
        maxiters: Alternatively, the number of steps.
        batch_size: The number of items of a step; by default all.
        optimizer: The name of an optimizer of optax, where problem returns none.
        learning_rate: Its learning rate.
        n_gpus: The number of GPUs that share a batch.
        devices: The same, for devices of whatever kind JAX computes on.
        dist: Let all devices share a batch.
        scaling: Whether batch_size is that of a step (strong) or of each device (weak).
        microbatch: The number of items that a device computes with at a time; auto finds the
            largest that fits.
        accumulate: The number of batches whose mean gradient is one update.
        validate_every: The number of steps from one validation to the next; by default those of an
            epoch.
        patience: The number of validations without a lower loss after which training ends.
        seed: The seed of the PRNG key.
        checkpoint: A folder for checkpoints; a run that was interrupted goes on from its last
            checkpoint.
        fresh: Start from the beginning, even if there are checkpoints.
        log: A file that gets a line of JSON for each step.
        output: A file for the best parameters (written by Equinox); with a state of the model, for
            the pair of both.
        distributed: Join the processes that mpirun, srun or torchrun launched with this one.
        quiet: Show no progress bar.
    """
    if n_gpus is not None and devices is not None:
        return failed("n_gpus and devices are both given; drop one.")
    import jax
    import optax

    from .fit import fit
    from .processes import initialize, is_first

    try:
        if distributed:
            initialize()
        if output is not None and is_first():
            check_writable(output)
        of_fit = dict(_checked(loaded(*split(problem))()))
        if "optimizer" not in of_fit:
            make = getattr(optax, optimizer, None)
            if not callable(make):
                raise ScriptError(f"optax has no optimiser {optimizer!r}.")
            of_fit["optimizer"] = make(learning_rate)
        result = fit(
            **of_fit,
            epochs=epochs,
            maxiters=maxiters,
            batch_size=batch_size,
            devices=n_gpus if devices is None else devices,
            dist=dist,
            scaling=scaling,
            microbatch=microbatch,
            accumulate=accumulate,
            validate_every=validate_every,
            patience=patience,
            key=jax.random.key(seed),
            checkpoint=checkpoint,
            resume=not fresh,
            log=log,
            progress=not quiet,
        )
    except BaseException as e:
        if output is not None:
            _rescue(output, e)
        of_arguments = isinstance(e, ScriptError | ValueError | TypeError | ImportError | OSError)
        if not of_arguments or in_users_code(e):
            raise
        return failed(e)
    if is_first():
        print(result.message)
        if result.steps:
            print(f"loss {result.losses[0]:.6g} at first, {result.losses[-1]:.6g} at last")
        if output is not None:
            try:
                place = _written(output, _best(result))
            except OSError as e:
                return failed(e)
            print(f"the best parameters (loss {result.best_loss:.6g}) are in {place}")
            if place != output:
                return 1
    return 0 if result.stopped in ("done", "exhausted", "callback", "patience") else 1


def _best(result: Any) -> Any:
    """What `output` keeps of a fit."""
    return result.best if result.best_state is None else (result.best, result.best_state)


def _rescue(output: str, error: BaseException) -> None:
    """Write the best parameters that a fit had found when an error ended it."""
    from .processes import is_first

    result = getattr(error, "result", None)
    if result is not None and result.steps and is_first():
        place = _written(output, _best(result))
        loss = f"loss {result.best_loss:.6g}"
        print(f"the best parameters so far ({loss}) are in {place}", file=sys.stderr)


def _written(output: str, params: Any) -> str:
    """The path of the file with the parameters; it is in the temporary folder if there is no room
    for it elsewhere."""
    import equinox as eqx

    try:
        with written_whole(output) as file:
            eqx.tree_serialise_leaves(file, params)
    except OSError as e:
        failed(e)
        folder = tempfile.mkdtemp(prefix="ensembleode-")
        output = os.path.join(folder, os.path.basename(output))
        eqx.tree_serialise_leaves(output, params)
    return output


def _checked(given: Any) -> dict[str, Any]:
    more = ("data", "validation", "state", "optimizer", "callback", "callback_state")
    allowed = {"loss", "params", *more}
    if not isinstance(given, dict) or not {"loss", "params"} <= set(given) <= allowed:
        what = sorted(given) if isinstance(given, dict) else type(given).__name__
        raise ScriptError(
            f"problem() must return a dict with loss and params, and if wanted any of "
            f"{', '.join(more)}; it returned {what}."
        )
    return given
