"""The vector field in a kernel: its lowered form, printed as instructions for lanes."""
