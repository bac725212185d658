"""Tuned numbers, at which one way to compute gives place to another: see CONTRIBUTING.md."""

MOST_BALL_OPERATIONS = 120

# The number of turns after which lanes that end together read the flag: a power of two.
TURNS_BETWEEN_LOOKS = 4096

# The number of trajectories that may wait, for each lane: with more, the lanes switch less often.
WAITING = 4
# The number of turns that a lane may be idle, on average, before the trajectories that have
# switched are moved out, which takes about as long.
PATIENCE = 2

# The first step of an adaptive stochastic method, as a part of the time span. (It halves it where
# it is too long.)
FIRST_OF_SPAN = 2.0**-6
