"""Training: fits, data-parallel, and the losses of DiffEqFlux."""
