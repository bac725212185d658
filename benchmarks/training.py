"""A step of training a neural ODE, and where its time goes.

    python benchmarks/training.py [--width W ...] [--trajectories N] [--steps S] [--json FILE]

A network 2 -> W -> W -> 2 with tanh is fitted to trajectories of Lotka-Volterra, measured at 41
times, with Adam. The ways to make a step, all in float32 and at the tolerances 1e-5:

- `fit`: a step of `eo.fit`, from the third on;
- `by hand`: the same steps with optax, each in a jitted function whose loss is read;
- `gradient` and `loss`: only these parts of it;
- `diffrax`: `jax.vmap(diffrax.diffeqsolve)` with optax, in a jitted function;
- `diffrax, matrix`: all trajectories as the columns of one system;
- `torchdiffeq`: the same matrix, with `dopri5` and backpropagation through the steps, with Adam.
  It is left out where it is not installed.

All run in one process, with one thread each, and take turns by blocks of steps, which begin anew
from the same parameters (torchdiffeq goes on; `gradient` and `loss` stay at the first ones). The
milliseconds are the median CPU time. `error` is that of the gradient, relative to its norm; the
reference is Vern9 at 1e-12 in float64. `first` is the first call in seconds.
"""

import argparse
import functools
import itertools
import os
import time


# (For one thread, which XLA and torch read when they start.)
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
os.environ["OMP_NUM_THREADS"] = "1"

import diffrax
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
from common.contenders import imported, Skip
from common.report import header, line, machine, PEERS, write_json
from common.timing import timed

import ensembleode as eo


TIMES, TOL = np.linspace(0.0, 4.0, 41), 1e-5
RATE = 1e-3
BLOCKS = 5


def network(width):
    """The weights of a network 2 -> W -> W -> 2, as NumPy arrays in float64."""
    rng = np.random.default_rng(0)
    sizes = [2, width, width, 2]
    return [
        (rng.normal(size=(m, n)) / np.sqrt(n), 0.1 * rng.normal(size=m))
        for n, m in itertools.pairwise(sizes)
    ]


def neural(u, p, t):
    """The network for a state `[2]`, or for the columns of a matrix `[2, n]`."""
    for w, b in p[:-1]:
        u = jnp.tanh(w @ u + (b if u.ndim == 1 else b[:, None]))
    w, b = p[-1]
    return w @ u + (b if u.ndim == 1 else b[:, None])


def measured(n):
    """The starts `[n, 2]` and what was measured, `[n, time, 2]`."""

    def f(u, p, t):
        return u * jnp.array([1.3 - 0.9 * u[1], 0.8 * u[0] - 1.8])

    u0 = np.random.default_rng(1).uniform(0.5, 2.0, (n, 2))
    prob = eo.ODEProblem(f, u0[0], (0.0, TIMES[-1]))
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=jnp.asarray(u0)[ctx.index]))
    return u0, np.asarray(eo.solve(ens, eo.Tsit5(), trajectories=n, saveat=TIMES).u)


def by_solve(u0, data, alg=None, tol=TOL):
    """The loss of `(p, u0, data)` by `eo.solve`."""

    def loss(p, u0, data):
        prob = eo.ODEProblem(neural, u0[0], (0.0, TIMES[-1]), p)
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=u0[ctx.index]))
        how = {"saveat": TIMES, "abstol": tol, "reltol": tol, "trajectories": len(data)}
        sim = eo.solve(ens, alg or eo.Tsit5(), eo.EnsembleThreads(1), **how)
        return jnp.mean((sim.u - data) ** 2)

    return functools.partial(loss, u0=u0, data=data)


def by_diffrax(u0, data, *, matrix):
    def solved(u0, p):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, u, p: neural(u, p, t)),
            diffrax.Tsit5(),
            0.0,
            TIMES[-1],
            None,
            u0,
            p,
            saveat=diffrax.SaveAt(ts=jnp.asarray(TIMES, u0.dtype)),
            stepsize_controller=diffrax.PIDController(rtol=TOL, atol=TOL),
        ).ys

    def loss(p):
        if matrix:
            return jnp.mean((jnp.transpose(solved(u0.T, p), (2, 0, 1)) - data) ** 2)
        return jnp.mean((jax.vmap(lambda u0: solved(u0, p))(u0) - data) ** 2)

    return loss


def adam_step(loss):
    """A step of Adam in a jitted function, and its first state."""
    adam = optax.adam(RATE)

    @jax.jit
    def step(p, state):
        value, gradient = jax.value_and_grad(loss)(p)
        change, state = adam.update(gradient, state)
        return optax.apply_updates(p, change), state, value

    return step, adam.init


def by_fit(p, u0, data):
    """Returns a function that takes one step of a fit, which goes on until the process ends."""
    loss = by_solve(None, None)
    seconds = []
    began = [time.process_time()]

    def each_step(state):
        now = time.process_time()
        seconds.append(now - began[0])
        began[0] = time.process_time()
        return False

    def of(p):
        return loss.func(p, u0, data)

    def run(steps):
        seconds.clear()
        began[0] = time.process_time()
        eo.fit(
            of, p, optimizer=optax.adam(RATE), maxiters=steps, progress=False, callback=each_step
        )
        return seconds

    return run


