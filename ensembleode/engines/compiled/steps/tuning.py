"""Tuned numbers, at which one way to compute gives place to another: see CONTRIBUTING.md."""

# Sums of cotangents of more parameters than this are in memory, fewer in variables of the lanes.
MOST_VARIABLES = 48
# The same for the parameters that each trajectory has for itself.
MOST_OWN_VARIABLES = 48
# More residuals of the field than this are computed again on the way back.
MOST_RESIDUALS = 2048
# The stages of larger states than this are computed again.
MOST_RECORDED = 512

# The largest number of own parameters that lanes hold, and of other numbers under one name; others
# are read from memory.
MOST_HELD = 64
# The largest number of shared numbers that are read once and kept; others are read at each use.
MOST_SHARED = 64
# The most bytes that all packed weights of a kernel take, on its stack.
MOST_PACKED = 2**20

# A field with more statements (loops unrolled) becomes a function that is called at every stage.
LONGEST_INLINED = 150
# A Jacobian with more entries becomes a function, too.
MOST_INLINED = 150
# A result of at most as many components is returned; a larger one would be stored.
LARGEST_RETURNED = 10**6
