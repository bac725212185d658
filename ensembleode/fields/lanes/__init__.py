"""A field for all lanes of a chunk at once: arrays of JAX whose last axis is the lane.

- `field.py`: what is done once, and what at each stage.
- `interpreter.py`: evaluates a jaxpr so; `primitives.py`, `indexing.py`, `control_flow.py`: the
    rules.
- `values.py`: what it computes with; `scalars.py`: arithmetic on single components.
"""
