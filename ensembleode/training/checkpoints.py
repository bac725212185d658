"""Checkpoints of a fit, from which it can be resumed; written by Orbax."""

import dataclasses
import errno
import functools
import itertools
import os
import pathlib
import pickle
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ..ground.extras import installing
from ..ground.files import locked, LockedError
from ..ground.keys import as_before, raw
from ..ground.logs import logger
from ..problem.options import check_count
from .identity import digest, leaves_by_name
from .parallel import Placement
from .processes import from_first, is_first
from .signals import signals_held_back


class CheckpointError(ValueError):
    """A checkpoint that a fit can't go on from: it is of another model, or of another kind of
    run."""


class Checkpoints(eqx.Module):
    """Where the checkpoints of a fit are, how often one is made, and how many are kept.

    - `path`: the folder.
    - `seconds`: the time between two checkpoints, a minute by default; one more is made at the end.
    - `steps`: the number of steps between two checkpoints, in place of `seconds`.
    - `keep`: how many of the last checkpoints are kept, besides the one with the lowest loss.
    - `allow_changes`: go on from a checkpoint even if the loss, the data, or what the optimiser
        does with its state have changed. With another loss or other data, the best parameters are
        determined anew.
    - `run_key`: a string that identifies the loss and the data, and that you change whenever these
        change. By default the loss is identified by the program that JAX traces, and the data by
        their numbers (those of files and iterables by the first ones). Pass a `run_key` if an
        iterable begins differently each time, or if the loss calls Python functions that can't be
        compared.

    Orbax writes each checkpoint as a whole or not at all. A checkpoint holds only arrays, so it can
    be read on any number of devices.
    """

    path: str | os.PathLike = eqx.field(static=True)
    seconds: float = eqx.field(default=60.0, static=True)
    steps: int | None = eqx.field(default=None, static=True)
    keep: int = eqx.field(default=3, static=True)
    allow_changes: bool = eqx.field(default=False, static=True)
    run_key: str | None = eqx.field(default=None, static=True)

    def __check_init__(self):
        check_count("keep", self.keep)
        if self.steps is not None:
            check_count("steps", self.steps)
        if not self.seconds >= 0:
            raise ValueError(f"seconds must not be negative, got {self.seconds!r}.")


class Position(NamedTuple):
    """The position of a fit in its data: `epoch` complete passes; and the numbers of batches and of
    items of the next pass, whose losses add up to `total`."""

    epoch: int = 0
    batches: int = 0
    items: int = 0
    total: float = 0.0


@dataclasses.dataclass(frozen=True)
class SavedStates:
    """The contents of a checkpoint: a pytree of `state`, `best` (the parameters) with the model's
    `best_state`, `losses` (`[step]`), `validations` (`[validation, (step, loss)]`) and
    `callback_state`, and static fields."""

    state: Any
    best: Any
    best_state: Any
    best_loss: float
    losses: np.ndarray
    validations: np.ndarray
    callback_state: PyTree
    step: int
    position: Position
    run: dict[str, Any]  # mustn't change: the number of items, the key, the loss and the data


jtu.register_dataclass(
    SavedStates,
    ["state", "best", "best_state", "losses", "validations", "callback_state"],
    ["best_loss", "step", "position", "run"],
)


# Those whose shape changes from step to step.
_GROWING = ("losses", "validations")


