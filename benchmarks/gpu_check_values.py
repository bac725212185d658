"""The values of gpu_check.py: what the library computes on the GPU, beside what it computes in a
process that has only the CPU.

Numbers are the same in both processes, as NumPy makes them. The kernels run the loop that the
compiled engine runs on the CPU, so they should differ by rounding at most, and mostly not at all.
Arrays take the same steps with operations of XLA. In float32, rounding changes the size of a step,
and so a solution by what its tolerance allows.
"""

import functools
import itertools
import pathlib
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from common.contenders import imported
from common.ivp_test_set import constants_of, PROBLEMS
from common.tasks import lorenz, tanh_network

import ensembleode as eo


ROOT = pathlib.Path(__file__).resolve().parents[1]
FLOAT32, FLOAT64 = "float32", "float64"
KERNEL, ARRAYS, REFERENCE = "kernel", "arrays", "CPU"
BOTH = (KERNEL, ARRAYS)
# By precision and by what computes: the largest difference from the CPU, relative to the largest
# number.
ALLOWED = {
    (FLOAT32, KERNEL): 1e-4,
    (FLOAT32, ARRAYS): 1e-3,
    (FLOAT64, KERNEL): 1e-9,
    (FLOAT64, ARRAYS): 1e-8,
}

# Seconds that the CPU is waited for: less than a check may take, with a GPU or without.
PATIENCE = 30.0 if jax.default_backend() == "gpu" else 100.0


class Way(NamedTuple):
    """What computes: its name, and the options of `solve` that choose it."""

    name: str
    options: dict[str, Any]

    def solve(self, ens: Any, alg: Any, **options: Any) -> Any:
        """The ensemble, solved with the steps that all ways take. (Otherwise arrays have diffrax's
        own.)"""
        if self.name == ARRAYS:
            options["stepsize_controller"] = eo.PIController()
        return eo.solve(ens, alg, **self.options, **options)


def way_of(name: str) -> Way:
    """The ensemble algorithm. Without a GPU, arrays are by the engine that they have on one."""
    if name == KERNEL:
        return Way(name, {"ensemblealg": eo.EnsembleGPUKernel()})
    if name == ARRAYS:
        engine = {} if jax.default_backend() == "gpu" else {"engine": "diffrax"}
        return Way(name, {"ensemblealg": eo.EnsembleGPUArray(), **engine})
    if name == REFERENCE:
        return Way(name, {"ensemblealg": eo.EnsembleSerial()})
    chosen = {"EnsembleSerial()": eo.EnsembleSerial, "EnsembleThreads()": eo.EnsembleThreads}
    return Way(name, {"ensemblealg": chosen[name]()} if name in chosen else {})


Values = Callable[[Way], dict[str, Any]]


class Check(NamedTuple):
    """Named arrays, by one of some ways, and what they may differ by, if not `ALLOWED`."""

    what: str
    values: Values
    real: str = FLOAT64
    ways: Sequence[str] = (KERNEL,)
    allowed: float | None = None

    @property
    def name(self) -> str:
        return f"{self.what}, {self.real}"


#
# Comparing
#


def checks(part: str, *, small: bool, references: str) -> dict[str, Callable[[], dict[str, Any]]]:
    """The checks of a part by name."""
    return {
        f"{check.name} by {way}": functools.partial(compared, check, way, path)
        for check, path in _each(part, small, references)
        for way in check.ways
    }


def refer(part: str, *, small: bool, references: str) -> None:
    """Compute what the checks of a part compare with, each into a file."""
    for check, path in _each(part, small, references):
        new = path.with_suffix(".new")
        try:
            found = computed(check, REFERENCE)
        except Exception as error:  # the check says so, and the others go on
            traceback.print_exc()
            new.write_text(f"{type(error).__name__}: {error}"[:500])
            new.replace(path.with_suffix(".error"))
            continue
        with new.open("wb") as file:
            np.savez(file, **found)
        new.replace(path)


def _each(part: str, small: bool, folder: str) -> Iterator[tuple[Check, pathlib.Path]]:
    """The checks of a part, and where what the CPU computes for them is."""
    for check in PARTS[part](10 if small else 1):
        name = re.sub(r"\W+", "-", f"{part} {check.name}")
        yield check, pathlib.Path(folder, f"{name}.npz")


