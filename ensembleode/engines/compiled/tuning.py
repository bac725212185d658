"""Tuned numbers, at which one way to compute gives place to another: see CONTRIBUTING.md."""

# The bytes of the turns of a segment, which should stay in a cache.
SEGMENT_BYTES = 2**20
# The most bytes of the segments of all threads; and the number of turns that a segment has even
# beyond these, as long as it takes at most half of these bytes.
LARGEST_SEGMENTS, LEAST_TURNS = 15_000_000, 32
# The largest number of checkpoints of a thread, and of their bytes.
MOST_CHECKPOINTS, MOST_KEPT = 2**10, 2**28
# On the way back, the number of trajectories of a group for each lane.
GROUP, GROUP_WITH_RESIDUALS, GROUP_OF_FIXED_STEPS = 4, 2, 1
# On the way back, the vectors of lanes for each number. A field with products has one where shared
# weights are at most MOST_NEAR with 32 registers and fixed steps (however many with adaptive
# steps), or at most MOST_NEAR_OTHERWISE with fewer registers (benchmarks/networks.py).
VECTORS_BACKWARDS, MOST_NEAR, MOST_NEAR_OTHERWISE = 2, 2**13, 2**10
# The largest number of lanes; with adaptive steps, half as many (benchmarks/limits.py).
MOST_LANES = 64
# The vectors of lanes for each number where steps draw random numbers (benchmarks/sde.py).
VECTORS_WITH_NOISE = 2
# From this number of shared weights on, products compute with at least two vectors of lanes: for
# states in registers, and for states in memory.
REUSED, REUSED_IN_MEMORY = 3 * 2**8, 2**8
# How many numbers LLVM spills at most, for each component and lane, where a state is unrolled.
SPILLED = 40
# The largest number of blocks of trajectories, each of which has its own sum of gradients with
# respect to shared parameters; the largest one if all sums have more bytes than SUMS_OF_BLOCKS.
MOST_BLOCKS, LEAST_BLOCKS, SUMS_OF_BLOCKS = 256, 32, 8_000_000
# On a GPU: the least number of turns of a segment, and the bytes of the records of all threads.
TURNS_ON_GPU = 512
WORKSPACE_ON_GPU = 2**30

# Beyond these limits, compiling takes too long (see benchmarks/engine_limits.py): the number of
# operations of `f`, of which those in a loop count once; and the number of components of a state
# whose steps are unrolled whatever its size.
MOST_STATEMENTS, MOST_WRITTEN_OUT = 1500, 200
# The same on a GPU, where cotangents are variables: how many numbers of its own each trajectory has
# in a field, and how many numbers all trajectories share.
MOST_OWN_ON_GPU, MOST_SHARED_ON_GPU = 2000, 300
# LLVM takes about a minute to compile MOST_LINES lines. The step of an implicit method has about so
# many for each component, for each stage of a component, and for each entry of a sparse Jacobian.
MOST_LINES = 200_000
LINES_OF_COMPONENT, LINES_OF_STAGE, LINES_OF_ENTRY = 50, 23, 20
