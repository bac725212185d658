"""What `tests/data/old_files.zip` holds, written by the first version that had these classes.

    python -c 'import tests.old_files; tests.old_files.write("FOLDER")'

writes it anew. The functions are found by their names, as those of a user's module are.
"""

import pathlib
import pickle

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optax

import ensembleode as eo


# Of JAX and of this library, which wrote them.
VERSIONS = ("0.10.2", "0.1.0")
SAVED = np.linspace(0.0, 3.0, 7)


def swing(u, p, t):
    return jnp.stack([u[1], -p * u[0]])


def height(u, p, t):
    return u[0]


def slower(integrator):
    return eo.remake(integrator, u=0.9 * integrator.u)


def is_late(u, t, integrator):
    return t > 2.5


def spread(prob, ctx):
    return eo.remake(prob, p=prob.p * (1 + 0.1 * ctx.index))


def energy(u, p, t):
    return p * u[0] ** 2 + u[1] ** 2


def far(params, batch):
    return jnp.sum((params[None] - batch) ** 2, axis=1)


def problems():
    callbacks = eo.CallbackSet(
        eo.ContinuousCallback(height, slower, interp_points=8),
        eo.VectorContinuousCallback(height, slower, 1),
        eo.DiscreteCallback(is_late, slower),
        eo.PresetTimeCallback([1.0], slower),
        eo.PeriodicCallback(slower, 0.7),
        eo.PositiveDomain(),
        eo.SavingCallback(energy),
    )
    f = eo.ODEFunction(swing, mass_matrix=np.eye(2))
    prob = eo.ODEProblem(swing, jnp.array([1.0, 0.0]), (0.0, 3.0), jnp.array(4.0))
    return {
        "prob": prob,
        "with callbacks": eo.remake(prob, callback=callbacks),
        "with a mass matrix": eo.ODEProblem(f, prob.u0, prob.tspan, prob.p),
        "ens": eo.EnsembleProblem(prob, spread),
        "rows": eo.EnsembleProblem(prob, p=jnp.array([4.0, 4.4])),
        "algs": [eo.Tsit5(), eo.Vern7(), eo.Rodas5P(), eo.AutoTsit5(eo.Rodas5P()), eo.RK4()],
        "controllers": [eo.PIController(), eo.IController()],
        "ensemblealgs": [
            eo.EnsembleSerial(),
            eo.EnsembleThreads(),
            eo.EnsembleColumns(),
            eo.EnsembleGPUArray(),
            eo.EnsembleGPUKernel(),
            eo.EnsembleSplitThreads(),
        ],
        "sensealgs": [
            eo.ReplayAdjoint(),
            eo.GaussAdjoint(),
            eo.DirectAdjoint(),
            eo.BacksolveAdjoint(),
            eo.InterpolatingAdjoint(),
            eo.ForwardDiffSensitivity(),
            eo.RecursiveCheckpointAdjoint(),
        ],
        "initializations": [eo.CheckInit(), eo.BrownFullBasicInit()],
    }


def solutions():
    probs = problems()
    bounces = eo.CallbackSet(eo.ContinuousCallback(height, slower), eo.SavingCallback(energy))
    every = {"save_everystep": True, "callback": bounces}
    return {
        "sol": eo.solve(probs["prob"], eo.Tsit5(), **every),
        "sim": eo.solve(probs["ens"], eo.Tsit5(), trajectories=3, **every),
        "saved": eo.solve(probs["ens"], eo.Tsit5(), trajectories=3, saveat=SAVED),
        "failed": eo.solve(probs["ens"], eo.Tsit5(), trajectories=3, maxiters=3),
    }


STORES = {
    "Tsit5": eo.Tsit5(),
    "Kvaerno5": eo.Kvaerno5(),
    "AutoTsit5": eo.AutoTsit5(eo.Rosenbrock23()),
    "HalfSolver": diffrax.HalfSolver(diffrax.ImplicitEuler()),
}


def stored(name, path):
    ens = problems()["ens"]
    return eo.solve(ens, STORES[name], trajectories=3, saveat=SAVED, batch_size=2, store=path)


def fitted(folder, epochs):
    return eo.fit(
        far,
        jnp.array([1.0, 2.0]),
        jnp.arange(8.0).reshape(4, 2),
        optimizer=optax.sgd(0.1, momentum=0.9),
        epochs=epochs,
        batch_size=2,
        checkpoint=folder,
        progress=False,
    )


def write(folder):
    folder = pathlib.Path(folder)
    jax.config.update("jax_enable_x64", True)
    folder.mkdir()
    (folder / "problems.pickle").write_bytes(pickle.dumps(problems()))
    (folder / "solutions.pickle").write_bytes(pickle.dumps(solutions()))
    for name in STORES:
        stored(name, folder / f"{name}.zarr")
    fitted(folder / "checkpoints", 2)
