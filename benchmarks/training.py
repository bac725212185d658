"""A step of training a neural ODE, and where its time goes.

    python benchmarks/training.py [--width W ...] [--trajectories N] [--steps S] [--json FILE]
    python benchmarks/training.py --equal-error [--width W ...] [--trajectories N] [--steps S]

A network 2 -> W -> W -> 2 with tanh is fitted to trajectories of Lotka-Volterra, measured at 41
times, with Adam. The ways to make a step, all in float32 and at the tolerances 1e-5:

- `fit`: a step of `eo.fit`, from the third on;
- `by hand`: the same steps with optax, each in a jitted function whose loss is read;
- `gradient` and `loss`: only these parts of it;
- `diffrax`: `jax.vmap(diffrax.diffeqsolve)` with optax, in a jitted function;
- `diffrax, matrix`: all trajectories as the columns of one system;
- `torchdiffeq`: the same matrix, with `dopri5` and backpropagation through the steps, with Adam.
  It is left out where it is not installed.

All run in one process, held to one core, and take turns by blocks of steps, which begin anew
from the same parameters (torchdiffeq goes on; `gradient` and `loss` stay at the first ones). The
milliseconds are the median CPU time. `error` is that of the gradient, relative to its norm; the
reference is Vern9 at 1e-12 in float64. `first` is the first call in seconds.

With `--equal-error`, `eo.solve` and diffrax are compared at tolerances at which they are equally
far off: each has the loosest one at which the root mean square of the errors of all states is at
most a target. The targets are the error of `solve` at 1e-5 and that of diffrax on the matrix at
1e-5. They take turns by single calls of the loss and of its gradient.
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
import jax.numpy as jnp
import numpy as np
import optax
from common.contenders import imported, Skip
from common.processes import held, last_core
from common.report import header, line, machine, PEERS, write_json
from common.timing import in_turns, timed

import ensembleode as eo


TIMES, TOL = np.linspace(0.0, 4.0, 41), 1e-5
RATE = 1e-3
BLOCKS = 5
MATRIX = "diffrax, matrix"


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


def ours(p, u0, tol, alg=None):
    """The states `[n, time, 2]` by `eo.solve`."""
    prob = eo.ODEProblem(neural, u0[0], (0.0, TIMES[-1]), p)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=u0[ctx.index]))
    how = {"saveat": TIMES, "abstol": tol, "reltol": tol, "trajectories": len(u0)}
    return eo.solve(ens, alg or eo.Tsit5(), eo.EnsembleThreads(1), **how).u


def _by_diffrax(p, u0, tol):
    return diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, u, p: neural(u, p, t)),
        diffrax.Tsit5(),
        0.0,
        TIMES[-1],
        None,
        u0,
        p,
        saveat=diffrax.SaveAt(ts=jnp.asarray(TIMES, u0.dtype)),
        stepsize_controller=diffrax.PIDController(rtol=tol, atol=tol),
    ).ys


def vmapped(p, u0, tol):
    return jax.vmap(lambda u0: _by_diffrax(p, u0, tol))(u0)


def on_matrix(p, u0, tol):
    return jnp.transpose(_by_diffrax(p, u0.T, tol), (2, 0, 1))


def loss(p, u0, data, solve=ours, tol=TOL):
    return jnp.mean((solve(p, u0, tol) - data) ** 2)


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
    seconds = []
    began = [time.process_time()]

    def each_step(state):
        now = time.process_time()
        seconds.append(now - began[0])
        began[0] = time.process_time()
        return False

    def of(p):
        return loss(p, u0, data)

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
    return np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(gradient)])


def exactly(function, *args):
    """The result of a function of such arguments, in float64, as NumPy arrays."""
    with jax.enable_x64(True):
        args = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), args)
        return jax.tree.map(np.asarray, jax.jit(function)(*args))


TIGHT = {"solve": functools.partial(ours, alg=eo.Vern9()), "tol": 1e-12}


def case(width, n):
    """The weights, the starts and what was measured, in float64."""
    with jax.enable_x64(True):
        return network(width), *measured(n)


def single(x):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), x)


def table(width, n, steps):
    exact = case(width, n)
    wanted = flat(exactly(jax.grad(functools.partial(loss, **TIGHT)), *exact))
    p, u0, data = single(exact)
    losses = {
        name: functools.partial(loss, u0=u0, data=data, solve=solve)
        for name, solve in {"by hand": ours, "diffrax": vmapped, MATRIX: on_matrix}.items()
    }
    rows, blocks = {}, {"fit": by_fit(p, u0, data)}
    for name, of in losses.items():
        step, begin = adam_step(of)
        blocks[name] = by_hand(step, begin, p)
        first, _ = timed(step, p, begin(p))
        found = flat(jax.jit(jax.grad(of))(p))
        rows[name] = {"first": first, "error": distance(found, wanted)}
    by_us = losses["by hand"]
    blocks["gradient"] = repeated(functools.partial(jax.jit(jax.value_and_grad(by_us)), p))
    blocks["loss"] = repeated(functools.partial(jax.jit(by_us), p))
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


ORDER = ("fit", "by hand", "gradient", "loss", "diffrax", MATRIX, "torchdiffeq")


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


def at_equal_error(width, n, calls):
    """Rows of a target, a way, its tolerance and error, and the milliseconds of the loss and of its
    gradient."""
    exact = case(width, n)
    tight = functools.partial(TIGHT["solve"], tol=TIGHT["tol"])
    wanted = exactly(tight, *exact[:2])
    p, u0, data = single(exact)
    ways = {"solve": ours, "diffrax, vmapped": vmapped, MATRIX: on_matrix}
    errors, losses = {}, {}

    def error(solved, tol):
        found = np.asarray(solved(p, u0, np.float32(tol)), np.float64)
        return float(np.sqrt(np.mean((found - wanted) ** 2)))

    for name, solve in ways.items():
        errors[name] = functools.partial(error, jax.jit(solve))
        of = functools.partial(loss, solve=solve)
        losses[name] = jax.jit(of), jax.jit(jax.value_and_grad(of))
    rows = []
    for first in ("solve", MATRIX):
        target = errors[first](TOL)
        found = {name: loosest(error, target) for name, error in errors.items()}
        runs = {}
        for name, (tol, _) in found.items():
            for what, run in zip(("loss", "gradient"), losses[name], strict=True):
                runs[name, what] = functools.partial(run, p, u0, data, tol=np.float32(tol))
                jax.block_until_ready(runs[name, what]())
        spent = in_turns(runs, calls, clock=time.process_time)
        ms = {key: 1e3 * float(np.median(seconds)) for key, seconds in spent.items()}
        rows += [
            {"target": first, "way": x, "tol": tol, "error": e, "loss": ms[x, "loss"]}
            | {"gradient": ms[x, "gradient"]}
            for x, (tol, e) in found.items()
        ]
    return rows


def loosest(error, target):
    """The loosest tolerance with at most this error, to 3%, and its error; where there is none, as
    roundings are larger, the tolerance with the least error."""
    seen, tols = {}, 10.0 ** np.arange(-2, -7.6, -0.25)
    for loose, tol in itertools.pairwise(tols):
        seen[tol] = error(tol)
        if seen[tol] <= target:
            while loose > 1.03 * tol:
                middle = np.sqrt(loose * tol)
                seen[middle] = error(middle)
                if seen[middle] <= target:
                    tol = middle
                else:
                    loose = middle
            return tol, seen[tol]
    return min(seen.items(), key=lambda x: x[1])


def show_equal_error(width, rows):
    print(f"\n### 2 -> {width} -> {width} -> 2, at equal error\n")
    print(header(["error of", "", "tolerance", "error", "loss, ms", "gradient, ms", "to `solve`"]))
    base = {row["target"]: row for row in rows if row["way"] == "solve"}
    for row in rows:
        ratios = (f"{row[x] / base[row['target']][x]:.2f}" for x in ("loss", "gradient"))
        error, tol = f"{row['error']:.2e}", f"{row['tol']:.2e}"
        times = f"{row['loss']:.2f}", f"{row['gradient']:.2f}", ", ".join(ratios)
        print(line([f"{row['target']} at 1e-5", row["way"], tol, error, *times]), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--trajectories", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20, help="of a block, or calls")
    parser.add_argument("--equal-error", action="store_true", help="compare solve and diffrax so")
    parser.add_argument("--json", metavar="FILE", help="write everything measured")
    options = parser.parse_args()
    about, core = machine(*PEERS, "optax", "torch", "torchdiffeq"), last_core()
    print(f"{about['cpu']}, {about['cores']} cores, load {about['load']}; {about['versions']}")
    everything = {"machine": about, "tables": []}
    with held(None if core is None else {core}):
        for width in options.width:
            if options.equal_error:
                rows = at_equal_error(width, options.trajectories, options.steps)
                show_equal_error(width, rows)
            else:
                rows, skipped = table(width, options.trajectories, options.steps)
                show(width, rows, skipped)
            everything["tables"].append([width, rows])
    if options.json:
        write_json(options.json, everything)


if __name__ == "__main__":
    main()
