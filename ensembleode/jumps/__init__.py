"""What happens to a trajectory at an event, at a time where its field jumps, and at its start.

`callback_tracing.py` traces the functions of callbacks. The `moving` modules have the derivatives
of jumps whose times depend on parameters; `told_apart.py` separates those that coincide.
`consistent_start.py` solves the algebraic equations of a mass matrix.
"""
