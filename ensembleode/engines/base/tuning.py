"""Tuned numbers, at which one way to compute gives place to another: see CONTRIBUTING.md."""

# Up to so many components, the state of a column has a variable for each in the code of a step;
# beyond, it is an array in memory (benchmarks/columns.py).
MOST_COLUMN_VARIABLES = 48
# The ends of all steps are kept, and the loop over them has a fixed length.
MOST_COLUMN_STEPS = 2**20
