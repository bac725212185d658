"""The models of "More neural ODEs", by this library and by diffrax.

    python benchmarks/neural_odes.py [--case NAME ...] [--updates N]

Each case is a model of an example with a batch of its data, at the same tolerances (reltol 1e-3, of
the flow 1e-4; abstol 1e-6, of the last two 1e-3) and with the same random numbers. An update is a
gradient and a step of Adam in a jitted function. All take turns by single updates in one process,
held to one core. Columns:

- the lines of the functions that solve and that return the loss, without comments;
- the CPU time of the first call of the loss with its gradient, in seconds;
- the median CPU time of an update, in milliseconds.

Beneath are the first losses, how far the gradients are from ours, relative to their norm, and the
losses after all updates.
"""

import argparse
import ast
import functools
import inspect
import os
import pathlib
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any, NamedTuple


# (For one thread, which XLA reads when it starts.)
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))

import augmented_ode
import diffrax
import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import latent_ode
import neural_cde
import normalizing_flow
import numpy as np
import ode_rnn
import optax
from common.processes import held, last_core
from common.report import header, line, machine, PEERS
from common.timing import timed


class Case(NamedTuple):
    model: Any
    batch: Any
    # By name, ours first: the loss `(model, batch, keys) -> [item]`, and what it calls.
    ways: dict[str, tuple[Callable, ...]]


TOLERANCES = {"rtol": 1e-3, "atol": 1e-6}  # the defaults of `solve`


def latent_by_diffrax(model, batch, key):
    t, y = batch["t"], batch["y"]
    measured = jnp.isfinite(t)
    keys = jax.vmap(jax.random.split)(key)
    half = jax.vmap(lambda key: jax.random.bernoulli(key, shape=t[0].shape))(keys[:, 0])
    mean, log_var = jax.vmap(model.recognize)(t, y, measured & half)
    drawn = jax.vmap(lambda key: jax.random.normal(key, mean[0].shape))(keys[:, 1])

    def follow(start, t):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, z, field: field(z)),
            diffrax.Tsit5(),
            t0=0.0,
            t1=latent_ode.MEASURED,
            dt0=None,
            y0=start,
            args=model.field,
            saveat=diffrax.SaveAt(ts=t),
            stepsize_controller=diffrax.PIDController(**TOLERANCES),
        ).ys

    times = jnp.where(measured, t, latent_ode.MEASURED)  # no time may be infinite
    states = jax.vmap(follow)(mean + jnp.exp(log_var / 2) * drawn, times)
    predicted = model.decode(states)
    misses = jnp.where(measured, predicted - jnp.where(measured, y, 0.0), 0.0) / latent_ode.NOISE
    divergence = jnp.exp(log_var) + mean**2 - 1.0 - log_var
    return (jnp.sum(misses**2, axis=1) + jnp.sum(divergence, axis=1)) / 2


def flow_by_diffrax(network, points, rtol=1e-4):
    def with_divergence(t, state, network):
        x, _ = state
        return normalizing_flow.field(x, network, t), normalizing_flow.divergence(x, network, t)

    def flow(point):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(with_divergence),
            diffrax.Tsit5(),
            t0=0.0,
            t1=1.0,
            dt0=None,
            y0=(point, jnp.zeros(())),
            args=network,
            stepsize_controller=diffrax.PIDController(rtol=rtol, atol=1e-6),
        ).ys

    ends, log_determinants = jax.vmap(flow)(points)
    normal = -jnp.sum(ends[:, -1] ** 2, axis=1) / 2 - jnp.log(2 * jnp.pi)
    return -(normal + log_determinants[:, -1])


def mirrored_by_diffrax(network, x):
    def carried(x):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, u, network: network(u)),
            diffrax.Tsit5(),
            t0=0.0,
            t1=1.0,
            dt0=None,
            y0=jnp.pad(x[None], (0, network.in_size - 1)),
            args=network,
            stepsize_controller=diffrax.PIDController(**TOLERANCES),
        ).ys[-1, 0]

    return (jax.vmap(carried)(x) + x) ** 2


