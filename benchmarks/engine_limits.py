"""The compiled engine by the size of a system, beside diffrax, the other one of `engine="auto"`.

    python benchmarks/engine_limits.py [--only rolls,dense] [--sizes 16,64] [--batches 16,4096]
        [--bits 64,32] [--limit SECONDS]

The ensembles are by Tsit5, in float64 at 1e-6 (in float32 at 1e-4): Lorenz 96 written with
`jnp.roll`, and with computed indices; a chain of oscillators, with each component written out and
all of them stacked; neurons that are coupled by a dense matrix that all trajectories share; a
network 2 -> W -> 2, and one n -> 128 -> n (`latent`); two shared coefficients for each component
(`coefficients`); and, with numbers of each trajectory's own, a network 2 -> W -> W -> 2
(`networks`), and an oscillator that is driven by a table of so many numbers (`tables`). Then come
the gradients of half the sum of squares of the ends, with respect to the initial states of each
trajectory and to the parameters.

Each ensemble and engine has a process of its own, on one core, without caches on disk. `ns` is the
least CPU time of several calls, for one trajectory, attempted step and component (of the networks:
and neuron of a layer; of the tables: and step alone); `first` is the CPU time of the first call.
Cases that take longer than the limit are left out.
"""

import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
from common.processes import is_worker
from common.report import line
from common.sizes import by_size
from common.timing import in_turns, timed

import ensembleode as eo


def rolls(u, p, t):
    return (jnp.roll(u, -1) - jnp.roll(u, 2)) * jnp.roll(u, 1) - u + p[0]


def index(u, p, t):
    i = jnp.arange(len(u))
    return (u[(i + 1) % len(u)] - u[(i - 2) % len(u)]) * u[(i - 1) % len(u)] - u + p[0]


def stack(u, p, t):
    half = len(u) // 2
    q = [0.0, *(u[i] for i in range(half)), 0.0]
    pulls = [p[0] * (q[i] - 2 * q[i + 1] + q[i + 2]) - q[i + 1] ** 3 for i in range(half)]
    return jnp.stack([*(u[half + i] for i in range(half)), *pulls])


def dense(u, p, t):
    return jnp.tanh(p[0] @ u) - u


def network(u, p, t):
    return p[1] @ jnp.tanh(p[0] @ u)


def coefficients(u, p, t):
    return p[0] * jnp.roll(u, 1) - p[1] * u


def networks(u, p, t):
    return p[2] @ jnp.tanh(p[1] @ jnp.tanh(p[0] @ u))


def tables(u, p, t):
    (table,) = p
    place = t * (len(table) - 1)
    i = jnp.clip(jnp.floor(place).astype(int), 0, len(table) - 2)
    return jnp.stack([u[1], table[i] + (place - i) * (table[i + 1] - table[i]) - u[0]])


OWN = ("networks", "tables")


def case(name, size, trajectories):
    """The field, the initial states, the parameters (with a leading axis of trajectories for those
    in `OWN`), and the end of time."""
    rng = np.random.default_rng(0)
    if name == "networks":
        shapes = (size, 2), (size, size), (2, size)
        own = [rng.normal(size=(trajectories, *s)) / s[1] ** 0.5 for s in shapes]
        return networks, rng.normal(size=(trajectories, 2)), own, 2.0
    if name == "tables":
        phases = rng.uniform(0, 6, size=(trajectories, 1))
        own = [np.sin(5 * np.linspace(0, 1, size) + phases)]
        return tables, rng.normal(size=(trajectories, 2)), own, 1.0
    if name == "network":
        shared = [rng.normal(size=(size, 2)), rng.normal(size=(2, size)) / size]
        return network, rng.normal(size=(trajectories, 2)), shared, 2.0
    u0 = rng.normal(size=(trajectories, size))
    if name == "latent":
        shared = [rng.normal(size=(128, size)) / size**0.5, rng.normal(size=(size, 128)) / 128**0.5]
        return network, u0, shared, 1.0
    if name == "coefficients":
        return coefficients, u0, [0.1 * rng.uniform(size=size), rng.uniform(size=size)], 1.0
    if name == "dense":
        return dense, u0, [rng.normal(size=(size, size)) / size**0.5], 2.0
    cases = {"rolls": (rolls, 8.0), "index": (index, 8.0), "stack": (stack, 1.0)}
    field, value = cases[name]
    return field, u0, [np.array(value)], 1.0


def work(name, size, trajectories, bits, engine, limit):
    """Of the solve and of its gradient: nanoseconds, and seconds of the first call."""
    signal.alarm(limit)
    jax.config.update("jax_enable_x64", True)
    field, u0, p, end = case(name, size, trajectories)

    def solve(u0, p):
        def of(i):
            return [x[i] for x in p] if name in OWN else p

        ens = eo.EnsembleProblem(
            eo.ODEProblem(field, u0[0], (0.0, end), of(0)),
            lambda prob, ctx: eo.remake(prob, u0=u0[ctx.index], p=of(ctx.index)),
        )
        tol = 1e-6 if bits == 64 else 1e-4
        where, options = eo.EnsembleThreads(1), {"abstol": tol, "reltol": tol, "engine": engine}
        return eo.solve(ens, eo.Tsit5(), where, trajectories=len(u0), save_start=False, **options)

    def loss(u0, p):
        return 0.5 * jnp.sum(solve(u0, p).u ** 2)

    def forward(u0, p):
        sim = solve(u0, p)
        return jnp.sum(sim.stats.naccept + sim.stats.nreject), 0.5 * jnp.sum(sim.u**2)

    dtype = f"float{bits}"
    args = jnp.asarray(u0, dtype), [jnp.asarray(x, dtype) for x in p]
    found = []
    for function in (forward, jax.grad(loss, argnums=(0, 1))):
        run = jax.jit(function)
        first, result = timed(run, *args, clock=time.process_time)
        if not found:
            steps = int(result[0])
        (spent,) = in_turns(
            {"": lambda run=run: run(*args)}, 30, least=3, budget=2.0, clock=time.process_time
        ).values()
        found.append((1e9 * min(spent) / (steps * (1 if name == "tables" else size)), first))
    return found


def main():
    if is_worker(work):
        return
    ways = [f"{engine}, {what}" for what in ("solve", "gradient") for engine in ENGINES]
    cases = by_size(
        __file__,
        __doc__,
        only="rolls,index,stack,dense,network,latent,coefficients,networks,tables",
        sizes="16,32,64,100,200,400",
        batches="256",
        bits="64",
        limit="an engine",
        columns=["size", "trajectories", "bits", *(f"{way}: ns, first" for way in ways)],
    )
    for name, size, trajectories, bits, cold in cases:
        found = []
        for engine in ENGINES:
            try:
                found.append(cold(engine))
            except TimeoutError:
                found.append(None)
        cells = [
            "" if each is None else f"{each[i][0]:.3g}, {each[i][1]:.3g}"
            for i in (0, 1)
            for each in found
        ]
        print(line([name, size, trajectories, bits, *cells]), flush=True)


ENGINES = ("compiled", "diffrax")

if __name__ == "__main__":
    main()
