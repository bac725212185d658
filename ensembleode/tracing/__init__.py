"""From Python functions to programs: what a user's function computes, apart from the numbers that
it computes with.

- `program.py`: a traced function as a hashable program, and the arrays that it closes over.
- `purity.py`: whether a function computes the same whenever it is called.
- `field_errors.py`: what is wrong with an `f` that can't be traced.
"""
