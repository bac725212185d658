"""Tuned numbers, at which one way to compute gives place to another: see CONTRIBUTING.md."""

# Products with at most as many multiplications are unrolled.
WRITTEN_OUT = 60
# The largest number of terms of sums that are unrolled, too.
LONGEST_SUM = 16
# The bytes of sums that are accumulated at once, which leaves registers for their terms.
BYTES_AT_ONCE = 256
# Smaller matrices of weights, in bytes, stay where they are: they are in the nearest cache.
LEAST_PACKED = 2**14
# The number of terms of each sum in one turn of the loop.
TERMS_AT_ONCE = 4

# The vectors of a row of a panel, and the bytes of a panel.
VECTORS_OF_PANELS = 2
PANEL_BYTES = 2**14
# With fewer rows, transposing costs more than adding up the entries of vectors.
LEAST_ROWS = 8
# How many terms are added up in one turn of the innermost loop.
TERMS_OF_PANELS_AT_ONCE = 4

# A block with more updates is factorised by loops, as unrolled code takes longer to compile
# (benchmarks/stiff_sizes.py).
MOST_UPDATES = 600
# Rows that are sums of more equations are summed up by loops, and so is their block factorised.
MOST_TERMS = 6

# The rows, and the columns, of a tile, which takes half of 32 registers.
TILE = 4