def computed(check: Check, way: str) -> dict[str, np.ndarray]:
    with jax.enable_x64(check.real == FLOAT64):
        found = check.values(way_of(way))
        return {name: np.asarray(x) for name, x in found.items()}


def compared(check: Check, way: str, path: pathlib.Path) -> dict[str, Any]:
    """A row: how far the values are from those of the CPU."""
    found = computed(check, way)
    expected = reference(path)
    allowed = check.allowed or ALLOWED.get((check.real, way), ALLOWED[check.real, KERNEL])
    notes, worst = [], 0.0
    for name, x in expected.items():
        off, note = distance(found[name], x)
        worst = max(worst, off)
        notes += [f"{name}: {note}"] * bool(note)
    same = all(found[name].tobytes() == x.tobytes() for name, x in expected.items())
    return {
        "result": "passed" if worst <= allowed else "failed",
        "difference": worst,
        "allowed": allowed,
        "note": "the same bits" if same else "; ".join(notes),
    }


def reference(path: pathlib.Path) -> dict[str, np.ndarray]:
    """What the CPU has computed, as soon as it is there.

    **Raises:** `RuntimeError` where there is none.
    """
    wrong, until = path.with_suffix(".error"), time.monotonic() + PATIENCE
    while not path.exists():
        if wrong.exists():
            raise RuntimeError(f"the CPU failed, too: {wrong.read_text()}")
        if path.with_name("ended").exists() and not path.exists():
            raise RuntimeError("the process that computes on the CPU ended before it")
        if time.monotonic() > until:
            raise RuntimeError("the CPU has not computed it in time")
        time.sleep(0.02)
    with np.load(path) as arrays:
        return dict(arrays)


def distance(found: np.ndarray, expected: np.ndarray) -> tuple[float, str]:
    """The largest difference, relative to the largest number, and a note. Infinite for other
    shapes, or if one has a number where the other has none. Counts are only noted: by rounding, a
    trajectory may take another step."""
    if found.shape != expected.shape:
        return np.inf, f"the shape {found.shape}, not {expected.shape}"
    if np.issubdtype(expected.dtype, np.integer):
        other = int(np.sum(found != expected))
        return 0.0, f"{other} of {expected.size} differ" if other else ""
    finite = np.isfinite(expected)
    if (np.isfinite(found) != finite).any():
        return np.inf, f"{np.sum(np.isfinite(found) != finite)} are finite in only one"
    if not finite.any():
        return 0.0, ""
    size = float(np.max(np.abs(expected[finite]))) or 1.0
    return float(np.max(np.abs(found[finite].astype(float) - expected[finite]))) / size, ""


def is_lost() -> bool:
    """Whether nothing can run any more: a kernel that goes wrong takes the GPU with it."""
    try:
        return float(jnp.sum(jax.block_until_ready(jnp.arange(8.0) + 1.0))) != 36.0
    except Exception:  # of any kind: the process then says so, and ends
        return True


#
# What is solved
#


def parts_of(sim: Any, *names: str) -> dict[str, Any]:
    """The states and how each trajectory ended, and further attributes. (Return codes as floating
    numbers, since they have to agree.)"""
    found = {"u": sim.u, "retcode": 1.0 * sim.retcode, "naccept": sim.stats.naccept}
    return found | {"nreject": sim.stats.nreject} | {name: getattr(sim, name) for name in names}


def tolerances(real: str) -> dict[str, float]:
    close = 1e-5 if real == FLOAT32 else 1e-8
    return {"abstol": close, "reltol": close}


def lorenz_ensemble(n: int, real: str, t1: float = 1.0) -> Any:
    """Each trajectory with its own rho."""
    rhos = jnp.asarray(np.linspace(0.0, 21.0, n, dtype=real))
    u0 = jnp.asarray(np.array([1.0, 0.0, 0.0], real))
    prob = eo.ODEProblem(lorenz, u0, (0.0, t1), rhos[0])
    return eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=rhos[ctx.index]))


