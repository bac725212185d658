"""Tuned numbers, at which one way to compute gives place to another: see CONTRIBUTING.md."""

# The bytes of the turns of a segment, which should stay in a cache.
SEGMENT_BYTES = 2**20
# The most bytes of the segments of all threads, and the turns that a segment has in any case, if
# they take less than half of these bytes.
LARGEST_SEGMENTS, LEAST_TURNS = 15_000_000, 32
# The largest number of checkpoints of a thread, and of their bytes.
MOST_CHECKPOINTS, MOST_KEPT = 2**10, 2**28
# On the way back, the number of trajectories of a group for each lane.
GROUP, GROUP_WITH_RESIDUALS, GROUP_OF_FIXED_STEPS = 4, 2, 1
# On the way back, the vectors for each number; with products there is one if shared weights are no
# more than this: with 32 registers and fixed steps, and with fewer (benchmarks/networks.py).
VECTORS_BACKWARDS, MOST_NEAR, MOST_NEAR_OTHERWISE = 2, 2**13, 2**10
# The largest number of lanes; with adaptive steps, half as many (benchmarks/limits.py).
MOST_LANES = 64
# With as many shared weights, of states in registers and in memory, products have two vectors.
REUSED, REUSED_IN_MEMORY = 3 * 2**8, 2**8
# How many numbers of each component and lane LLVM spills at most where a state is written out.
SPILLED = 40
# The largest number of blocks of trajectories whose gradients by shared parameters are summed up
# one by one; the least one, even if their sums have more bytes than these.
MOST_BLOCKS, LEAST_BLOCKS, SUMS_OF_BLOCKS = 256, 32, 8_000_000
# On a GPU: the least number of turns of a segment, and the bytes of the records of all threads.
TURNS_ON_GPU = 512
WORKSPACE_ON_GPU = 2**30

# What takes too long to compile (see benchmarks/engine_limits.py): an `f` of more operations, of
# which those in a loop count once; and more components of a state whose steps are written out,
# whatever its size.
MOST_STATEMENTS, MOST_WRITTEN_OUT = 1500, 200
# The same on a GPU, where cotangents are variables: more numbers of each trajectory's own in a
# field, and more numbers that all trajectories share.
MOST_OWN_ON_GPU, MOST_SHARED_ON_GPU = 2000, 300
# LLVM takes about a minute for so many lines. The step of an implicit method has so many for each
# component, for each of its stages there, and for each entry of a Jacobian with zeros.
MOST_LINES = 200_000
LINES_OF_COMPONENT, LINES_OF_STAGE, LINES_OF_ENTRY = 50, 23, 20
