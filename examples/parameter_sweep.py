"""Sweep 100,000 Lorenz systems, and keep a picture of the trajectories instead of them all.

Every trajectory draws its own rho, and adds the maxima of z along its attractor to a histogram over
rho and z: the bifurcation diagram. Batches stream through the histogram, so only one batch is in
memory, and the sweep ends early once another batch hardly changes the picture.

    python examples/parameter_sweep.py [--trajectories N] [--no-plot]
"""

import argparse
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import ensembleode as eo


jax.config.update("jax_enable_x64", True)
RHO, Z = (0.0, 230.0), (0.0, 330.0)
BINS = (460, 330)
SETTLED = np.arange(30.0, 45.0, 0.02)  # when the trajectories are on their attractor


def lorenz(u, p, t):
    x, y, z = u
    return jnp.array([10.0 * (y - x), x * (p - z) - y, x * y - 8 / 3 * z])


def draw(prob, ctx):
    return eo.remake(prob, p=jax.random.uniform(ctx.key, minval=RHO[0], maxval=RHO[1]))


def maxima(sol, ctx):
    """rho, and z wherever it is larger than before and after; NaN elsewhere."""
    z = sol.u[:, 2]
    before, here, after = z[:-2], z[1:-1], z[2:]
    top = here + (after - before) ** 2 / (16 * here - 8 * (before + after))  # of a parabola
    is_top = (here >= before) & (here > after)
    return (draw(PROB, ctx).p, jnp.where(is_top, top, jnp.nan)), False


def add_to_picture(picture, tops, indices):
    rho, z = map(np.asarray, tops)
    where = ~np.isnan(z)
    rho = np.broadcast_to(rho[:, None], z.shape)[where]
    new = np.histogram2d(rho, z[where], BINS, (RHO, Z))[0]
    seen = picture > 0
    fresh = new[~seen].sum() / max(1, new.sum())  # the share of points where there were none
    print(f"  {indices[-1] + 1:>7} trajectories, {100 * fresh:.2f}% of the points in new places")
    return picture + new, fresh < 0.001


PROB = eo.ODEProblem(lorenz, jnp.array([1.0, 0.0, 20.0]), (0.0, 45.0), 28.0)


def plot(picture):
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    with np.errstate(divide="ignore"):
        density = np.log(picture / picture.sum(axis=1, keepdims=True)).T
    left.imshow(density, origin="lower", extent=(*RHO, *Z), aspect="auto", cmap="magma_r")
    left.set(title="Where z turns back", xlabel="rho", ylabel="maxima of z")
    near = eo.EnsembleProblem(PROB, lambda prob, ctx: eo.remake(prob, p=28 + ctx.index / 1e5))
    summary = eo.analysis.summarize(near, trajectories=10_000, saveat=np.arange(0, 25, 0.05))
    summary.plot(2, names=["x", "y", "z"], ax=right)
    right.legend(frameon=False, loc="upper right")
    right.set(title="rho between 28 and 28.1: from certain to chaotic", ylim=(4, 50))
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=100)


def main(trajectories, picture_too):
    ens = eo.EnsembleProblem(PROB, draw, maxima, add_to_picture, u_init=np.zeros(BINS))
    tolerances = {"abstol": 1e-8, "reltol": 1e-8}
    batch = min(5_000, trajectories // 2)
    sim = eo.solve(ens, trajectories=trajectories, saveat=SETTLED, batch_size=batch, **tolerances)
    ran = (sim.retcode != eo.ReturnCode.Default).sum()
    print(f"{ran} of {trajectories} trajectories in {sim.elapsed:.1f} s, {sim.engine.name} engine")
    print("stopped early" if sim.converged else "ran them all")
    if len(sim.failed) or sim.u[:2, 1:].any():  # below rho = 1 all comes to rest at zero
        sys.exit(f"{len(sim.failed)} trajectories failed, or some that should be at rest are not")
    if picture_too:
        plot(sim.u)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--no-plot", action="store_true")
    options = parser.parse_args()
    main(options.trajectories, not options.no_plot)