def of_lorenz(n: int, real: str, alg: Any, *names: str, **options: Any) -> Values:
    options = tolerances(real) | options

    def values(way: Way) -> dict[str, Any]:
        ens = lorenz_ensemble(n, real)
        return parts_of(way.solve(ens, alg, trajectories=n, **options), *names)

    return values


def explicit(less: int) -> list[Check]:
    # (The number of trajectories is not a multiple of the threads of a block.)
    n, times = 1000 // less, np.linspace(0.0, 1.0, 11)
    tsit5, fixed = eo.Tsit5(), {"adaptive": False, "dt": 0.01}
    every = {"save_everystep": True, "maxiters": 200}
    some = {"batch_size": max(1, n // 3)}
    return [
        Check("Tsit5, ends", of_lorenz(n, FLOAT32, tsit5), FLOAT32, BOTH),
        Check("Tsit5, ends", of_lorenz(n, FLOAT64, tsit5), FLOAT64, BOTH),
        Check("Tsit5, saveat", of_lorenz(n, FLOAT32, tsit5, saveat=times), FLOAT32),
        Check("Vern7, saveat", of_lorenz(n, FLOAT64, eo.Vern7(), saveat=times), FLOAT64, BOTH),
        Check("Tsit5, every step", of_lorenz(n, FLOAT64, tsit5, "t", "lengths", **every)),
        Check("RK4, fixed steps", of_lorenz(n, FLOAT32, eo.RK4(), **fixed), FLOAT32),
        Check("own starts, shared parameters", own_starts(n, FLOAT32), FLOAT32),
        Check("own time spans and saveat", own_times(n), FLOAT64, BOTH),
        Check("trajectories that fail", failing(n), FLOAT64, BOTH),
        Check("batches", of_lorenz(n, FLOAT32, tsit5, **some), FLOAT32),
        Check("one trajectory", of_lorenz(1, FLOAT32, tsit5), FLOAT32),
        Check("10^6 trajectories", of_lorenz(10**6 // less**3, FLOAT32, tsit5), FLOAT32),
    ]


def own_starts(n: int, real: str) -> Values:
    def values(way: Way) -> dict[str, Any]:
        starts = jnp.asarray(np.random.default_rng(0).normal(size=(n, 3)).astype(real))
        prob = eo.ODEProblem(lorenz, starts[0], (0.0, 1.0), jnp.asarray(np.array(20.0, real)))
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=starts[ctx.index]))
        return parts_of(way.solve(ens, eo.Tsit5(), trajectories=n, **tolerances(real)))

    return values


def own_times(n: int) -> Values:
    def values(way: Way) -> dict[str, Any]:
        ends = jnp.asarray(np.linspace(0.5, 1.5, n))

        def change(prob: Any, ctx: Any) -> Any:
            end = ends[ctx.index]
            return eo.remake(prob, tspan=(0.0, end), saveat=jnp.stack([end / 3, end / 2, end]))

        ens = eo.EnsembleProblem(lorenz_ensemble(n, FLOAT64).prob, change)
        prob = eo.remake(ens.prob, p=jnp.asarray(20.0))
        ens = eo.EnsembleProblem(prob, change)
        sim = way.solve(ens, eo.Tsit5(), trajectories=n, **tolerances(FLOAT64))
        return parts_of(sim, "t")

    return values


def failing(n: int) -> Values:
    """By NaN, an infinite solution, a step that underflows, and too many steps; all others are
    exp(-t)."""

    def f(u: Any, p: Any, t: Any) -> Any:
        nan = jnp.where(t > 0.6, jnp.nan, 1.0) * u
        long, sticks = jnp.cos(3e3 * t) * 3e3, jnp.sign(0.3 - u) * 1e3
        return jnp.select([p == 0, p == 1, p == 2, p == 3], [nan, 10 * u**2, sticks, long], -u)

    def values(way: Way) -> dict[str, Any]:
        prob = eo.ODEProblem(f, jnp.ones(1), (0.0, 1.0), jnp.array(0.0))
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=1.0 * ctx.index))
        sim = way.solve(ens, eo.Tsit5(), trajectories=n, maxiters=300)
        good = jnp.isfinite(sim.u[:, -1, 0])
        return {"retcode": 1.0 * sim.retcode, "end": jnp.where(good, sim.u[:, -1, 0], 0.0)}

    return values


