"""The execution of a solve, whichever executor runs its trajectories.

- `job.py`: what executors are given. `executor.py`: their interface.
- `run.py`: one batch, and the reruns of some of its trajectories; `batches.py`: one batch after the
    other, until a reduction stops. `batch_size.py`, `gather.py`, `every_step.py`, `every_event.py`,
    `reductions.py`, `progress.py`, `interrupts.py`: the parts of these two.
- `fingerprint.py`: everything that the resulting numbers depend on.
"""
