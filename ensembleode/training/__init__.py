"""Training: data-parallel fits, and the loss functions of DiffEqFlux."""