def of_test_set(name: str, n: int, alg: Any, end: float, real: str = FLOAT64, **options: Any):
    """A stiff problem with constants that differ by about a tenth."""
    problem = PROBLEMS[name]
    options = {"abstol": 1e-9, "reltol": 1e-6} | options

    def values(way: Way) -> dict[str, Any]:
        constants = jnp.asarray(constants_of(problem, n - 1).astype(real))
        u0 = jnp.asarray(np.array(problem.u0, real))
        prob = eo.ODEProblem(problem.f, u0, (0.0, end), constants[0])
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=constants[ctx.index]))
        return parts_of(way.solve(ens, alg, trajectories=n, **options))

    return values


def stiff(less: int) -> list[Check]:
    """By kernels: the engine that arrays have on a GPU has no Rosenbrock methods."""
    n, times = 300 // less, np.array([1.0, 1e2, 1e4])
    single = {"abstol": 1e-6, "reltol": 1e-4}
    rodas = of_test_set("ROBER", n, eo.Rodas5P(), 1e5)
    saved = of_test_set("ROBER", n, eo.Rodas5P(), 1e4, saveat=times)
    switched = of_test_set("VDP", n, eo.AutoTsit5(eo.Rosenbrock23()), 1.0)
    low_order = of_test_set("ROBER", n, eo.Rosenbrock23(), 1e2, FLOAT32, **single)
    return [
        Check("Rodas5P, Robertson", rodas, allowed=1e-6),
        Check("Rodas5P, Robertson, saveat", saved, allowed=1e-6),
        Check("AutoTsit5(Rosenbrock23), Van der Pol", switched, allowed=1e-6),
        Check("Rosenbrock23, Robertson", low_order, FLOAT32, allowed=1e-3),
    ]


def falling(u: Any, p: Any, t: Any) -> Any:
    return jnp.stack([u[1], -p[0]])


def balls(x: Any, n: int, way: Way) -> Any:
    """They bounce; from other heights each."""

    def bounce(integrator: Any) -> Any:
        u = integrator.u
        return eo.remake(integrator, u=jnp.stack([0.0 * u[0], -integrator.p[1] * u[1]]))

    floor = eo.ContinuousCallback(lambda u, t, integrator: u[0], None, bounce)
    u0 = jnp.stack([x[0], 0.0 * x[0]])
    prob = eo.ODEProblem(falling, u0, (0.0, 3.0), x[1:], callback=floor)

    def change(prob: Any, ctx: Any) -> Any:
        return eo.remake(prob, u0=prob.u0 * (1.0 + ctx.index / n))

    options = {"trajectories": n, "max_events": 8, **tolerances(x.dtype.name)}
    return way.solve(eo.EnsembleProblem(prob, change), eo.Tsit5(), **options)


BALL = np.array([5.0, 9.81, 0.8])  # height, gravity, restitution


def events(less: int) -> list[Check]:
    """By kernels: the engine that arrays have on a GPU has no callbacks."""
    n = 1000 // less

    def bouncing(real: str) -> Values:
        def values(way: Way) -> dict[str, Any]:
            sim = balls(jnp.asarray(BALL.astype(real)), n, way)
            happened = jnp.isfinite(sim.events.t)
            times = jnp.where(happened, sim.events.t, 0.0)
            return {"end": sim.u[:, -1], "times": times, "retcode": 1.0 * sim.retcode}

        return values

    def stopping(way: Way) -> dict[str, Any]:
        condition = lambda u, t, integrator: (u[0] > 5.0) & (t > 0.2)  # noqa: E731
        stop = eo.DiscreteCallback(condition, eo.terminate)
        sim = way.solve(
            lorenz_ensemble(n, FLOAT64), eo.Tsit5(), trajectories=n, callback=stop, **tight
        )
        return parts_of(sim) | {"times": jnp.where(jnp.isfinite(sim.t), sim.t, 0.0)}

    def doses(way: Way) -> dict[str, Any]:
        amounts = jnp.asarray(np.linspace(1.0, 10.0, n))

        def patient(prob: Any, ctx: Any) -> Any:
            amount = amounts[ctx.index]

            def dose(integrator: Any) -> Any:
                return eo.remake(integrator, u=integrator.u + amount)

            return eo.remake(prob, callback=eo.PresetTimeCallback([6.0, 12.0, 18.0], dose))

        prob = eo.ODEProblem(lambda u, p, t: -p * u, jnp.array([10.0]), (0.0, 24.0), jnp.array(0.3))
        ens = eo.EnsembleProblem(prob, patient)
        options = {"trajectories": n, "saveat": np.linspace(0.0, 24.0, 13), **tight}
        return parts_of(way.solve(ens, eo.Tsit5(), **options))

    tight = tolerances(FLOAT64)
    return [
        Check("ContinuousCallback", bouncing(FLOAT64)),
        Check("ContinuousCallback", bouncing(FLOAT32), FLOAT32, allowed=1e-2),
        Check("DiscreteCallback that terminates", stopping, FLOAT64),
        Check("PresetTimeCallback, doses", doses),
    ]


