"""One solve, from `prob_func` to arrays and back.

- `trajectories.py`: a `prob_func` as arrays (`lane.py`). `trajectory_maker.py` makes one of them:
    traced (`traced_prob_func.py`), with NumPy arrays lifted, or called for each
    (`called_prob_func.py`).
- `saving.py`: which times are saved.
- `plan.py`, `job.py`: what is solved, as engines and executors are given it.
- `run.py`: one batch, and the reruns of some of its trajectories; `batches.py`: one batch after the
    other, until a reduction stops. `batch_size.py`, `gather.py`, `every_step.py`, `every_event.py`,
    `reductions.py`, `progress.py`: their parts.
- `fingerprint.py`: everything that the resulting numbers depend on.
"""
