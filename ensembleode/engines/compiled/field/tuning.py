"""Tuned numbers, at which one way to compute gives place to another: see CONTRIBUTING.md."""

# Loops of at most as many simple operations are unrolled.
WRITTEN_OUT = 128
# Longer loops are unrolled by this many turns, which hide each other's latency, where there are 32
# vector registers and a turn costs at most this.
TURNS_AT_ONCE, LONGEST_TURN = 4, 64
# Where lanes take different branches, branches of at most this cost are all run without a test.
CHEAP = 32

# A field with more expensive functions (such as sines) than this isn't taken apart into scalars.
MOST_DEAR = 24
# A long program is taken apart into at most as many operations on scalars for each equation.
MOST_SCALARS = 2