def noise(less: int) -> list[Check]:
    """By kernels. The random words are the same everywhere, so a path that differs by more than
    rounding is another one."""
    n, path = 1000 // less, {"save_noise": True}

    def growth(real: str, p: Any) -> Any:
        times_state = lambda i: lambda u, p, t: p[i] * u  # noqa: E731
        u0 = jnp.asarray(np.array([1.0, 2.0, 3.0], real))
        prob = eo.SDEProblem(times_state(0), times_state(1), u0, (0.0, 1.0), p)
        return eo.EnsembleProblem(prob)

    def ends(real: str, alg: Any, **options: Any) -> Values:
        def values(way: Way) -> dict[str, Any]:
            ens = growth(real, jnp.asarray(np.array([0.5, 0.3], real)))
            return parts_of(way.solve(ens, alg, trajectories=n, **options, **path), "W")

        return values

    def gradient(way: Way) -> dict[str, Any]:
        def loss(p: Any) -> Any:
            sim = way.solve(growth(FLOAT64, p), eo.EM(), trajectories=n, dt=0.01)
            return jnp.mean(sim.u[:, -1] ** 2)

        return {"gradient": jax.grad(loss)(jnp.array([0.5, 0.3]))}

    def reactions(way: Way) -> dict[str, Any]:
        k = jnp.asarray(np.array([0.005, 0.1], FLOAT32))
        prob = eo.JumpProblem.of_reactions(
            [[1, 1], [0, 1]], [[0, 2], [0, 0]], [99, 1], (0, 40.0), k
        )
        ens, times = eo.EnsembleProblem(prob), np.linspace(0.0, 40.0, 9)
        return parts_of(way.solve(ens, eo.Direct(), trajectories=n, saveat=times))

    return [
        Check("EM", ends(FLOAT32, eo.EM(), dt=0.01), FLOAT32),
        Check("SOSRI", ends(FLOAT64, eo.SOSRI(), dt=0.01)),
        Check("SOSRI, adaptive", ends(FLOAT64, eo.SOSRI(), abstol=1e-2, reltol=1e-2)),
        Check("gradient of EM", gradient),
        Check("reactions", reactions, FLOAT32),
    ]


def weights_of(width: int, real: str, layers: int = 2) -> list:
    """Those of a network 2 -> `width` -> (...) -> 2, from NumPy's numbers."""
    random = np.random.default_rng(0)
    sizes = [2, *[width] * layers, 2]
    return [
        (
            jnp.asarray((random.normal(size=(m, k)) / np.sqrt(k)).astype(real)),
            jnp.asarray((0.1 * random.normal(size=m)).astype(real)),
        )
        for k, m in itertools.pairwise(sizes)
    ]


def mlp_of(width: int, real: str) -> Any:
    """Equinox's network 2 -> `width` -> 2."""
    weights = weights_of(width, real, layers=1)
    network = eqx.nn.MLP(2, 2, width, 1, activation=jnp.tanh, key=jax.random.key(0))

    def where(network: Any) -> list:
        return [x for layer in network.layers for x in (layer.weight, layer.bias)]

    return eqx.tree_at(where, network, [x for layer in weights for x in layer])


