"""Tuned numbers, at which one way to compute gives place to another: see CONTRIBUTING.md."""

MOST_BALL_OPERATIONS = 120

# The number of turns after which lanes that end together read the flag: a power of two.
TURNS_BETWEEN_LOOKS = 4096

# The number of trajectories that may wait, for each lane: with more, the lanes switch less often.
WAITING = 4
# The number of turns that a lane may be idle, on average, before the trajectories that have
# switched are moved out, which takes about as long.
PATIENCE = 2
