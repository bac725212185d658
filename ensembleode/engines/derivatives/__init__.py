"""Derivatives of a solve, of any order, for all engines.

- `primitives.py`, `batching.py`, `derivatives.py`: JAX primitives that stand for a solve, with
    their batching and their derivatives.
- `flow.py`: a solve as a function of its numbers. `along.py`, `rates.py`: how saved states change
    with their times. `rest.py`: derivatives of states at rest.
"""
