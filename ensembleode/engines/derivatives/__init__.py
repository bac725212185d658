"""Derivatives of a solve, of any order, for all engines.

- `primitives.py`, `batching.py`, `derivatives.py`: the primitives of JAX that stand for a solve.
- `flow.py`: a solve as a function of its numbers. `along.py`, `rates.py`: how saved states change
    with their times. `rest.py`: states at rest.
"""
