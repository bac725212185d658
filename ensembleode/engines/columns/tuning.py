"""Tuned numbers, at which one way to compute gives place to another: see CONTRIBUTING.md."""

# A thread gets at least this many vectors of columns, and threads share an attempt of at least this
# many operations on vectors.
VECTORS, WORTH_SHARING = 4, 50_000

# The number of turns after which the flag that stops the loop is read.
TURNS_BETWEEN_LOOKS = 256
