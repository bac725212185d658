"""The foundations of the package: modules that know nothing of differential equations.

- `state_tree.py`: states that are pytrees, as vectors; `retcode.py`: how a trajectory ended.
- `keys.py`: PRNG keys; `lifting.py`: NumPy arrays indexed by tracers; `recent.py`: how long
    compiled programs are kept; `hidden_object.py`: objects in a pytree that JAX doesn't see.
- `devices/`: where arrays are, and how many CPUs there are.
- `files.py`, `on_disk.py`: files, and arrays in them; `installed.py`, `version.py`: names and
    versions of packages.
- `host.py`, `deep_stack.py`, `logs.py`: the computer that the process runs on.
"""