def missed_by_diffrax(model, positions):
    times = augmented_ode.TIMES

    def swung(positions):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, u, highest: jnp.concatenate([u[1:], highest(u)])),
            diffrax.Tsit5(),
            t0=times[0],
            t1=times[-1],
            dt0=None,
            y0=model.start(positions[: augmented_ode.FIRST]),
            args=model.highest,
            saveat=diffrax.SaveAt(ts=times),
            stepsize_controller=diffrax.PIDController(**TOLERANCES),
        ).ys[:, 0]

    return jnp.mean((jax.vmap(swung)(positions) - positions) ** 2, axis=1)


def next_by_diffrax(networks, batch):
    """From observation to observation, in a scan."""

    def one(t, y):
        def until_next(carry, seen):
            h, start = carry
            t, y = seen
            end = jnp.where(jnp.isfinite(t), t, start)
            h = diffrax.diffeqsolve(
                diffrax.ODETerm(lambda t, h, field: field(h)),
                diffrax.Tsit5(),
                t0=start,
                t1=end,
                dt0=None,
                y0=h,
                args=networks["field"],
                stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-3),
            ).ys[-1]
            return (networks["cell"](y[None], h), end), networks["value"](h)[0]

        _, found = jax.lax.scan(until_next, (jnp.zeros(ode_rnn.SIZE), jnp.zeros(())), (t, y))
        return found

    counts = jnp.isfinite(batch["t"]).at[:, 0].set(False)
    error = jnp.where(counts, jax.vmap(one)(batch["t"], batch["y"]) - batch["y"], 0.0)
    return jnp.sum(error**2, axis=1) / jnp.maximum(counts.sum(axis=1), 1)


def path_by_diffrax(networks, batch):
    def one(t, path):
        control = diffrax.LinearInterpolation(t, path)
        field = networks["field"]
        end = diffrax.diffeqsolve(
            diffrax.ControlTerm(lambda t, h, _: field(h).reshape(-1, 3), control).to_ode(),
            diffrax.Tsit5(),
            t0=0.0,
            t1=1.0,
            dt0=None,
            y0=networks["start"](path[0]),
            stepsize_controller=diffrax.ClipStepSizeController(
                diffrax.PIDController(rtol=1e-3, atol=1e-3), jump_ts=t[1:-1]
            ),
        ).ys[-1]
        return networks["answer"](end)

    logits = jax.vmap(one)(batch["t"], batch["path"])
    return optax.sigmoid_binary_cross_entropy(logits, batch["left"].astype("f4"))


def latent():
    _, batch = latent_ode.oscillations(32, seed=0)
    ways = {"solve": (latent_ode.loss, latent_ode.follow), "diffrax": (latent_by_diffrax,)}
    return Case(latent_ode.LatentODE(jax.random.key(0)), batch, ways)


def flow():
    network = eqx.nn.MLP(3, 2, 32, 2, activation=jnp.tanh, key=jax.random.key(0))
    ways = {
        "solve": (normalizing_flow.loss, normalizing_flow.log_density, normalizing_flow.flow),
        "diffrax": (flow_by_diffrax,),
        # Here the steps look at the integral, too, which is about as exact as ours so.
        "diffrax at 1e-3": (functools.partial(flow_by_diffrax, rtol=1e-3),),
    }
    return Case(network, normalizing_flow.moons(256, seed=0), ways)


def augmented():
    x = np.linspace(-1.0, 1.0, 64, dtype="f4")
    ours = augmented_ode.mirrored, augmented_ode.carried, augmented_ode.follow
    ways = {"solve": ours, "diffrax": (mirrored_by_diffrax,)}
    return Case(augmented_ode.mlp(2, 2, jax.random.key(0)), x, ways)


def second_order():
    _, positions = augmented_ode.pendulum(32, seed=0)
    ours = augmented_ode.missed, augmented_ode.swung, augmented_ode.follow
    ways = {"solve": ours, "diffrax": (missed_by_diffrax,)}
    return Case(augmented_ode.Swing(2, jax.random.key(0)), positions, ways)


def rnn():
    ours = ode_rnn.loss, ode_rnn.errors, ode_rnn.states, ode_rnn.take_in
    ways = {"solve": ours, "diffrax": (next_by_diffrax,)}
    return Case(ode_rnn.make_networks(jax.random.key(0)), ode_rnn.make_data(64, 0), ways)


