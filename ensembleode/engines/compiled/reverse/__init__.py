"""Reverse mode of the time loop: its turns are recorded, and replayed backwards.

- `pull_back.py`: the kernel. `record.py`: the memory of recorded turns and of checkpoints, from
    which they are recorded; `checkpoints.py`: which checkpoints are kept.
- `replay.py`: a turn backwards. `events_back.py`: its events.
"""
