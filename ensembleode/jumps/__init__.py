"""What happens to a trajectory at an event, at a time where its field jumps, and at its start.

`callback_tracing.py` traces the functions of callbacks. `moving.py`, `moving_jumps.py` and
`moving_discontinuities.py`: derivatives of jumps whose times depend on parameters. `told_apart.py`
separates jumps at the same time. `consistent_start.py` solves the algebraic equations of a mass
matrix.
"""
