"""The description of a kernel, and what is written from it.

- `description.py`: the description. `layout.py`: its numbers in memory. `equations.py`: what a
    method of `solvers/` calls in a kernel. `saved_rows.py`: the rows that are saved.
- `traced_method.py`: a step traced, whose transpose reverse mode is written from.
"""