def network_ends(x: Any, f: Callable, n: int, real: str, way: Way) -> Any:
    """Ends of trajectories that share the parameters `x`."""
    starts = jnp.asarray(np.random.default_rng(1).normal(size=(n, 2)).astype(real))
    prob = eo.ODEProblem(f, starts[0], (0.0, 1.0), x)
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=starts[ctx.index]))
    # (Products in the precision of their numbers, where a GPU would take less by default.)
    with jax.default_matmul_precision("highest"):
        return way.solve(ens, eo.Tsit5(), trajectories=n, **tolerances(real))


def mlp(u: Any, p: Any, t: Any) -> Any:
    return p(u)


def networks(less: int) -> list[Check]:
    n = 500 // less

    def small(real: str) -> Values:
        return lambda way: parts_of(network_ends(mlp_of(16, real), mlp, n, real, way))

    def large(way: Way) -> dict[str, Any]:
        weights = weights_of(64, FLOAT32)
        return parts_of(network_ends(weights, tanh_network, n, FLOAT32, way))

    return [
        Check("2-16-2", small(FLOAT32), FLOAT32, BOTH),
        Check("2-16-2", small(FLOAT64), FLOAT64),
        Check("2-64-64-2", large, FLOAT32, BOTH),
    ]


#
# Derivatives
#


def numbers(n: int, real: str) -> dict[str, Any]:
    """What a Lorenz ensemble is differentiated by."""
    found = {
        "start": np.array([1.0, 0.1, 0.5]),
        "shared": np.array([10.0, 8 / 3]),
        "own": np.linspace(1.0, 20.0, n),
    }
    return {name: jnp.asarray(x.astype(real)) for name, x in found.items()}


def lorenz_loss(x: dict[str, Any], way: Way, **options: Any) -> Any:
    n, real = len(x["own"]), x["own"].dtype.name

    def field(u: Any, p: Any, t: Any) -> Any:
        (sigma, beta), rho = p
        return jnp.stack(
            [sigma * (u[1] - u[0]), u[0] * (rho - u[2]) - u[1], u[0] * u[1] - beta * u[2]]
        )

    def change(prob: Any, ctx: Any) -> Any:
        return eo.remake(prob, u0=x["start"], p=(x["shared"], x["own"][ctx.index]))

    prob = eo.ODEProblem(field, x["start"], (0.0, 1.0), (x["shared"], x["own"][0]))
    ens = eo.EnsembleProblem(prob, change)
    options = {"saveat": np.array([0.3, 1.0]), **tolerances(real), **options}
    return jnp.mean(jnp.sin(way.solve(ens, eo.Tsit5(), trajectories=n, **options).u)) * 3.0


def network_gradient(x: Callable[[], Any], f: Callable, n: int) -> Values:
    def loss(arrays: Any, rest: Any, way: Way) -> Any:
        sim = network_ends(eqx.combine(arrays, rest), f, n, FLOAT32, way)
        return jnp.mean(sim.u[:, -1] ** 2)

    def values(way: Way) -> dict[str, Any]:
        arrays, rest = eqx.partition(x(), eqx.is_array)
        found = jax.tree.leaves(jax.grad(loss)(arrays, rest, way))
        return {f"leaf {i}": leaf for i, leaf in enumerate(found)}

    return values


