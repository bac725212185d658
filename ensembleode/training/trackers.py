"""Logs of a fit for TensorBoard, Weights & Biases and MLflow: `fit(..., log=TensorBoardLog(...))`.

A fit that goes on from a checkpoint tells of the steps since then again, with the same numbers.
"""

import os
from typing import Any

from ..ground.extras import installing
from .fit_result import FitState


def _missing(what: str, error: ImportError) -> ImportError:
    return ImportError(f"{what} is not installed: {installing('track')}. ({error})")


class TensorBoardLog:
    """Writes the numbers of each step for TensorBoard, without TensorFlow; needs the extra `track`.

    - `folder`: the folder of this run, as in `tensorboard --logdir` of its parent.

    **Raises:** `ImportError` without TensorBoard.
    """

    def __init__(self, folder: str | os.PathLike):
        try:
            from tensorboard.summary import Writer
        except ImportError as e:
            raise _missing("TensorBoard", e) from e
        self._writer = Writer(os.fspath(folder))

    def __call__(self, state: FitState) -> None:
        for name, value in state.numbers.items():
            self._writer.add_scalar(name, value, state.step)
        self._writer.flush()


class WandbLog:
    """Logs the numbers of each step to a run of Weights & Biases; needs the extra `track`.

    - `run`: what `wandb.init(...)` returns; by default the run that was begun last.

    **Raises:** `ImportError` without its package, `ValueError` where no run was begun.
    """

    def __init__(self, run: Any = None):
        try:
            import wandb
        except ImportError as e:
            raise _missing("Weights & Biases", e) from e
        self._run: Any = wandb.run if run is None else run
        if self._run is None:
            raise ValueError("WandbLog() has no run: begin one by wandb.init(...) before.")

    def __call__(self, state: FitState) -> None:
        self._run.log(state.numbers, step=state.step)


class MLflowLog:
    """Logs the numbers of each step to a run of MLflow; needs the extra `track`.

    - `run_id`: the id of the run; by default the active one, or a new one.

    **Raises:** `ImportError` without MLflow.
    """

    def __init__(self, run_id: str | None = None):
        try:
            import mlflow
        except ImportError as e:
            raise _missing("MLflow", e) from e
        self._mlflow = mlflow
        if run_id is None:
            run_id = (mlflow.active_run() or mlflow.start_run()).info.run_id
        self._run_id = run_id

    def __call__(self, state: FitState) -> None:
        self._mlflow.log_metrics(state.numbers, step=state.step, run_id=self._run_id)