class Folder:
    """The folder with the checkpoints of one fit; no other fit may write to it at the same time."""

    def __init__(self, how: Checkpoints):
        try:
            import orbax.checkpoint as ocp
            from orbax.checkpoint import checkpoint_managers as policies
        except ImportError as e:
            raise ImportError(f"checkpoints are written by Orbax: {installing('train')}.") from e
        self._ocp, self._how = ocp, how
        self.path = pathlib.Path(how.path).absolute()
        only = jax.process_index()
        best = policies.BestN(
            get_metric_fn=lambda x: x["loss"],
            reverse=True,
            n=1,
            keep_checkpoints_without_metrics=False,
        )
        self._options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(how.keep), best]),
            enable_async_checkpointing=False,
            cleanup_tmp_directories=True,
            create=False,  # not possible together with `active_processes`
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                primary_host=only, active_processes={only}, barrier_sync_key_prefix=f"of{only}"
            ),
        )
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock: Any = None
        self._last = time.monotonic()

    @functools.cached_property
    def _manager(self) -> Any:
        """Orbax's manager; made only with the lock held, since it removes incomplete
        checkpoints."""
        return self._ocp.CheckpointManager(self.path, options=self._options)

    def due(self, step: int) -> bool:
        """Whether a checkpoint should be made after this step."""
        if self._how.steps is not None:
            return step % self._how.steps == 0
        return time.monotonic() - self._last >= self._how.seconds

    def save(self, saved: SavedStates) -> None:
        if not is_first() or saved.step in self._manager.all_steps():
            return
        args = self._ocp.args
        try:
            arrays, about = _flat(saved)
            with signals_held_back():
                loss = saved.best_loss if np.isfinite(saved.best_loss) else 1e308
                whole = args.Composite(arrays=args.StandardSave(arrays), about=args.JsonSave(about))
                self._manager.save(saved.step, args=whole, metrics={"loss": loss})
        except Exception as e:  # any error of Orbax and TensorStore about the file system
            raise CheckpointError(
                f"the checkpoint of step {saved.step} can't be written to {self.path}: "
                f"{_first_line(e)}. Those before it are kept."
            ) from e
        self._last = time.monotonic()

    def beginning(
        self,
        fresh: SavedStates,
        resume: bool,
        placed: Placement,
        identity: Callable[[], dict[str, Any]],
    ) -> tuple[SavedStates, set[str]]:
        """The states from which the fit starts: those of the last checkpoint that can be read (the
        first process reads it for all), or `fresh`; and whether the loss or the data, as given by
        `identity`, have changed.

        **Raises:** `CheckpointError` where the checkpoint is of another run, where none can be
        read, or where another fit writes to the folder.
        """
        found: Any = None
        if is_first():
            try:
                self._acquire()
                fresh.run.update(identity())
                if not resume:
                    for step in self._manager.all_steps():
                        self._manager.delete(step)
                found = self._newest(), fresh.run
            except Exception as e:  # passed on to the other processes, too
                if jax.process_count() == 1:
                    raise
                found = e
        found = pickle.loads(from_first(pickle.dumps(found)))
        if isinstance(found, Exception):
            raise found
        checkpoint, run = found
        fresh = dataclasses.replace(fresh, run=run)
        if checkpoint is None:
            return fresh, set()
        saved = _restored(*checkpoint, fresh, self._how.allow_changes)
        changed = _changes(saved.run, run, checkpoint[-1], self._how.allow_changes)
        names = "state", "best", "best_state"
        there = {name: placed.everywhere(getattr(saved, name)) for name in names}
        return dataclasses.replace(saved, **there, run=run), changed

    def _acquire(self) -> None:
        try:
            self._lock = locked(self.path / ".lock")
        except LockedError as e:
            raise CheckpointError(
                f"another fit (perhaps of another process) has its checkpoints in {self.path}: "
                "wait for it to end, or give another folder."
            ) from e
        except ImportError as e:
            raise ImportError(f"checkpoints need filelock: {installing('train')}.") from e
        except OSError as e:
            if e.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            logger.warning(
                f"the file system of {self.path} has no locks ({_first_line(e)}): see that no "
                "other fit writes there."
            )

    def _newest(self) -> tuple[dict, dict, pathlib.Path] | None:
        """The last checkpoint that can be read. Later ones are damaged, and are set aside; but only
        if some checkpoint can be read, as otherwise the fault may be that of the file system, or of
        this version."""
        steps = sorted(self._manager.all_steps(), reverse=True)
        damaged: dict[int, Exception] = {}
        for step in steps:
            try:
                found = self._read(step)
            except Exception as e:
                if not _is_damage(e):
                    raise
                damaged[step] = e
                continue
            for other, e in damaged.items():
                self._set_aside(other, e)
            return *found, self.path / str(step)
        if steps:
            raise CheckpointError(
                f"none of the {len(steps)} checkpoints in {self.path} could be read, and they are "
                f"left as they are: {_first_line(damaged[steps[0]])}. If nothing passing is the "
                "cause (the file system, another version of Orbax), begin anew in another folder."
            ) from damaged[steps[0]]
        return None

    def _set_aside(self, step: int, e: Exception) -> None:
        """Move a damaged checkpoint away from the place where the next one will be written."""
        place = self.path / str(step)
        names = (f"{step}.unreadable{'' if i == 0 else f'.{i}'}" for i in itertools.count())
        aside = next(x for x in (self.path / name for name in names) if not x.exists())
        logger.warning(
            f"the checkpoint {place} is damaged ({_first_line(e)}); it is now {aside.name}, and "
            "the one before is taken."
        )
        place.rename(aside)
        self._manager.reload()

    def close(self) -> None:
        if "_manager" in vars(self):
            self._manager.close()
        if self._lock is not None:
            self._lock.release()

    def _read(self, step: int) -> tuple[dict, dict]:
        args = self._ocp.args
        about = self._manager.restore(step, args=args.Composite(about=args.JsonRestore()))["about"]
        of = about["arrays"].items()
        like = {n: np.zeros(x["shape"], x["dtype"]) for n, x in of if 0 not in x["shape"]}
        arrays = self._manager.restore(step, args=args.Composite(arrays=args.StandardRestore(like)))
        arrays = {name: np.asarray(x) for name, x in arrays["arrays"].items()}
        for name, x in arrays.items():
            if digest(x) != about["arrays"][name]["digest"]:
                raise ValueError(f"{name} is not what was written")
        return arrays, about