def gradients(less: int) -> list[Check]:
    n = 300 // less

    def reverse(real: str) -> Values:
        return lambda way: jax.grad(lorenz_loss)(numbers(n, real), way)

    def forward(way: Way) -> dict[str, Any]:
        x = numbers(n, FLOAT64)
        ahead = {"sensealg": eo.ForwardDiffSensitivity()}
        loss = lambda x: lorenz_loss(x, way, **ahead)  # noqa: E731
        value, tangent = jax.jvp(loss, (x,), (jax.tree.map(jnp.ones_like, x),))
        return {"value": value, "tangent": tangent}

    def hessian(way: Way) -> dict[str, Any]:
        x = numbers(5, FLOAT64)
        found = jax.hessian(lambda shared: lorenz_loss(x | {"shared": shared}, way))(x["shared"])
        return {"hessian": found}

    def through_events(way: Way) -> dict[str, Any]:
        def loss(x: Any) -> Any:
            sim = balls(x, n, way)
            return jnp.mean(sim.u[:, -1] ** 2) + jnp.mean(sim.events.t[:, 0] ** 2)

        return {"gradient": jax.grad(loss)(jnp.asarray(BALL))}

    def of_stiff(way: Way) -> dict[str, Any]:
        problem = PROBLEMS["ROBER"]
        u0 = jnp.asarray(np.array(problem.u0))

        def loss(rates: Any) -> Any:
            prob = eo.ODEProblem(problem.f, u0, (0.0, 1e3), rates)
            change = lambda prob, ctx: eo.remake(prob, p=rates * (1 + ctx.index / n))  # noqa: E731
            options = {"trajectories": n, "abstol": 1e-9, "reltol": 1e-6}
            sim = way.solve(eo.EnsembleProblem(prob, change), eo.Rodas5P(), **options)
            return jnp.mean(sim.u[:, -1, 2])

        rates = jnp.asarray(np.array(problem.constants))
        return {"gradient by log rates": jax.grad(loss)(rates) * rates}

    network = network_gradient(lambda: mlp_of(16, FLOAT32), mlp, n)
    return [
        Check("Lorenz, in reverse", reverse(FLOAT32), FLOAT32, BOTH, 1e-3),
        Check("Lorenz, in reverse", reverse(FLOAT64), FLOAT64, BOTH),
        Check("Lorenz, forwards", forward),
        Check("Lorenz, Hessian", hessian, allowed=1e-7),
        Check("2-16-2, in reverse", network, FLOAT32, BOTH, 1e-3),
        Check("through events", through_events, allowed=1e-7),
        Check("Robertson, in reverse", of_stiff, allowed=1e-6),
    ]


