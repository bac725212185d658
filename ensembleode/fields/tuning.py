"""Tuned numbers, at which one way to compute gives place to another: see CONTRIBUTING.md."""

# The largest number of parts into which a loop is split.
MOST_LOOPS = 8

# Operations; a deeper expression is stored before it is used in another one.
DEEPEST = 40

COST_OF_OTHERS = 12

# Multiplications; a smaller product of matrices is written out as loops.
LEAST_PRODUCT = 64

# The largest number of turns of a loop that is written out.
MOST_TURNS_WRITTEN_OUT = 4

# The most components that are sorted by comparing each pair, and rows that a gather chooses among.
MOST_SORTED, MOST_ROWS = 6, 8

# Longer transforms are too long as code.
LONGEST_TRANSFORM = 64
# The longest transform that isn't taken apart, and the longest one of a length that is prime.
LONGEST_WHOLE_TRANSFORM, LONGEST_PRIME_TRANSFORM = 8, 13

# Compiled programs of more operations than this are slower than loops, and take long to compile.
MOST_SCALAR_OPERATIONS = 1000

# A program of more operations is not taken apart into components, even if its Jacobian is sparse.
MOST_OPERATIONS_OF_JACOBIANS = 4000

# A loop of more equations is not unrolled; all of its turns are then taken together.
MOST_UNROLLED = 20_000
