"""A field for all lanes of a chunk at once: arrays of JAX whose last axis is the lane.

- `field.py`: the field as an object, with its work split into what is done once and what is done at
    each stage.
- `interpreter.py`: evaluates a jaxpr for all lanes; its rules are in `primitives.py`, `indexing.py`
    and `control_flow.py`.
- `values.py`: the values that the interpreter computes with. `scalars.py`: arithmetic on single
    components.
"""
