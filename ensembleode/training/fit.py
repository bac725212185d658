"""`fit`: the loop over steps of an optimiser."""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from jax import Array
from jaxtyping import PyTree

from ..problem.ensemble import EnsembleAlgorithm
from ..problem.options import check_count
from ..running.progress import bar
from .checkpoints import CheckpointError, Checkpoints, Folder, Position, SavedStates
from .data import BatchesAhead, Piece, source_of
from .fit_result import FitResult, FitState
from .identity import of_loss, of_optimizer
from .least_squares import check_params, LeastSquaresStep, LevenbergMarquardt
from .log import Log
from .microbatch import out_of_memory, smaller, that_fits
from .parallel import on_their_devices, Placement, placement
from .processes import from_first, is_first, needed, peers
from .signals import sigterm_raises, Terminated
from .step import checked, StepReport, traced, TrainingState, UpdateStep
from .validation import Validation, validation_of


@on_their_devices
def fit(
    loss: Callable,
    params: PyTree,
    data: Any = None,
    *,
    optimizer: Any,
    state: PyTree = None,
    epochs: int | None = None,
    maxiters: int | None = None,
    batch_size: int | None = None,
    devices: Any = None,
    ensemblealg: EnsembleAlgorithm | None = None,
    dist: bool = False,
    scaling: str = "strong",
    microbatch: int | str | None = None,
    accumulate: int = 1,
    shuffle: bool = True,
    key: Array | None = None,
    validation: Any = None,
    validate_every: int | None = None,
    patience: int | None = None,
    callback: Callable | None = None,
    callback_state: PyTree = None,
    checkpoint: Checkpoints | str | os.PathLike | None = None,
    resume: bool = True,
    log: Any = None,
    progress: bool = True,
) -> FitResult:
    """Minimise the mean of a loss over the items of some data, on one device or many.

    An item is anything that has one value of the loss: a trajectory, a data point, a collocation
    point. The mean is over the items. Splitting them into devices and microbatches changes neither
    the loss nor its gradient nor the resulting parameters, except for rounding.

    **Arguments:**

    - `loss`: `loss(params, batch, key) -> [item]`, the loss of each item of a batch. `batch` is
        like `data`, with the items of one device or of one microbatch. `key` has one PRNG key for
        each item, `[item]`, to `vmap` over; an item has the same key on every device.
        `loss(params, batch)` is allowed, too. Without `data`: `loss(params)`, one number.
    - `params`: a pytree, of which the floating-point numbers are trained: arrays of them, and
        Python's floats, which become arrays. (Floats in Equinox modules are constants, as Equinox
        has it; integers are not trained either.)
    - `data`: a pytree of arrays `[item, ...]` (in memory, memory-mapped by NumPy, or Zarr's), whose
        items are counted by their position, also in a Series of pandas and in arrays of xarray or
        PyTorch; or an iterable of batches, such as a list or a generator, each of which is a pytree
        of arrays with any number of items.
    - `optimizer`: any optimizer of optax, including those with a line search, such as
        `optax.lbfgs()`; or a [`LevenbergMarquardt`][ensembleode.LevenbergMarquardt], with which
        `loss` returns residuals, `[item, ...]`, and `fit` sums their squares.
    - `state`: the first state of the model, such as one of `eqx.nn.make_with_state`: a pytree of
        arrays that aren't trained. The loss then is `loss(params, state, batch, key) -> ([item],
        state)` (or without `key`; without `data`, `loss(params, state)`), and each step goes on
        from the state of the one before. Checkpoints hold it, and the result has it. Not with
        several devices or processes, `microbatch="auto"` or `LevenbergMarquardt`.
    - `epochs`, `maxiters`: the number of passes over the data, or the number of steps.
    - `batch_size`: the number of items of a step, by default all; the last batch of a pass may have
        fewer.
    - `devices`, `dist`, `ensemblealg`: the devices that share a batch, by default one. `devices` is
        a number or a list of devices; `dist=True` takes all; `ensemblealg` takes those of
        `EnsembleSerial()`, `EnsembleThreads(n)`, `EnsembleGPUArray(devices=...)` or
        `EnsembleGPUKernel(devices=...)`. With several devices, ensembles that the loss solves run
        on the device of their items. With several processes
        ([`initialize`][ensembleode.initialize]), all take part, with the same number of devices
        each.
    - `scaling`: `"strong"` splits `batch_size` items among the devices; `"weak"` gives each device
        that many.
    - `microbatch`: the number of items that a device computes with at a time; a smaller one takes
        less memory and gives the same gradient. `"auto"` finds the largest that fits.
    - `accumulate`: the number of batches in succession of which each step has the mean gradient
        over all of their items, as of one batch that is as large; a device computes with the items
        of one of them at a time. (The last step of a pass may have fewer.)
    - `shuffle`: whether each pass over arrays is in another order.
    - `key`: the PRNG key of the fit, by default `jax.random.key(0)`.
    - `validation`: data like `data` that the fit isn't trained with, whose mean loss tells which
        parameters are the best; or a function `validation(params)` that returns such a number
        (`validation(params, state)` with `state=`). Equinox modules of the parameters are in
        inference mode for such data, and each validation has the same keys.
    - `validate_every`: the number of steps between two validations, by default those of a pass over
        the data. There is one more at the end of the fit.
    - `patience`: the fit ends when so many validations in succession were not lower than the lowest
        before them.
    - `callback`: called after each step with a [`FitState`][ensembleode.FitState] (in the first
        process); if it returns true, the fit stops. A step counts when its callback is done: one
        that was interrupted in it comes again.
    - `callback_state`: a pytree of arrays or numbers that the callback is given, too, and returns
        anew: `callback(state, own) -> (stop, own)`. Checkpoints hold it, and the result has the
        last one.
    - `checkpoint`: a folder, or a [`Checkpoints`][ensembleode.Checkpoints]; needs the extra
        `train`. A run that was interrupted goes on from its last checkpoint, even with another
        number of devices; with the same number, it ends with the same bits. A checkpoint of another
        loss, of other data, or of another optimiser, is refused.
    - `resume`: False starts from the beginning, and removes the checkpoints that are there.
    - `log`: a file to which a line of JSON is added for each step, or of comma-separated values, if
        its name ends in `.csv`; or a function such as
        [`TensorBoardLog`][ensembleode.TensorBoardLog], [`WandbLog`][ensembleode.WandbLog] or
        [`MLflowLog`][ensembleode.MLflowLog], which is called with the `FitState` of each step; or a
        list of these.
    - `progress`: show a progress bar.

    **Returns:** a [`FitResult`][ensembleode.FitResult]. A loss or gradient that isn't finite stops
    the fit, and so does Ctrl-C; the result so far is returned. Any other exception that ends the
    fit (of the callback or of the data, or the `SystemExit` that SIGTERM raises) has the result so
    far as its attribute `result`; with `checkpoint`, a checkpoint is left, too.

    **Raises:** `ValueError` and `TypeError` for bad input, before anything is compiled;
    [`CheckpointError`][ensembleode.CheckpointError] for a checkpoint of another run, for one that
    can't be written, and for a folder that another fit writes to;
    [`ProcessLost`][ensembleode.ProcessLost] where another process is gone.

    >>> import jax.numpy as jnp, optax, ensembleode as eo
    >>> x = jnp.linspace(0.0, 1.0, 100)
    >>> def loss(slope, batch):
    ...     return (slope * batch["x"] - batch["y"]) ** 2
    >>> data = {"x": x, "y": 3 * x}
    >>> result = eo.fit(
    ...     loss, jnp.array(0.0), data, optimizer=optax.adam(0.1), epochs=100, batch_size=32
    ... )
    >>> round(float(result.params), 3), result.steps
    (3.0, 400)
    """
    started = time.perf_counter()
    if (epochs is None) == (maxiters is None):
        raise ValueError(
            "epochs and maxiters are both given; drop one of the two."
            if epochs is not None
            else "fit wants epochs= (passes over the data) or maxiters= (steps)."
        )
    for name, value in (("epochs", epochs), ("maxiters", maxiters), ("batch_size", batch_size)):
        if value is not None:
            check_count(name, value)
    check_count("accumulate", accumulate)
    size = None if microbatch in (None, "auto") else check_count("microbatch", microbatch)
    if scaling not in ("strong", "weak"):
        raise ValueError(f"scaling must be 'strong' or 'weak', got {scaling!r}.")
    least_squares = isinstance(optimizer, LevenbergMarquardt)
    if not least_squares and not hasattr(optimizer, "update"):
        raise TypeError(
            "optimizer must be one of optax, such as optax.adam(1e-3), or LevenbergMarquardt(): "
            f"{optimizer!r}."
        )
    placed = placement(devices, ensemblealg, dist)
    if data is None:
        of_data = {"epochs": epochs, "batch_size": batch_size, "microbatch": microbatch}
        _refuse_without_data(placed, **of_data, accumulate=None if accumulate == 1 else accumulate)
    if scaling == "weak":
        if batch_size is None:
            raise ValueError("scaling='weak' wants batch_size=, the items of each device.")
        batch_size *= placed.size
    key = jax.random.key(0) if key is None else key
    trained, static = eqx.partition(_with_arrays(params), eqx.is_inexact_array)
    if not jax.tree.leaves(trained):
        raise TypeError(
            "params has no floating-point numbers to train: make floats of its integers (1.0), and "
            "jnp.array(...) of the floats of an Equinox module."
        )
    if least_squares:
        check_params(trained, placed.first)
    has_state = state is not None
    if has_state:
        _check_state(state, placed, least_squares, microbatch)
    source = None
    if data is not None:
        source = source_of(data, batch_size, placed, shuffle, accumulate, padded=not has_state)
        if accumulate > 1 and microbatch is None:
            size = -(-source.items_of_batch // placed.size)
    if source is not None and epochs is not None and epochs > 1 and getattr(source, "once", False):
        raise ValueError(
            f"data can be gone over once only, and epochs={epochs}: give maxiters=, or an iterable "
            "that can begin anew, such as a list."
        )
    how = {"every": validate_every, "patience": patience, "padded": not has_state}
    validated = validation_of(validation, source, placed, **how)
    call, takes_key = checked(loss, source is not None, has_state)
    step = (LeastSquaresStep if least_squares else UpdateStep)(
        call,
        static,
        optimizer if least_squares else optax.with_extra_args_support(optimizer),
        placed,
        has_data=source is not None,
        repeats=not has_state and (source is None or (source.repeats and not takes_key)),
        microbatch=size,
    )
    loop = _FitLoop(
        step,
        source,
        key,
        epochs,
        maxiters,
        validated,
        callback,
        callback_state,
        microbatch == "auto",
        started,
    )
    begin = loop.beginning(trained, state)
    if isinstance(checkpoint, str | os.PathLike):
        checkpoint = Checkpoints(checkpoint)
    folder = None if checkpoint is None else Folder(checkpoint)
    result = None
    try:
        if folder is not None:

            def identity():
                rows = data = None
                of = {"optimizer": of_optimizer(step.optimizer, trained)}
                if checkpoint is not None and (run_key := checkpoint.run_key) is not None:
                    of["optimizer"]["traced"] = of["optimizer"]["traced"] or run_key
                    return {**of, "loss": {"run_key": run_key}, "data": data}
                if source is not None:
                    rows, data = source.example(), source.identity()
                    if validated is not None:
                        of_validation = validated.identity().items()
                        data |= {f"validation {name}": x for name, x in of_validation}
                return {**of, "loss": of_loss(step, begin.state, rows, key), "data": data}

            with peers(_advice(folder)):
                begin, changed = folder.beginning(begin, resume, placed, identity)
            begin = loop.with_changes(begin, changed)
        silent = {"disable": not (progress and is_first())}
        with Log(log, begin.step) as lines, bar(loop.steps, "step", begin.step, **silent) as shown:
            result = loop.run(begin, folder, lines, shown)
    except OSError as e:  # the last lines of the log can't be written
        if result is not None:
            e.result = result  # pyright: ignore
        raise
    finally:
        if folder is not None:
            folder.close()
    return result


def _with_arrays(params: PyTree) -> PyTree:
    """The parameters with arrays for Python's floats, except for those in Equinox modules, where
    floats are constants."""
    return jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, float | complex) else x,
        params,
        is_leaf=lambda x: isinstance(x, eqx.Module),
    )


