"""From Python functions to programs: the computation of a user's function, apart from the numbers
that it computes with.

- `program.py`: a traced function as a hashable program, and the arrays that it closes over.
- `evaluation.py`: jaxprs evaluated equation by equation. `reductions.py`: reductions of which JAX
    has wrong derivatives.
- `purity.py`: whether a function computes the same each time it is called.
- `field_errors.py`: explains why an `f` can't be traced.
- `pulses.py`: whether a field switches at some time, and its comparisons of time.
    `written_numbers.py`: numeric literals as constants of a program.
"""
