"""The devices of this process: their number, the arrays on them, and computations of each by
itself."""
