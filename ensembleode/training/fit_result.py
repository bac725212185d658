"""The result of a fit, and its state after each step."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import equinox as eqx
import numpy as np
from jaxtyping import PyTree


class FitState(NamedTuple):
    """The state of a fit, as its callback gets it.

    - `step`: the number of steps done, including this one; `epoch`: the number of passes over the
        data.
    - `loss`: the loss of this step's batch, before the step; `params`: the parameters that it is
        the loss of.
    - `items`: the number of items of the batch (0 without data); `elapsed`: the seconds so far.
    - `gradient_norm`: the Euclidean norm of the gradient of `loss`.
    - `learning_rate`: that of this step, where the state of the optimizer has one, as with
        `optax.inject_hyperparams(optax.adam)(learning_rate=schedule)` or a line search; else NaN.
    - `validation_loss`: the last one (NaN before the first); it is of the parameters after a step.
    - `validated`: whether that is of this step.
    - `state`: the state of the model that the loss was given; None without `state=`.
    """

    step: int
    epoch: int
    loss: float
    params: PyTree
    items: int
    elapsed: float
    gradient_norm: float
    learning_rate: float
    validation_loss: float
    validated: bool
    state: Any = None

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers of this step by their names, without those that it doesn't have."""
        found = {"epoch": self.epoch, "loss": self.loss, "gradient_norm": self.gradient_norm}
        if not math.isnan(self.learning_rate):
            found["learning_rate"] = self.learning_rate
        if self.validated:
            found["validation_loss"] = self.validation_loss
        return found


@dataclasses.dataclass(frozen=True)
class FitResult:
    """The result of a fit.

    - `params`: the parameters after the last step.
    - `best`: the parameters with the lowest loss. With `validation=`, it is the lowest validation
        loss. Otherwise, if each step has all data, it is the lowest of all steps; if not, it is the
        lowest mean over a pass, with the parameters at the end of that pass.
    - `best_loss`: that loss (infinite before the first pass, or validation, is done).
    - `losses`: `[step]`, the loss of each step's batch, before the step.
    - `steps`, `epochs`: how many are done.
    - `stopped`: why the fit ended: `"done"`, `"callback"`, `"patience"` (the validation loss went
        down no more), `"nonfinite"` (`params` are then the last ones with a finite loss),
        `"interrupted"` (Ctrl-C), `"exhausted"` (the data came to an end), or `"failed"` (this is
        the `result` attribute of an exception).
    - `message`: the same in a sentence.
    - `elapsed`: seconds, without those before a restart.
    - `validation_losses`: `[validation]`, and `validation_steps`: `[validation]`, after how many
        steps each was computed.
    - `callback_state`: the last one that the callback returned (in the first process).
    - `state`, `best_state`: the state of the model that belongs to `params`, and to `best`; None
        without `state=`.
    """

    params: PyTree
    best: Any
    best_loss: float
    losses: np.ndarray
    steps: int
    epochs: int
    stopped: Literal[
        "done", "callback", "patience", "nonfinite", "interrupted", "exhausted", "failed"
    ]
    message: str
    elapsed: float
    validation_losses: np.ndarray
    validation_steps: np.ndarray
    callback_state: PyTree
    state: Any = None
    best_state: Any = None

    def __repr__(self) -> str:
        shapes = eqx.tree_pformat(self.params, short_arrays=True, width=60).splitlines()
        best = f"best {self.best_loss:.4g}"
        lines = {
            "why": self.message,
            "loss": _from_first_to_last(self.losses, best * (not len(self.validation_losses))),
            "validation": _from_first_to_last(self.validation_losses, best),
            "params": f"{shapes[0]}{' ...' if len(shapes) > 1 else ''}",
            "elapsed": f"{self.elapsed:.3g} s",
        }
        if not len(self.validation_losses):
            del lines["validation"]
        width = max(map(len, lines)) + 2
        return "\n".join(
            [
                f"FitResult: {self.stopped} after {self.steps} steps, {self.epochs} epochs",
                *(f"  {name:{width}}{text}" for name, text in lines.items()),
            ]
        )

    def plot(self, ax: Any = None, *, smoothing: int | None = None, **style: Any) -> Any:
        """Plot the loss of each step, and that of each validation, on a logarithmic axis, with
        matplotlib (the extra `plot`).

        **Arguments:**

        - `ax`: the axes to draw on, by default new ones.
        - `smoothing`: the loss is a mean over so many steps, and that of each step is drawn
            faintly; by default a fiftieth of the steps, and 1 (no smoothing) where each step has
            all data, or for fewer than 100 steps.
        - `style`: options of the line of the loss, such as `color=` or `label=`.

        **Returns:** the axes.
        """
        import matplotlib.pyplot as plt
        from matplotlib.colors import to_hex

        if ax is None:
            _, ax = plt.subplots(layout="constrained")
        n, several = len(self.losses), len(self.validation_losses) > 0
        if smoothing is None:
            smoothing = n // 50 if n >= 100 and self.epochs < n else 1
        width = max(1, min(smoothing, n))
        means = np.convolve(self.losses, np.full(width, 1 / width), "valid")
        style = ({"label": "loss"} if several else {}) | style
        (line,) = ax.plot(np.arange(len(means)) + (width - 1) / 2, means, **style)
        if width > 1:
            faint = {"color": line.get_color(), "alpha": 0.25, "linewidth": 0.8, "zorder": 1}
            ax.plot(np.arange(n), self.losses, **faint)
        if several:
            marker = "o" if len(self.validation_losses) <= 50 else None
            used = to_hex(line.get_color())
            color = next(x for x in ("C1", "C0") if to_hex(x) != used)
            how = {"marker": marker, "markersize": 3, "label": "validation", "color": color}
            ax.plot(self.validation_steps, self.validation_losses, **how)
            ax.legend()
        if all((x > 0).all() for x in (self.losses, self.validation_losses)):
            ax.set_yscale("log")
        ax.set(xlabel="step", ylabel="loss")
        return ax


def _from_first_to_last(losses: np.ndarray, best: str) -> str:
    ends = f"{losses[0]:.4g} to {losses[-1]:.4g}" if len(losses) else ""
    return ", ".join(x for x in (ends, best) if x)
