"""What the rest stands on, and which knows no equation.

- `state_tree.py`: states that are pytrees, as vectors; `retcode.py`: how a trajectory ended.
- `keys.py`: PRNG keys; `lifting.py`: NumPy arrays indexed by tracers; `placement.py`: where arrays
    are; `recent.py`: how long compiled programs are kept.
- `files.py`, `on_disk.py`: files, and arrays in them; `installed.py`, `version.py`: what is known
    by its name.
- `cpu_devices.py`, `given_device.py`, `host.py`, `logs.py`: the computer that it runs on.
"""
