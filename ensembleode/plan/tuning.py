"""Tuned numbers, at which one way to compute gives place to another: see CONTRIBUTING.md."""

# The largest number of noises of adaptive steps for which lanes remember the pieces of their paths:
# with more, the code of these takes long to compile, and on a GPU much memory (benchmarks/sde.py).
MOST_REMEMBERED = 32