def _check_state(state: PyTree, placed: Placement, least_squares: bool, microbatch: Any) -> None:
    """**Raises:** `TypeError` where the state of a model isn't made of arrays, and `ValueError`
    where it can't be carried from step to step."""
    wrong = [x for x in jax.tree.leaves(state) if not eqx.is_array_like(x)]
    if wrong or not jax.tree.leaves(state):
        what = f"it has {wrong[0]!r}" if wrong else f"{state!r} has none"
        raise TypeError(f"state must be a pytree of arrays, as of eqx.nn.make_with_state: {what}.")
    if placed.size > 1:
        raise ValueError(
            "state= is of a model on one device: several devices, or processes, would each have "
            "another one. Drop dist=, devices= or ensemblealg=; the solve in the loss may still "
            "run on several, by its own ensemblealg."
        )
    if least_squares:
        raise ValueError(
            "state= is of losses, and LevenbergMarquardt() has residuals, which it computes "
            "several times in a step: give an optimizer of optax, such as optax.lbfgs()."
        )
    if microbatch == "auto":
        raise ValueError(
            "state= goes from microbatch to microbatch, so the result depends on their size, and "
            "microbatch='auto' on the memory that is free: give microbatch= a number."
        )


def _advice(folder: Folder | None) -> str:
    """A sentence that says what to do where another process is gone."""
    if folder is None:
        return "start it again (with checkpoint= it would go on from there)"
    return "start it again, and it goes on from its last checkpoint, with any number of processes"


