"""The interpreter by which `scalarise.py` takes a program apart into a variable for each component.

- `interpreter.py`: evaluates a jaxpr; its rules are in `rules.py`, `indexing.py` and
    `control_flow.py`.
- `values.py`: the values that it computes with. `scalars.py`: arithmetic on single components.
"""
