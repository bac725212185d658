"""Where a fit goes on from: checkpoints by Orbax."""

import dataclasses
import hashlib
import os
import pathlib
import pickle
import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np

from ..keys import as_before, raw
from ..logs import logger
from ..options import check_count
from .parallel import Placement
from .processes import from_first, is_first


class CheckpointError(ValueError):
    """A checkpoint that can't be gone on from: of another model, or of another kind of run."""


class Checkpoints(eqx.Module):
    """Where checkpoints of a fit are, how often one is made, and how many are kept.

    - `path`: the folder.
    - `seconds`: how often one is made, besides at the end; a minute by default.
    - `steps`: make one every so many steps instead.
    - `keep`: how many of the last are kept, besides the one with the lowest loss.

    Each is written whole or not at all (by Orbax), and holds no more than arrays: it can be read
    on any number of devices.
    """

    path: str | os.PathLike = eqx.field(static=True)
    seconds: float = eqx.field(default=60.0, static=True)
    steps: int | None = eqx.field(default=None, static=True)
    keep: int = eqx.field(default=3, static=True)

    def __check_init__(self):
        check_count("keep", self.keep)
        if self.steps is not None:
            check_count("steps", self.steps)
        if not self.seconds >= 0:
            raise ValueError(f"seconds must not be negative, got {self.seconds!r}.")


