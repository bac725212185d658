"""What `ensembleode train` does, once its options are parsed."""

from typing import Any

from ..cli import failed
from ..scripts import loaded, ScriptError, split


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
    import equinox as eqx
    import jax
    import optax

    from .fit import fit
    from .processes import initialize, is_first

    try:
        if distributed:
            initialize()
        of_fit = dict(_checked(loaded(*split(problem))()))
        if "optimizer" not in of_fit:
            make = getattr(optax, optimizer, None)
            if not callable(make):
                raise ScriptError(f"optax has no optimiser {optimizer!r}.")
            of_fit["optimizer"] = make(learning_rate)
        seed = options.pop("seed")
        result = fit(**of_fit, **options, key=jax.random.key(seed))
    except (ScriptError, ValueError, TypeError, ImportError) as e:
        return failed(e)
    if is_first():
        print(result.message)
        if result.steps:
            print(f"loss {result.losses[0]:.6g} at first, {result.losses[-1]:.6g} at last")
        if output is not None:
            eqx.tree_serialise_leaves(output, result.best)
            print(f"the best parameters (loss {result.best_loss:.6g}) are in {output}")
    return 0 if result.stopped in ("done", "exhausted", "callback") else 1


ALLOWED = ("loss", "params", "data", "optimizer", "callback")


def _checked(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or not {"loss", "params"} <= set(given) <= set(ALLOWED):
        what = sorted(given) if isinstance(given, dict) else type(given).__name__
        raise ScriptError(
            f"problem() must return a dict with loss and params, and if wanted data, optimizer and "
            f"callback; it returned {what}."
        )
    return given
