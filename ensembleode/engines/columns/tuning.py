"""Tuned numbers of this folder: where one way to compute gives place to another.

Where a benchmark sets a number, the comment names it: on two cores of a Xeon with AVX-512, in
November 2026. The others follow from registers, caches and the time that compiling takes.
`tests/test_thresholds.py` tries both sides.
"""

# A thread gets at least this many vectors of columns, and threads share an attempt of at least this
# many operations on vectors.
VECTORS, WORTH_SHARING = 4, 50_000

# The number of turns after which the flag that stops the loop is read.
TURNS_BETWEEN_LOOKS = 256