def by_hand(step, begin, p):
    """Returns a function that takes so many steps, whose losses are read, and returns their
    seconds."""

    def run(steps):
        now, state, seconds = p, begin(p), []
        for _ in range(steps):
            began = time.process_time()
            now, state, value = step(now, state)
            float(value)
            seconds.append(time.process_time() - began)
        return seconds

    return run


def repeated(call):
    """Returns a function that calls so many times, and returns the seconds."""

    def run(times):
        return [timed(call, clock=time.process_time)[0] for _ in range(times)]

    return run


def by_torch(p, u0, data):
    """Returns a function that makes one step with torchdiffeq, and one that returns the
    gradient."""
    torch, torchdiffeq = imported("torch"), imported("torchdiffeq")
    torch.set_num_threads(1)
    layers = []
    for i, (w, b) in enumerate(p):
        layer = torch.nn.Linear(w.shape[1], w.shape[0])
        with torch.no_grad():
            layer.weight.copy_(torch.tensor(np.array(w)))
            layer.bias.copy_(torch.tensor(np.array(b)))
        layers += [layer] if i == len(p) - 1 else [layer, torch.nn.Tanh()]
    net = torch.nn.Sequential(*layers)
    start, wanted = torch.tensor(np.array(u0)), torch.tensor(np.array(data)).transpose(0, 1)
    times = torch.tensor(TIMES, dtype=torch.float32)
    adam = torch.optim.Adam(net.parameters(), lr=RATE)

    def loss():
        found = torchdiffeq.odeint(
            lambda t, u: net(u), start, times, rtol=TOL, atol=TOL, method="dopri5"
        )
        return torch.mean((found - wanted) ** 2)

    def step():
        adam.zero_grad()
        loss().backward()
        adam.step()

    def gradient():
        net.zero_grad()
        loss().backward()
        return np.concatenate([x.grad.numpy().ravel() for x in net.parameters()])

    return step, gradient


def flat(gradient):
    return np.asarray(jax.flatten_util.ravel_pytree(gradient)[0], np.float64)


def reference(p, u0, data):
    with jax.enable_x64(True):
        p, u0, data = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (p, u0, data))
        return flat(jax.jit(jax.grad(by_solve(u0, data, eo.Vern9(), 1e-12)))(p))


def table(width, n, steps):
    exact = network(width)
    with jax.enable_x64(True):
        u0, data = measured(n)
    wanted = reference(exact, u0, data)
    p, u0, data = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (exact, u0, data))
    losses = {
        "by hand": by_solve(u0, data),
        "diffrax": by_diffrax(u0, data, matrix=False),
        "diffrax, matrix": by_diffrax(u0, data, matrix=True),
    }
    rows, blocks = {}, {"fit": by_fit(p, u0, data)}
    for name, loss in losses.items():
        step, begin = adam_step(loss)
        blocks[name] = by_hand(step, begin, p)
        first, _ = timed(step, p, begin(p))
        found = flat(jax.jit(jax.grad(loss))(p))
        rows[name] = {"first": first, "error": distance(found, wanted)}
    ours = losses["by hand"]
    blocks["gradient"] = repeated(functools.partial(jax.jit(jax.value_and_grad(ours)), p))
    blocks["loss"] = repeated(functools.partial(jax.jit(ours), p))
    skipped = {}
    try:
        step, gradient = by_torch(p, u0, data)
        first, found = timed(gradient)
        rows["torchdiffeq"] = {"first": first, "error": distance(found, wanted)}
        blocks["torchdiffeq"] = repeated(step)
    except Skip as reason:
        skipped["torchdiffeq"] = str(reason)
    seconds = {name: [] for name in blocks}
    for _, (name, run) in itertools.product(range(BLOCKS), blocks.items()):
        # (The first steps of a fit compile, and the second may still wait for that.)
        seconds[name] += run(2 + steps)[2:]
    for name, spent in seconds.items():
        rows.setdefault(name, {})["ms"] = 1e3 * float(np.median(spent))
    return rows, skipped


def distance(found, wanted):
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


ORDER = ("fit", "by hand", "gradient", "loss", "diffrax", "diffrax, matrix", "torchdiffeq")


def show(width, rows, skipped):
    print(f"\n### 2 -> {width} -> {width} -> 2\n")
    print(header(["", "ms a step", "to `by hand`", "error", "first, s"]))
    base = rows["by hand"]["ms"]
    for name in ORDER:
        if name in rows:
            row = rows[name]
            error = f"{row['error']:.1e}" if "error" in row else ""
            first = f"{row['first']:.1f}" if "first" in row else ""
            print(line([name, f"{row['ms']:.2f}", f"{row['ms'] / base:.2f}", error, first]))
    for name, why in skipped.items():
        print(f"- without {name}: {why}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--trajectories", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20, help="of a block")
    parser.add_argument("--json", metavar="FILE", help="write everything measured")
    options = parser.parse_args()
    about = machine(*PEERS, "optax", "torch", "torchdiffeq")
    print(f"{about['cpu']}, {about['cores']} cores, load {about['load']}; {about['versions']}")
    everything = {"machine": about, "tables": []}
    for width in options.width:
        rows, skipped = table(width, options.trajectories, options.steps)
        show(width, rows, skipped)
        everything["tables"].append([width, rows])
    if options.json:
        write_json(options.json, everything)


if __name__ == "__main__":
    main()
