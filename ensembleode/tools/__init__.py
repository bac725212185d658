"""Tools beside solving: `doctor`, `bench`, citations, the check of columns and the report of
kernels, each in its own module."""
