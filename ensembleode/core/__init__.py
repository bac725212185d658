"""One solve, from `prob_func` to arrays and back.

- `trajectories.py`: a `prob_func` as arrays (`lane.py`). `trajectory_maker.py` makes one of them:
    traced (`traced_prob_func.py`), with NumPy arrays lifted (`lifting.py`), or called for each
    (`called_prob_func.py`).
- `state_tree.py`: states that are pytrees, as vectors.
- `saving.py`: which times are saved; `keys.py`: PRNG keys.
- `plan.py`, `job.py`: what is solved, as engines and executors are given it.
- `batches.py`: batch after batch, until a reduction stops. `batch_size.py`, `reruns.py`,
    `gather.py`, `every_step.py`, `reductions.py`, `placement.py`, `progress.py`: its parts.
- `fingerprint.py`, `installed.py`: what its numbers depend on; `files.py`, `store_files.py`,
    `stored.py`, `on_disk.py`: for stores.
- `stiffness.py`: why trajectories ran out of steps; `aliases.py`: what to write instead.
- `cpu_devices.py`, `given_device.py`, `host.py`, `logs.py`: the computer that it runs on.
"""
