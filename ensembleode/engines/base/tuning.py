"""Tuned numbers, at which one way to compute gives place to another: see CONTRIBUTING.md."""

# The largest number of components of a column's state for which the code of a step has a variable
# for each component; a larger state is an array in memory (benchmarks/columns.py).
MOST_COLUMN_VARIABLES = 48
# The ends of all steps are kept, and the loop over them has a fixed length.
MOST_COLUMN_STEPS = 2**20