@dataclasses.dataclass
class _FitLoop:
    """The loop over the steps of a fit."""

    step: UpdateStep
    source: Any
    key: PyTree
    epochs: Any
    maxiters: int | None
    validation: Validation | None
    callback: Callable | None
    callback_state: PyTree  # the first one; None for a callback without
    automatic: bool  # whether the microbatch is to be found
    started: float

    def __post_init__(self):
        self._placed, self._static = self.step.placement, self.step.static
        self._some_static = bool(jax.tree.leaves(self._static))  # else combining is skipped
        self._order, key = jax.random.split(self.key)
        self.key = self._placed.everywhere(key)
        self._losses: list[float] = []
        # (A key that no step has.)
        self._validation_key = jax.random.fold_in(self.key, np.uint32(2**32 - 1))
        self._number: Any = None  # the number of the step, on the devices

    @property
    def steps(self) -> int | None:
        """The number of steps of the fit; None if it isn't known."""
        each = None if self.source is None else self.source.steps
        return self.maxiters or (each and each * self.epochs)

    def beginning(self, trained: PyTree, model_state: PyTree) -> SavedStates:
        optimizer = self.step.optimizer.init(trained)
        model_state = jax.tree.map(jnp.asarray, model_state)
        state = self._placed.everywhere(TrainingState(trained, optimizer, model_state))
        items = None if self.source is None else self.source.items
        run = {"items": items, "key": np.asarray(jax.random.key_data(self._order)).tolist()}
        return SavedStates(
            state,
            best=state.params,
            best_state=state.model_state,
            best_loss=np.inf,
            losses=np.zeros(0),
            validations=np.zeros((0, 2)),
            callback_state=jax.tree.map(np.asarray, self.callback_state),
            step=0,
            position=Position(),
            run=run,
        )

    def _is_done(self, now: SavedStates) -> bool:
        if self.maxiters is not None:
            return now.step >= self.maxiters
        return now.position.epoch >= self.epochs

    def run(self, begin: SavedStates, folder: Folder | None, lines: Log, shown: Any) -> FitResult:
        now, self._losses = begin, begin.losses.tolist()
        good, stopped, piece = now.state.params, "done", None
        self._number = self._placed.everywhere(np.int32(now.step))
        try:
            with sigterm_raises(), peers(_advice(folder)), self._pieces(begin.position) as pieces:
                while not self._is_done(now):
                    if self._why_no_more(now):
                        stopped = "patience"
                        break
                    began = time.perf_counter()
                    piece = next(pieces, None)
                    if piece is None:
                        stopped = "exhausted"
                        break
                    state, report = self._stepped(now, piece)
                    if not math.isfinite(report.loss):
                        stopped = "nonfinite"
                        break
                    after = self._after(now, piece, state, report.loss)
                    seconds = time.perf_counter() - began
                    after = self._validated(after, piece)
                    has_readers = self.callback is not None or lines.functions
                    given = self._given(now.state) if has_readers else (None, None)
                    told = self._told(after, piece, report, *given)
                    lines.write(told, seconds)
                    if not shown.disable:
                        shown.set_postfix_str(_postfix(told), refresh=False)
                        shown.update()
                    after, stop = self._called_back(after, told)
                    # (A step is done with its validation and its callback: one that is interrupted
                    # comes again.)
                    good, now = now.state.params, after
                    if stop:
                        stopped = "callback"
                        break
                    if folder is not None and folder.due(now.step):
                        self._save(now, folder, lines)
        except KeyboardInterrupt:
            stopped = "interrupted"
        except BaseException as e:
            self._keep(e, now, folder, lines)
            raise
        message = self._message(stopped, now, piece)
        if stopped == "nonfinite":
            now = dataclasses.replace(now, state=now.state._replace(params=good))
        result = self._result(now, stopped, message)
        if folder is not None and stopped != "nonfinite":
            try:
                self._save(now, folder, lines)
            except CheckpointError as e:
                e.result = result  # pyright: ignore
                raise
        return result

    def _result(self, now: SavedStates, stopped: Any, message: str) -> FitResult:
        return FitResult(
            self._whole_params(now.state.params),
            self._whole_params(now.best),
            now.best_loss,
            self._with_losses(now).losses,
            now.step,
            now.position.epoch,
            stopped,
            message,
            time.perf_counter() - self.started,
            now.validations[:, 1],
            now.validations[:, 0].astype(int),
            now.callback_state,
            self._own(now.state.model_state),
            self._own(now.best_state),
        )

    def _save(self, now: SavedStates, folder: Folder, lines: Log) -> None:
        """Write a checkpoint, and before that the lines of the log until then: a run that goes on
        from the checkpoint doesn't write them again."""
        lines.flush()
        folder.save(self._with_losses(now))

    def _keep(
        self, error: BaseException, now: SavedStates, folder: Folder | None, lines: Log
    ) -> None:
        """Keep the results from before an error: in a checkpoint, and as the `result` of the
        error."""
        if folder is not None and not isinstance(error, CheckpointError):
            try:
                self._save(now, folder, lines)
            except (CheckpointError, OSError) as e:
                error.add_note(f"ensembleode: {e}")
        what = "Ended by SIGTERM" if isinstance(error, Terminated) else "Ended by an exception"
        try:
            error.result = self._result(now, "failed", f"{what} after {now.step} steps.")  # pyright: ignore
        except Exception as e:  # devices, or another process, may be lost
            error.add_note(f"ensembleode: the parameters can't be had: {e}")

    def with_changes(self, begin: SavedStates, changed: set[str]) -> SavedStates:
        """The states to go on from if the loss or the data have changed, or if there is a
        validation now and was none, or the other way round: without the best parameters, which
        aren't known any more."""
        was_validated = len(begin.validations) > 0
        has_best = bool(np.isfinite(begin.best_loss))
        is_same = changed <= {"optimizer"}
        if is_same and (not has_best or was_validated == (self.validation is not None)):
            return begin
        state = begin.state
        known = [] if is_same else optax.tree.get_all_with_path(state.optimizer, "value")
        if known:
            # (A line search has kept the value of the previous loss.)
            nan = self._placed.everywhere(np.full_like(known[0][1], np.nan))
            state = state._replace(optimizer=optax.tree.set(state.optimizer, value=nan))
        position = Position(begin.position.epoch) if "data" in changed else begin.position
        return dataclasses.replace(
            begin,
            state=state,
            best=state.params,
            best_state=state.model_state,
            best_loss=np.inf,
            validations=begin.validations[:0],
            position=position,
        )

    def _pieces(self, position: Position) -> Any:
        if self.source is None:
            return contextlib.nullcontext(itertools.repeat(Piece(None, 0, True)))
        pieces = self.source.batches(position, self._order)
        return contextlib.closing(pieces if self.source.repeats else BatchesAhead(pieces))

    def _stepped(self, now: SavedStates, piece: Piece) -> tuple[TrainingState, StepReport]:
        state = now.state
        if self.step.dtype is None:
            dtype, mesh = traced(self.step, state, piece.batch, self.key)
            self.step = dataclasses.replace(self.step, dtype=dtype)
            state, self._number = self._placed.onto(mesh, (state, self._number))
            if self.automatic:
                self.step = that_fits(self.step, state, piece.batch, self.key, self._number)
        while True:
            try:
                compiled = self.step.compiled
                with needed():
                    new, number, report = compiled(state, piece.batch, self.key, self._number)
                    report = StepReport(*map(float, jax.device_get(report)))
                self._number = number
                return new, report
            except jax.errors.JaxRuntimeError as e:
                if not out_of_memory(e) or piece.batch is None:
                    raise
                if not self.automatic:
                    e.add_note("ensembleode: give microbatch='auto', or a smaller number.")
                    raise
                self.step = smaller(self.step, piece.batch, e)

    def _after(
        self, now: SavedStates, piece: Piece, state: TrainingState, loss: float
    ) -> SavedStates:
        self._losses.append(loss)
        epoch, batches, items, total = now.position
        batches, items = batches + piece.batches, items + piece.count
        total += loss * piece.count
        best = {}
        if self.validation is not None:
            pass
        elif self.source is None or self.source.repeats:
            if loss < now.best_loss:
                best = _best(now.state.params, state.model_state, loss)
        elif piece.last and total / items < now.best_loss:
            best = _best(state.params, state.model_state, total / items)
        position = Position(epoch + 1) if piece.last else Position(epoch, batches, items, total)
        return dataclasses.replace(now, state=state, step=now.step + 1, position=position, **best)

    def _validated(self, now: SavedStates, piece: Piece) -> SavedStates:
        """The states after a step with this piece, and after the validation if one is due."""
        if self.validation is None or not (
            self.validation.is_due(now.step, piece.last) or self._is_done(now)
        ):
            return now
        given = functools.partial(self._arguments, now.state)
        loss = self.validation.loss(self.step, now.state, self._validation_key, given)
        validations = np.concatenate([now.validations, [[now.step, loss]]])
        if not loss < now.best_loss:
            return dataclasses.replace(now, validations=validations)
        best = _best(now.state.params, now.state.model_state, loss)
        return dataclasses.replace(now, validations=validations, **best)

    def _why_no_more(self, now: SavedStates) -> str:
        return "" if self.validation is None else self.validation.why_no_more(now.validations)

    def _with_losses(self, now: SavedStates) -> SavedStates:
        return dataclasses.replace(now, losses=np.array(self._losses[: now.step]))

    def _whole_params(self, params: PyTree) -> PyTree:
        params = self._placed.home(params)
        return eqx.combine(params, self._static) if self._some_static else params

    def _given(self, state: TrainingState) -> tuple[PyTree, PyTree]:
        """The parameters and the state of the model, for functions of the user."""
        return self._whole_params(state.params), self._own(state.model_state)

    def _arguments(self, state: TrainingState) -> tuple:
        """The arguments of a loss without data."""
        params, model_state = self._given(state)
        return (params,) if model_state is None else (params, model_state)

    def _own(self, model_state: PyTree) -> PyTree:
        """A copy for the user. (An `equinox.nn.State` can be used only once.)"""
        return jax.tree.map(lambda x: x, self._placed.home(model_state))

    def _message(self, stopped: str, now: SavedStates, piece: Piece | None) -> str:
        if stopped == "nonfinite":
            where = f"of step {now.step + 1} (pass {now.position.epoch + 1} over the data)"
            return (
                f"The loss, or its gradient, {where} is not finite{self._culprits(now, piece)}. "
                "The parameters are the last with a finite one."
            )
        if stopped == "patience":
            return self._why_no_more(now)
        why = {"callback": "Stopped by the callback", "exhausted": "The data came to an end"}
        return f"{why.get(stopped, stopped.capitalize())} after {now.step} steps."

    def _culprits(self, now: SavedStates, piece: Piece | None) -> str:
        """The items whose loss isn't finite, as a text, where they can be found quickly."""
        if piece is None or piece.batch is None or self.step.microbatch or jax.process_count() > 1:
            return ""
        key = jax.random.fold_in(self.key, now.step)
        losses = self._placed.mapped(
            lambda shared, split: self.step.losses(*shared[0], *split, shared[1])[0]
        )
        given = now.state.params, now.state.model_state
        values = jax.jit(losses)((given, key), (piece.batch.rows, piece.batch.place))
        bad = np.flatnonzero(~np.isfinite(values[: piece.count]))
        leaves = jtu.tree_leaves_with_path(piece.batch.rows)
        some = [
            jtu.keystr(path) or "the data"
            for path, x in leaves
            if jnp.issubdtype(x.dtype, jnp.inexact) and jnp.isnan(x).any()
        ]
        missing = f"; {', '.join(some)} has missing observations (NaN): {_REMEDY}" if some else ""
        if not len(bad):
            return f" (though the loss of each item is{missing})"
        which = "" if piece.items is None else f", first that of item {piece.items[bad[0]]}"
        return f" (the loss of {len(bad)} of {piece.count} items{which}{missing})"

    def _told(
        self,
        now: SavedStates,
        piece: Piece,
        report: StepReport,
        params: PyTree,
        model_state: PyTree,
    ) -> FitState:
        """What a callback and the log are told of a step."""
        elapsed = time.perf_counter() - self.started
        step, last = now.validations[-1] if len(now.validations) else (0, math.nan)
        return FitState(
            now.step,
            now.position.epoch,
            report.loss,
            params,
            piece.count,
            elapsed,
            report.gradient_norm,
            report.learning_rate,
            float(last),
            bool(step == now.step),
            model_state,
        )

    def _called_back(self, now: SavedStates, told: FitState) -> tuple[SavedStates, bool]:
        """The states with what the callback keeps, and whether it wants the fit to stop."""
        if self.callback is None:
            return now, False
        stop = False
        if is_first():
            if self.callback_state is None:
                stop = bool(self.callback(told))
            else:
                stop, own = _stop_and_state(self.callback(told, now.callback_state))
                own = _checked_state(now.callback_state, own)
                now = dataclasses.replace(now, callback_state=own)
        return now, from_first(bytes([stop])) == b"\x01"


