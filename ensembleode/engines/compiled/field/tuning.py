"""Tuned numbers, at which one way to compute gives place to another: see CONTRIBUTING.md."""

# Loops of at most as many simple operations are unrolled.
WRITTEN_OUT = 128
# The turns of longer loops that are written one behind the other, which hide each other's latency,
# with 32 vector registers and for turns of at most this cost.
TURNS_AT_ONCE, LONGEST_TURN = 4, 64
# Where lanes take different branches, branches of at most this cost are all run without a test.
CHEAP = 32

# A field with more expensive functions, such as sines, is not taken apart into scalars.
MOST_DEAR = 24
# A long program is taken apart into at most as many operations on scalars for each equation.
MOST_SCALARS = 2
