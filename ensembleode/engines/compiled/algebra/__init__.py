"""Arrays in kernels: components of states, products of matrices, linear equations, sums."""
