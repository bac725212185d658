"""Tuned numbers, at which one way to compute gives place to another: see CONTRIBUTING.md."""

# The bytes of a batch whose trajectories share their steps.
BATCH_BYTES = 2**20
# Trajectories, below which the cost of starting a batch shows.
LEAST_BATCH = 256
# Programs that factorise matrices take seconds to compile, so all ensembles share two batch sizes,
# and batches are filled up. The wide size is for ensembles of more than `FEW_NARROW_BATCHES` narrow
# batches.
NARROW, FEW_NARROW_BATCHES = (32, 128), 16

# Up to so many small batches, reruns take these, and above it one of the first run's size.
FEW_RERUNS = 4

# The room for those events of a trajectory whose number nobody knows, outside of `jit` at first.
MOST_EVENTS = 16
# The factor by which the room grows where it is too small.
ROOM_FACTOR = 8
# The largest room. A ball that comes to rest bounces ever more often, and no room is enough for it.
MOST_ROOM = 2**13
# The largest room for events whose number nobody knows in a traced solve. There is less of it where
# the record of all trajectories would take more than so many bytes, and an eighth of these outside
# of `jit`, where each operation passes over it, whether anybody reads it or not.
MOST_ROOM_TRACED, RECORD_BYTES, EAGER_PART = 2**10, 2**24, 8
