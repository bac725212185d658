"""The vector field in a kernel: it is lowered, and printed as instructions for all lanes."""
