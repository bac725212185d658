"""Batching within the ODE: solve several initial conditions of a neural ODE as one matrix.

A network treats the columns of a matrix independently, in one matrix product. So several initial
conditions can be the columns of a single state, whether you write the matrix by hand or use
`EnsembleColumns()`. The columns then share their steps, which suit most of the columns but not each
one equally.

    python examples/within_ode_batching.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import ensembleode as eo


network = eqx.nn.MLP(2, 2, width_size=50, depth=1, activation=jnp.tanh, key=jax.random.key(5))
u0s = jnp.array([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]])  # three initial conditions, as columns
options = {"saveat": 0.1, "abstol": 1e-8, "reltol": 1e-5}


def of_vector(u, p, t):
    return p(u)


def of_matrix(u, p, t):
    return jax.vmap(p, in_axes=1, out_axes=1)(u)


def of_coupled_matrix(u, p, t):
    return of_matrix(u - u.mean(), p, t)


def steps(sol):
    return sol.stats.naccept + sol.stats.nreject


def difference(a, b):
    return f"{np.abs(np.asarray(a) - np.asarray(b)).max():.1e}"


# One initial condition: a vector.
vector = eo.ODEProblem(of_vector, u0s[:, 2], (0.0, 1.0), network)
alone = eo.solve(vector, eo.Tsit5(), **options)
print(f"the vector [2, 0]      {steps(alone)} steps to u(1) = {alone.u[-1]}")

# Three of them: a matrix, with f written for matrices. Nothing but f keeps the columns apart, so
# it is worth a check.
matrix = eo.ODEProblem(of_matrix, u0s, (0.0, 1.0), network)
coupled = eo.ODEProblem(of_coupled_matrix, u0s, (0.0, 1.0), network)
print(f"\nf(u) = network(u)              {eo.check_columns(matrix)}")
print(f"f(u) = network(u - u.mean())   {eo.check_columns(coupled)}\n")
by_hand = eo.solve(matrix, eo.Tsit5(), **options)
print(f"the matrix by hand     {steps(by_hand)} steps, shared by the columns")

# The same as an ensemble: f is written for one trajectory and mapped over the columns.
ens = eo.EnsembleProblem(vector, lambda prob, ctx: eo.remake(prob, u0=u0s[:, ctx.index]))
columns = eo.solve(ens, eo.Tsit5(), eo.EnsembleColumns(), trajectories=3, **options)
print(f"EnsembleColumns()      {steps(columns)[0]} steps, shared by the columns")

# With another ensemble algorithm, each trajectory has its own steps.
own = eo.solve(ens, eo.Tsit5(), eo.EnsembleGPUArray(), trajectories=3, **options)
print(f"EnsembleGPUArray()     {steps(own)} steps, for each trajectory as many as it needs")

print("\nLargest difference of u at the saved times")
by_trajectory = jnp.moveaxis(by_hand.u, -1, 0)  # from [time, component, column]
print("between the matrix by hand and EnsembleColumns()  ", difference(by_trajectory, columns.u))
print("between EnsembleColumns() and EnsembleGPUArray()  ", difference(columns.u, own.u))
