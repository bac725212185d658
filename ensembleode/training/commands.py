"""What `ensembleode train` does, once its options are parsed."""

import os
import sys
import tempfile
from typing import Any

from ..cli import failed
from ..core.files import check_writable, written_whole
from ..tools.scripts import in_users_code, loaded, ScriptError, split


def run_train(
    problem: str,
    *,
    optimizer: str,
    learning_rate: float,
    distributed: bool,
    output: str | None,
    **options: Any,
) -> int:
    """Fit, print what came of it, and write the best parameters."""
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
        seed = options.pop("seed")
        result = fit(**of_fit, **options, key=jax.random.key(seed))
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
                place = _written(output, result.best)
            except OSError as e:
                return failed(e)
            print(f"the best parameters (loss {result.best_loss:.6g}) are in {place}")
            if place != output:
                return 1
    return 0 if result.stopped in ("done", "exhausted", "callback") else 1


def _rescue(output: str, error: BaseException) -> None:
    """Write what a fit found until the error."""
    from .processes import is_first

    result = getattr(error, "result", None)
    if result is not None and result.steps and is_first():
        place = _written(output, result.best)
        loss = f"loss {result.best_loss:.6g}"
        print(f"the best parameters so far ({loss}) are in {place}", file=sys.stderr)


def _written(output: str, params: Any) -> str:
    """The file with the parameters; another one, of the system's temporary folder, where there is
    no room any more."""
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


ALLOWED = ("loss", "params", "data", "optimizer", "callback")


def _checked(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or not {"loss", "params"} <= set(given) <= set(ALLOWED):
        what = sorted(given) if isinstance(given, dict) else type(given).__name__
        raise ScriptError(
            f"problem() must return a dict with loss and params, and if wanted data, optimizer and "
            f"callback; it returned {what}."
        )
    return given
