"""One solve, from `prob_func` to arrays and back.

- `trajectories.py`: a `prob_func` as arrays; `saving.py`: which times are saved; `keys.py`.
- `plan.py`, `job.py`: what is solved, as engines and executors are given it.
- `batches.py`: batches, reruns and early stop; `reductions.py`, `progress.py`.
- `fingerprint.py`: what its numbers depend on; `files.py`, `on_disk.py`: for stores.
- `stiffness.py`: why trajectories ran out of steps; `other_names.py`: what to write instead.
- `cpu_devices.py`, `host.py`, `logs.py`: the computer that it runs on.
"""