def widest(less: int) -> list[Check]:
    """The gradient of a network that is large for a thread of a GPU."""
    values = network_gradient(lambda: weights_of(64, FLOAT32), tanh_network, 300 // less)
    return [Check("2-64-64-2, in reverse", values, FLOAT32, (ARRAYS, KERNEL), 1e-3)]


def transforms(less: int) -> list[Check]:
    n = 300 // less
    tight = tolerances(FLOAT64)

    def end(scale: Any, way: Way) -> Any:
        ens = lorenz_ensemble(n, FLOAT64)
        prob = eo.remake(ens.prob, u0=scale * jnp.asarray(np.array([1.0, 0.2, 0.3])))
        ens = eo.EnsembleProblem(prob, ens.prob_func)
        return way.solve(ens, eo.Tsit5(), trajectories=n, save_start=False, **tight).u[:, -1]

    scales = np.array([0.5, 1.0, 2.0])

    def mapped(transform: Callable) -> Values:
        return lambda way: {"end": transform(lambda x: end(x, way))(jnp.asarray(scales))}

    def scanned(way: Way) -> dict[str, Any]:
        def body(scale: Any, _: Any) -> tuple[Any, Any]:
            means = jnp.mean(end(scale, way), axis=0)
            return 1.0 + 0.1 * jnp.tanh(means[0]), means

        return {"means": jax.lax.scan(body, jnp.asarray(1.0), None, length=4)[1]}

    def within_grad(way: Way) -> dict[str, Any]:
        @jax.jit
        def loss(scale: Any) -> Any:
            def body(x: Any, _: Any) -> tuple[Any, None]:
                return x + 0.1 * jnp.tanh(jnp.mean(end(x, way))), None

            return jax.lax.scan(body, scale, None, length=3)[0]

        return {"gradient": jax.grad(loss)(jnp.asarray(1.0))}

    return [
        Check("jit", lambda way: {"end": jax.jit(lambda x: end(x, way))(jnp.asarray(1.0))}),
        Check("vmap", mapped(jax.vmap)),
        Check("jit of vmap", mapped(lambda f: jax.jit(jax.vmap(f))), FLOAT64, (ARRAYS,)),
        Check("lax.map", mapped(lambda f: lambda x: jax.lax.map(f, x))),
        Check("scan", scanned),
        Check("grad of jit of scan", within_grad),
    ]


#
# The rest
#


def threads(less: int) -> list[Check]:
    """The algorithms for CPUs, where JAX's default device may be a GPU."""
    n = 1000 // less
    ways = ("EnsembleThreads()", "EnsembleSerial()", "no ensemble algorithm")
    values = of_lorenz(n, FLOAT64, eo.Tsit5())
    in_jit = lambda way: {"u": jax.jit(lambda: values(way)["u"])()}  # noqa: E731
    gradient = lambda way: jax.grad(lorenz_loss)(numbers(n, FLOAT64), way)  # noqa: E731
    return [
        Check("Lorenz", values, FLOAT64, ways),
        Check("Lorenz in jit", in_jit, FLOAT64, ways[:1]),
        Check("gradient", gradient, FLOAT64, ways[:2]),
    ]


def fit(less: int) -> list[Check]:
    """Some steps of Adam on the rates of a decay, from its data."""
    n = 200 // less

    def values(way: Way) -> dict[str, Any]:
        adam = imported("optax").adam(0.1)
        data = jnp.asarray(np.exp(-np.linspace(0.5, 2.0, n)).astype(FLOAT32))

        def loss(params: Any) -> Any:
            prob = eo.ODEProblem(lambda u, p, t: -p * u, jnp.ones(1), (0.0, 1.0), params["slowest"])

            def change(prob: Any, ctx: Any) -> Any:
                rate = params["slowest"] + params["range"] * (ctx.index / n)
                return eo.remake(prob, p=rate)

            sim = way.solve(eo.EnsembleProblem(prob, change), eo.Tsit5(), trajectories=n)
            return jnp.mean((sim.u[:, -1, 0] - data) ** 2)

        start = {"slowest": jnp.asarray(1.0), "range": jnp.asarray(1.0)}
        result = eo.fit(loss, start, optimizer=adam, maxiters=10, progress=False)
        return {"losses": result.losses, **result.params}

    return [Check("ten steps", values, FLOAT32, BOTH, 1e-3)]


WRITTEN = "eo.EnsembleThreads()"  # by README.md's example
README_WAYS = {
    "as written": WRITTEN,
    "no ensemble algorithm": "None",
    KERNEL: "eo.EnsembleGPUKernel()",
    ARRAYS: "eo.EnsembleGPUArray()",
    REFERENCE: WRITTEN,
}


def readme(less: int) -> list[Check]:
    """The first two blocks of code in README.md. They are solved to the default tolerance, 1e-3."""
    ways = tuple(name for name in README_WAYS if name != REFERENCE)
    return [
        Check("the example", lambda way: {"u": _readme(way, "sim.u")}, FLOAT32, ways, 1e-2),
        Check("its gradient", lambda way: {"g": _readme(way, "gradient")}, FLOAT32, ways, 5e-2),
        Check("its plot", _plotted, FLOAT32, ("as written",)),
    ]


def _readme(way: Way, wanted: str) -> Any:
    solves, _, differentiates = _blocks()
    code = solves + (differentiates if wanted == "gradient" else "")
    if WRITTEN not in code:
        raise ValueError(f"README.md's example has no {WRITTEN} any more")
    space: dict[str, Any] = {}
    exec(code.replace(WRITTEN, README_WAYS[way.name]), space)
    return eval(wanted, space)


def _plotted(way: Way) -> dict[str, Any]:
    imported("matplotlib")
    solves, plots, _ = _blocks()
    space: dict[str, Any] = {}
    exec(solves + re.sub(r"axes\.figure\.savefig.*", "", plots), space)
    return {"lines": len(space["axes"].lines) * 1.0}


def _blocks() -> tuple[str, str, str]:
    """The code that solves, that plots and that differentiates."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first, second, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    solves, plot, rest = first.partition("axes = ")
    return solves, plot + rest, second


PARTS: dict[str, Callable[[int], list[Check]]] = {
    "readme": readme,
    "explicit": explicit,
    "gradients": gradients,
    "stiff": stiff,
    "events": events,
    "networks": networks,
    "transforms": transforms,
    "threads": threads,
    "fit": fit,
    "noise": noise,
    "widest": widest,
}
