"""Tuned numbers, at which one way to compute gives place to another: see CONTRIBUTING.md."""

# The bytes of a batch whose trajectories are stepped together.
BATCH_BYTES = 2**20
# Trajectories of a batch; in smaller batches, the cost of starting one shows.
LEAST_BATCH = 256
# Programs that factorise matrices take seconds to compile, so all ensembles share two batch sizes,
# and batches are filled up. The wide size is for ensembles of more than `FEW_NARROW_BATCHES` narrow
# batches.
NARROW, FEW_NARROW_BATCHES = (32, 128), 16

# Up to this many small batches, reruns use small batches, and above it the first run's size.
FEW_RERUNS = 4

# Outside of `jit`, the first room for the events of a trajectory whose number isn't known
# beforehand.
MOST_EVENTS = 16
# The factor by which the room grows where it is too small.
ROOM_FACTOR = 8
# The largest room. A ball that comes to rest bounces ever more often, and no room is enough for it.
MOST_ROOM = 2**13
# In a traced solve, the largest room for events whose number isn't known beforehand, and the most
# bytes of the record of all trajectories, for which the room is reduced. Outside of `jit`, each
# operation passes over the whole record, so the bytes are divided by the last number.
MOST_ROOM_TRACED, RECORD_BYTES, EAGER_PART = 2**10, 2**24, 8