def _best(params: PyTree, model_state: PyTree, loss: float) -> dict[str, Any]:
    return {"best": params, "best_state": model_state, "best_loss": loss}


def _stop_and_state(returned: PyTree) -> tuple[bool, Any]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            "with callback_state=, callback(state, own) must return (stop, own); it returned "
            f"{returned!r}."
        )
    return bool(returned[0]), returned[1]


def _checked_state(before: PyTree, after: PyTree) -> PyTree:
    """What a callback keeps, in arrays like those before."""
    arrays = jax.tree.map(np.asarray, after)
    was, is_now = (jax.tree.map(lambda x: x.shape, tree) for tree in (before, arrays))
    if was != is_now:
        raise TypeError(
            "callback(state, own) must return an own like callback_state, with arrays of the "
            f"shapes {was}; it returned {is_now}."
        )
    return jax.tree.map(lambda old, x: x.astype(old.dtype, casting="same_kind"), before, arrays)


_REMEDY = (
    "replace them before anything is computed with them, as in error = jnp.where(jnp.isnan(y), "
    "0.0, model - jnp.nan_to_num(y))"
)


def _postfix(told: FitState) -> str:
    """The text behind the progress bar."""
    loss = f"loss {told.loss:.4g}"
    known = not math.isnan(told.validation_loss)
    return f"{loss}, validation {told.validation_loss:.4g}" if known else loss


def _refuse_without_data(placed: Placement, **given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} is of data, and there is none: fit(loss, params, data, ...).")
    if placed.size > 1:
        raise ValueError(
            "several devices or processes share the items of data, and there is none: give it, as "
            "in fit(loss, params, data, ...), or let the solve in the loss run on several, by its "
            "ensemblealg."
        )
