"""The execution of a solve, apart from where its trajectories run.

- `job.py`, `executor.py`: what executors are given, and what they are.
- `run.py`: one batch, and the reruns of some of its trajectories; `batches.py`: one batch after the
    other, until a reduction stops. `batch_size.py`, `gather.py`, `every_step.py`, `every_event.py`,
    `reductions.py`, `progress.py`, `interrupts.py`: their parts.
- `fingerprint.py`: everything that the resulting numbers depend on.
"""
