"""Training: data-parallel fits, and the loss functions of DiffEqFlux.

- `fit.py`: the loop over steps; `step.py`, `least_squares.py`: a step. `fit_result.py`: what it
    gives. `validation.py`: held-out data, and early stopping. `log.py`, `trackers.py`: logs.
- `data.py`: batches. `microbatch.py`: how many items at a time. `parallel.py`: devices.
    `processes.py`, `launch.py`, `lifelines.py`: processes. `signals.py`: SIGTERM.
- `checkpoints.py`, `identity.py`: going on with the same fit.
- `multiple_shooting.py`, `collocation.py`, `measured.py`: losses. `predict.py`: predictions.
"""