class Position(NamedTuple):
    """How far a fit is in its data: `epoch` passes, and of the next so many batches and items,
    whose losses' sum is `total`."""

    epoch: int = 0
    pieces: int = 0
    items: int = 0
    total: float = 0.0


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a fit goes on from. `state`, `best` and `losses` are arrays.

    - `run`: what must be the same.
    """

    state: Any
    best: Any
    best_loss: float
    losses: np.ndarray
    step: int
    position: Position
    run: dict[str, Any]


class Folder:
    """The checkpoints of one fit.

    **Raises:** `ImportError` without Orbax.
    """

    def __init__(self, how: Checkpoints):
        try:
            import orbax.checkpoint as ocp
            from orbax.checkpoint import checkpoint_managers as policies
        except ImportError as e:
            raise ImportError(
                "checkpoints are written by Orbax: pip install 'ensembleode[train]'."
            ) from e
        self._ocp, self._how = ocp, how
        self.path = pathlib.Path(how.path).absolute()
        only = jax.process_index()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(
                [
                    policies.LatestN(how.keep),
                    policies.BestN(
                        get_metric_fn=lambda x: x["loss"],
                        reverse=True,
                        n=1,
                        keep_checkpoints_without_metrics=False,
                    ),
                ]
            ),
            enable_async_checkpointing=False,
            cleanup_tmp_directories=True,
            create=False,  # with `active_processes` it can't
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                primary_host=only, active_processes={only}, barrier_sync_key_prefix=f"of{only}"
            ),
        )
        self.path.mkdir(parents=True, exist_ok=True)
        self._manager = ocp.CheckpointManager(self.path, options=options)
        self._last = time.monotonic()

    def due(self, step: int) -> bool:
        """Whether one should be made after this step."""
        if self._how.steps is not None:
            return step % self._how.steps == 0
        return time.monotonic() - self._last >= self._how.seconds

    def save(self, saved: Saved) -> None:
        """(The first process does.)"""
        if not is_first() or saved.step in self._manager.all_steps():
            return
        arrays, about = _flat(saved)
        args = self._ocp.args
        self._manager.save(
            saved.step,
            args=args.Composite(arrays=args.StandardSave(arrays), about=args.JsonSave(about)),
            metrics={"loss": saved.best_loss if np.isfinite(saved.best_loss) else 1e308},
        )
        self._last = time.monotonic()

    def beginning(self, fresh: Saved, resume: bool, placed: Placement) -> Saved:
        """What to go on from: the last checkpoint that can be read; `fresh` where there is none.

        The first process reads it for all.

        **Raises:** `CheckpointError` where it is of another run, or none can be read.
        """
        found = b""
        if is_first():
            if not resume:
                self._clear()
            try:
                found = pickle.dumps(self._newest())
            except CheckpointError as e:
                found = pickle.dumps(e)
        found = pickle.loads(from_first(found))
        if isinstance(found, CheckpointError):
            raise found
        if found is None:
            return fresh
        saved = _restored(*found, fresh)
        return dataclasses.replace(
            saved, state=placed.everywhere(saved.state), best=placed.everywhere(saved.best)
        )

    def _newest(self) -> tuple[dict, dict, pathlib.Path] | None:
        steps = sorted(self._manager.all_steps(), reverse=True)
        for step in steps:
            try:
                return *self._read(step), self.path / str(step)
            except Exception as e:  # whatever Orbax and TensorStore say of broken files
                logger.warning(
                    "the checkpoint of step %d in %s can't be read (%s); the one before is taken.",
                    step,
                    self.path,
                    _first_line(e),
                )
                # Out of the way of the one that will be written there.
                self._manager.delete(step)
        if steps:
            raise CheckpointError(
                f"none of the {len(steps)} checkpoints in {self.path} could be read. Begin anew, "
                "in another folder."
            )
        return None

    def _clear(self) -> None:
        for step in self._manager.all_steps():
            self._manager.delete(step)

    def close(self) -> None:
        self._manager.close()

    def _read(self, step: int) -> tuple[dict, dict]:
        args = self._ocp.args
        about = self._manager.restore(step, args=args.Composite(about=args.JsonRestore()))["about"]
        like = {
            name: np.zeros(x["shape"], x["dtype"])
            for name, x in about["arrays"].items()
            if 0 not in x["shape"]
        }
        arrays = self._manager.restore(step, args=args.Composite(arrays=args.StandardRestore(like)))
        arrays = {name: np.asarray(x) for name, x in arrays["arrays"].items()}
        for name, x in arrays.items():
            if _digest(x) != about["arrays"][name]["digest"]:
                raise ValueError(f"{name} is damaged")
        return arrays, about


def _flat(saved: Saved) -> tuple[dict, dict]:
    """Its arrays, by name (Orbax takes none without elements), and what else it is."""
    arrays = {name: np.asarray(raw(x)) for name, x in _named(saved)}
    about = {
        "arrays": {
            name: {"shape": list(x.shape), "dtype": x.dtype.str, "digest": _digest(x)}
            for name, x in arrays.items()
        },
        "best_loss": float(saved.best_loss).hex(),
        "step": saved.step,
        "position": [*saved.position[:3], float(saved.position.total).hex()],
        "run": saved.run,
    }
    return {name: x for name, x in arrays.items() if x.size}, about


def _restored(arrays: dict, about: dict, path: pathlib.Path, like: Saved) -> Saved:
    _check_run(about["run"], like.run, path)
    names = dict(_named(like))
    there = about["arrays"]
    for name, x in names.items():
        if name == "losses":
            continue
        x = jax.eval_shape(raw, x)
        if name not in there:
            raise CheckpointError(
                f"{path} is of another model or optimiser: it has no {name}, which is "
                f"{_shape(x.shape, x.dtype)} here."
            )
        found = there[name]
        if (tuple(found["shape"]), np.dtype(found["dtype"])) != (x.shape, x.dtype):
            raise CheckpointError(
                f"{path} is of another model or optimiser: its {name} is "
                f"{_shape(found['shape'], found['dtype'])}, and {_shape(x.shape, x.dtype)} here."
            )
    more = next((name for name in there if name not in names), None)
    if more is not None:
        raise CheckpointError(
            f"{path} is of another model or optimiser: it has {more}, which there is not here."
        )

    def value(name, x):
        found = arrays.get(name, np.zeros(there[name]["shape"], there[name]["dtype"]))
        return found if name == "losses" else as_before(x, found)

    leaves = [value(name, x) for name, x in names.items()]
    *counts, total = about["position"]
    found = jtu.tree_unflatten(jtu.tree_structure(_arrays(like)), leaves)
    return Saved(
        **found._asdict(),
        best_loss=float.fromhex(about["best_loss"]),
        step=about["step"],
        position=Position(*counts, float.fromhex(total)),
        run=about["run"],
    )


class _Arrays(NamedTuple):
    """What of it is arrays."""

    state: Any
    best: Any
    losses: Any


def _arrays(saved: Saved) -> _Arrays:
    return _Arrays(saved.state, saved.best, saved.losses)


def _named(saved: Saved) -> list[tuple[str, Any]]:
    leaves = jtu.tree_leaves_with_path(_arrays(saved))
    return [(jtu.keystr(path, simple=True, separator="."), x) for path, x in leaves]


def _check_run(there: dict, here: dict, path: pathlib.Path) -> None:
    for name, value in here.items():
        if there.get(name) != value:
            raise CheckpointError(
                f"{path} is of a run with {name} {there.get(name)!r}, and this one has {value!r}: "
                "give the same, or another folder, or resume=False."
            )


def _shape(shape: Any, dtype: Any) -> str:
    return f"{np.dtype(dtype).name}[{', '.join(map(str, shape))}]"


def _digest(x: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()


def _first_line(e: Exception) -> str:
    return (str(e).splitlines() or [type(e).__name__])[0]