def cde():
    ours = neural_cde.loss, neural_cde.answers, neural_cde.field
    ways = {"solve": ours, "diffrax": (path_by_diffrax,)}
    return Case(neural_cde.make_networks(jax.random.key(0)), neural_cde.make_data(64, 0), ways)


CASES = {
    "latent ODE": latent,
    "normalising flow": flow,
    "augmented": augmented,
    "second order": second_order,
    "ODE-RNN": rnn,
    "neural CDE": cde,
}


def lines(functions):
    """How many lines functions have, without empty ones, comments and docstrings."""
    return sum(map(_lines, functions))


def _lines(function):
    function = getattr(function, "func", function)  # (of a partial)
    source = textwrap.dedent(inspect.getsource(function))
    (tree,) = ast.parse(source).body
    docstring = ast.get_docstring(tree) is not None and tree.body[0]
    kept = [
        text
        for number, text in enumerate(source.splitlines(), start=1)
        if not docstring or not docstring.lineno <= number <= docstring.end_lineno
    ]
    return sum(bool(text.strip()) and not text.lstrip().startswith("#") for text in kept)


def functions_of(loss, case):
    """What is trained; the mean loss with its gradient, and an update by Adam, as jitted functions;
    and the first state of Adam."""
    trained, static = eqx.partition(case.model, eqx.is_inexact_array)
    adam = optax.adam(1e-3)

    def mean(trained, key):
        model = eqx.combine(trained, static)
        given = (key,) if "key" in inspect.signature(loss).parameters else ()
        return jnp.mean(loss(model, case.batch, *given))

    gradient = jax.jit(jax.value_and_grad(mean))

    @jax.jit
    def update(trained, state, key):
        value, change = gradient(trained, key)
        change, state = adam.update(change, state)
        return optax.apply_updates(trained, change), state, value

    return trained, gradient, update, adam.init(trained)


def table(case, updates):
    """A row of numbers for each way, and words on how far the others agree with ours."""
    n = len(jax.tree.leaves(case.batch)[0])
    keys = jax.random.split(jax.random.key(1), (updates, n))
    firsts, values, states, calls = {}, {}, {}, {}
    for name, (loss, *_) in case.ways.items():
        trained, gradient, update, state = functions_of(loss, case)
        # (Before anything else that could compile a part of it.)
        firsts[name], values[name] = timed(gradient, trained, keys[0], clock=time.process_time)
        states[name], calls[name] = (trained, state), update
        update(trained, state, keys[0])
    seconds, last = {name: [] for name in case.ways}, {}
    for key in keys:
        for name, call in calls.items():
            spent, (*states[name], last[name]) = timed(
                call, *states[name], key, clock=time.process_time
            )
            seconds[name].append(spent)
    rows = [
        [name, lines(way), f"{firsts[name]:.1f}", f"{1e3 * np.median(seconds[name]):.2f}"]
        for name, way in case.ways.items()
    ]
    found = {
        name: jax.flatten_util.ravel_pytree(gradient)[0] for name, (_, gradient) in values.items()
    }
    ours = found["solve"]
    said = (
        f"{name} {float(values[name][0]):.6g}, gradient {distance(gradient, ours):.0e}, "
        f"at last {float(last[name]):.4g}"
        for name, gradient in found.items()
    )
    return rows, "; ".join(said)


def distance(found, wanted):
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--updates", type=int, default=200)
    options = parser.parse_args()
    about, core = machine(*PEERS, "optax"), last_core()
    print(f"{about['cpu']}, {about['cores']} cores, load {about['load']}; {about['versions']}\n")
    print(header(["", "", "lines", "first call, s", "an update, ms"], left=2))
    said = []
    with held(None if core is None else {core}):
        for name in options.case:
            rows, agreement = table(CASES[name](), options.updates)
            said.append(f"- {name}: {agreement}")
            for row in rows:
                print(line([name, *row]), flush=True)
    print(f"\n{chr(10).join(said)}")


if __name__ == "__main__":
    main()
