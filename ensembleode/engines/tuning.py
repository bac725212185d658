"""The numbers at which engines change from one way of computing to another."""

# The step of a column is written out in code for many columns at once, whatever their size.
MOST_COLUMN_COMPONENTS = 48
# The ends of all steps are kept, and the loop over them has a fixed length.
MOST_COLUMN_STEPS = 2**20