def _flat(saved: SavedStates) -> tuple[dict, dict]:
    """The arrays of `saved` by name, without those that have no elements, as Orbax can't write
    them; and everything else."""
    arrays = {name: np.asarray(raw(x)) for name, x in leaves_by_name(saved)}
    about = {
        "arrays": {
            name: {"shape": list(x.shape), "dtype": x.dtype.str, "digest": digest(x)}
            for name, x in arrays.items()
        },
        "best_loss": float(saved.best_loss).hex(),
        "step": saved.step,
        "position": [*saved.position[:3], float(saved.position.total).hex()],
        "run": saved.run,
    }
    return {name: x for name, x in arrays.items() if x.size}, about


def _restored(
    arrays: dict, about: dict, path: pathlib.Path, like: SavedStates, allow_changes: bool
) -> SavedStates:
    for name in ("key",) if allow_changes else ("items", "key"):
        if (then := about["run"].get(name)) != like.run[name]:
            raise CheckpointError(
                f"{path} is of a run with {name} {then!r}, and this one has {like.run[name]!r}: "
                "give the same, or another folder, or resume=False."
            )
    names, there = dict(leaves_by_name(like)), about["arrays"]
    before = {name: _shape(x["shape"], x["dtype"]) for name, x in there.items()}
    structs = {name: jax.eval_shape(raw, x) for name, x in names.items()}
    here = {name: _shape(x.shape, x.dtype) for name, x in structs.items()}
    for name in {**here, **before}:
        then, now = before.get(name), here.get(name)
        if then == now or name in _GROWING:
            continue
        if then is None:
            what = f"it has no {name}, which is {now} here"
        elif now is None:
            what = f"it has {name}, which there is not here"
        else:
            what = f"its {name} is {then}, and {now} here"
        of = "callback" if name.startswith("callback_state") else "model or optimiser"
        raise CheckpointError(f"{path} is of another {of}: {what}.")

    begin = about["run"].get("optimizer", {}).get("begin", {})
    changed = begin.items() - like.run["optimizer"]["begin"].items()
    renewed = {f"state.{name}" for name, _ in changed}  # by the user: its values are taken

    def value(name, x):
        if name in renewed or name not in there:  # (Older checkpoints have no validations.)
            return x
        found = arrays.get(name, np.zeros(there[name]["shape"], there[name]["dtype"]))
        return found if name in _GROWING else as_before(x, found)

    *counts, total = about["position"]
    return dataclasses.replace(
        jtu.tree_unflatten(jtu.tree_structure(like), [value(*item) for item in names.items()]),
        best_loss=float.fromhex(about["best_loss"]),
        step=about["step"],
        position=Position(*counts, float.fromhex(total)),
        run=about["run"],
    )


def _changes(there: dict, here: dict, path: pathlib.Path, allowed: bool) -> set[str]:
    """Which of the loss, the data and the optimiser are known to differ from those of the
    checkpoint."""
    changed = {}
    for what, one in (("loss", "a loss"), ("optimizer", "an optimizer")):
        before, now = there.get(what, {}), here[what]
        way = next(iter(now))
        if now[way] is None or now[way] != before.get(way):
            known = now[way] is not None and before.get("versions") == now.get("versions")
            other = f"has another {what if way == 'traced' else way}"
            changed[what] = other if known else f"has {one} that can't be compared"
    kept, data = there.get("data") or {}, here["data"] or {}
    if differ := [name for name in {**kept, **data} if kept.get(name) != data.get(name)]:
        changed["data"] = f"has other data ({', '.join(differ[:3])})"
    if changed and not allowed:
        raise CheckpointError(
            f"{path} is of another fit: this one {' and '.join(changed.values())}. Give another "
            "folder, or resume=False to begin anew; or go on from its parameters with "
            "checkpoint=Checkpoints(folder, allow_changes=True). (Where both are the same, and "
            "can't be told to be, name them: Checkpoints(folder, run_key='...').)"
        )
    return set(changed)


def _is_damage(error: Exception) -> bool:
    """Whether an error says that the checkpoint on the disk is damaged, and not only that reading
    failed."""
    # TensorStore has one class for all errors; only the text tells errors of the operating system.
    if isinstance(error, FileNotFoundError):
        return True
    return not isinstance(error, OSError | MemoryError) and not any(
        x in str(error) for x in ("OS error", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED")
    )


def _shape(shape: Any, dtype: DTypeLike) -> str:
    return f"{np.dtype(dtype).name}[{', '.join(map(str, shape))}]"


def _first_line(e: Exception) -> str:
    return (str(e).splitlines() or [type(e).__name__])[0]
