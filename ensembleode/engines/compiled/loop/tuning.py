"""Tuned numbers of this folder: where one way to compute gives place to another.

Where a benchmark sets a number, the comment names it: on two cores of a Xeon with AVX-512, in
November 2026. The others follow from registers, caches and the time that compiling takes.
`tests/test_thresholds.py` tries both sides.
"""

MOST_BALL_OPERATIONS = 120

# The number of turns after which lanes that end together read the flag: a power of two.
TURNS_BETWEEN_LOOKS = 4096

# The number of trajectories that may wait, for each lane: with more, the lanes switch less often.
WAITING = 4
# The number of turns that a lane may be idle, on average, before the trajectories that have
# switched are moved out, which takes about as long.
PATIENCE = 2
