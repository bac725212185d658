"""Events that change the state and go on: a pressure relief valve with impacts, on one core.

    python benchmarks/events.py [--n 512] [--tol 1e-10] [--only compiled,C++] [--json FILE]
    python benchmarks/events.py --quiet [--json FILE]

The valve is that of Hos and Champneys, with the constants of Nagy, Plavecz and Hegedus ("The art of
solving a large number of non-stiff, low-dimensional ODE systems on GPUs and CPUs", 2020). The state
is opening, speed and pressure, and each trajectory has its own flow, from 1 to 10, until t = 50.
When the valve closes (opening zero, downwards) it springs back with 0.8 of the speed. When the
speed passes zero downwards, the opening is saved.

The contenders are `C++`, written by hand (events.cpp, with g++ or $CXX), one trajectory after the
other, to which the ratios refer; `compiled`, the engine, in `jit`, and `compiled (ends)` with
`interp_points=0`, which looks for events only at the ends of steps, as C++ does; `Numba`, the same
loop as in C++; `heyoka`, in batches, with a terminal event and one that isn't; `diffrax`,
`diffeqsolve` with an `Event`, restarted in a `while_loop`, vmapped; `SciPy`, `solve_ivp` with
DOP853, restarted. Contenders that are not installed are left out. diffrax and SciPy solve fewer
trajectories, and their times are scaled.

All contenders run in one process, held to one core, and take turns: the time is the least CPU time.
`error` is the largest difference of the ends, relative to the norm of each or to one, from those of
the engine with Vern9 at 1e-13.

Then `--reentries` capsules fall through the atmosphere until 20 km above the ground, each with its
own ballistic coefficient and flight-path angle, and the same without a stop.

`--quiet` prints another table instead: the cost of callbacks that never act, as ratios to the time
without a callback, for 2,048 trajectories, with a condition that is a component and with one that
is a sum of squares. (The time is the CPU time that a fifth of the calls stay below.)
"""

import argparse
import ctypes
import functools
import math
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from common.contenders import imported, Skip
from common.cpp import library
from common.numba_loops import adaptive
from common.processes import held, last_core
from common.report import header, line, machine, PEERS, write_json
from common.tasks import lorenz
from common.timing import in_turns


jax.config.update("jax_enable_x64", True)

import diffrax  # noqa: E402
import optimistix as optx  # noqa: E402

import ensembleode as eo  # noqa: E402


END, RESTITUTION, SECTIONS = 50.0, 0.8, 64
START = (0.2, 0.0, 10.0)
FEW = 16  # trajectories of the slow ways


def valve(u, q, t):
    x, v, pressure = u
    return jnp.stack([v, -1.25 * v - (x + 10) + pressure, 20 * (q - x * jnp.sqrt(pressure))])


def flows(n):
    return np.linspace(1.0, 10.0, n)


#
# Ways: `call()` gives the ends, and how many events there were; of `n` trajectories
#


def by_engine(n, tol, *, interp_points=10, alg=None):
    def spring_back(integrator):
        x, v, pressure = integrator.u
        return eo.remake(integrator, u=jnp.stack([x, -RESTITUTION * v, pressure]))

    shared = {"affect": None, "interp_points": interp_points}
    closing = eo.ContinuousCallback(
        lambda u, t, integrator: u[0],
        affect_neg=spring_back,
        save_positions=(False, False),
        **shared,
    )
    section = eo.ContinuousCallback(
        lambda u, t, integrator: u[1], affect_neg=lambda integrator: integrator, **shared
    )
    prob = eo.ODEProblem(valve, jnp.array(START), (0.0, END), 1.0)
    options = {
        "callback": eo.CallbackSet(closing, section),
        "max_events": SECTIONS,
        "abstol": tol,
        "reltol": tol,
        "save_start": False,
        "trajectories": n,
    }

    @jax.jit
    def solve(qs):
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=qs[ctx.index]))
        sim = eo.solve(ens, alg or eo.Tsit5(), eo.EnsembleThreads(1), **options)
        return sim.u[:, -1], sim.events.count

    qs = jnp.array(flows(n))
    return lambda: solve(qs)


def by_cpp(n, tol):
    run = library(pathlib.Path(__file__).with_suffix(".cpp")).valve
    run.restype = ctypes.c_long
    qs, ends = flows(n), np.empty((n, 3))
    events, sections = np.zeros((n, 2), np.int64), np.empty((n, SECTIONS))
    number, at = ctypes.c_double, lambda x: ctypes.c_void_p(x.ctypes.data)

    def call():
        count, most = ctypes.c_long(n), ctypes.c_long(SECTIONS)
        numbers = number(END), number(tol), number(RESTITUTION)
        run(count, at(qs), *numbers, most, at(ends), at(events), at(sections))
        return ends, events[:, 1]

    return call


def by_numba(n, tol):
    numba = imported("numba")
    njit = numba.njit(fastmath=True, error_model="numpy", forceinline=True)
    w = np.array(eo.Tsit5().tableau.interpolant.weights)

    @njit
    def f(y, p, t, dy):
        dy[0] = y[1]
        dy[1] = -1.25 * y[1] - (y[0] + 10) + y[2]
        dy[2] = 20 * (p[0] - y[0] * math.sqrt(y[2]))

    @njit
    def within(y, h, k, c, theta):
        total = 0.0
        for j in range(7):
            total += (
                k[j, c]
                * theta
                * (w[j, 0] + theta * (w[j, 1] + theta * (w[j, 2] + theta * w[j, 3])))
            )
        return y[c] + h * total

    @numba.njit(fastmath=True, error_model="numpy")
    def crossing(y, h, k, c, end):
        lo, hi, flo, fhi, side = 0.0, 1.0, y[c], end, 0
        if flo <= 0:
            lo = 1e-2
            flo = within(y, h, k, c, lo)
            if flo <= 0:
                return 0.0
        for i in range(100):
            if hi - lo <= 2e-16:
                break
            x = (lo * fhi - hi * flo) / (fhi - flo)
            halves = not (lo < x < hi) or i % 8 == 7
            if halves:
                x = 0.5 * (lo + hi)
                if x in (lo, hi):
                    break
            fx = within(y, h, k, c, x)
            if fx > 0:
                fhi = 0.5 * fhi if side == 1 else fhi
                lo, flo, side = x, fx, 1
            else:
                flo = 0.5 * flo if side == -1 else flo
                hi, fhi, side = x, fx, -1
        return lo

    # Of a trajectory: whether the valve is open, and opening; sections, and their openings.
    @njit
    def event(y, end, k, h, kept):
        hits, turns = kept[0] > 0 and end[0] <= 0, kept[1] > 0 and end[1] <= 0
        if not (hits or turns):
            kept[0], kept[1] = end[0], end[1]
            return 2.0
        first = crossing(y, h, k, 0, end[0]) if hits else 2.0
        second = crossing(y, h, k, 1, end[1]) if turns else 2.0
        kept[0] = 1.0 if first <= second else 0.0
        return min(first, second)

    @njit
    def act(y, k, h, theta, kept):
        hits = kept[0] > 0
        y[0], y[1], y[2] = (
            within(y, h, k, 0, theta),
            within(y, h, k, 1, theta),
            within(y, h, k, 2, theta),
        )
        if hits:
            y[1] *= -RESTITUTION
            kept[0], kept[1] = 1.0, y[1]
        else:
            kept[3 + int(kept[2]) % SECTIONS] = y[0]
            kept[0], kept[1], kept[2] = y[0], 0.0, kept[2] + 1

    solve = adaptive(numba, f, 3, END, tol, np.float64, event, act)
    u0, p, kept = np.tile(np.array(START), (n, 1)), flows(n)[:, None], np.empty((n, 3 + SECTIONS))

    def call():
        kept[:, :3] = 1.0, 0.0, 0.0
        return solve(u0, p, kept)[0], kept[:, 2]

    return call


def by_heyoka(n, tol):
    hy = imported("heyoka")
    width = hy.recommended_simd_size()
    x, v, pressure = hy.make_vars("x", "v", "pressure")
    system = [
        (x, v),
        (v, -1.25 * v - (x + 10.0) + pressure),
        (pressure, 20.0 * (hy.par[0] - x * hy.sqrt(pressure))),
    ]
    counts = np.zeros(width, np.int64)

    def spring_back(integrator, sign, lane):
        integrator.state[1, lane] *= -RESTITUTION
        return True

    def section(integrator, t, sign, lane):
        counts[lane] += 1

    down = hy.event_direction.negative
    integrator = hy.taylor_adaptive_batch(
        system,
        np.zeros((3, width)),
        pars=np.zeros((1, width)),
        tol=tol,
        t_events=[hy.t_event_batch(x, callback=spring_back, direction=down)],
        nt_events=[hy.nt_event_batch(v, callback=section, direction=down)],
    )
    rows = np.arange(n + -n % width).clip(max=n - 1).reshape(-1, width)
    qs = flows(n)

    def call():
        ends, events = [], []
        for batch in rows:
            integrator.set_time(0.0)
            integrator.state[:] = np.array(START)[:, None]
            integrator.pars[0] = qs[batch]
            integrator.reset_cooldowns()
            counts[:] = 0
            integrator.propagate_until(END)
            ends.append(integrator.state.T.copy())
            events.append(counts.copy())
        return np.concatenate(ends)[:n], np.concatenate(events)[:n]

    return call


def by_diffrax(n, tol):
    terms = diffrax.ODETerm(lambda t, u, q: valve(u, q, t))
    event = diffrax.Event(
        [lambda t, y, args, **_: y[0], lambda t, y, args, **_: y[1]],
        optx.Newton(1e-12, 1e-12, optx.rms_norm),
        direction=[False, False],
    )

    def one(q):
        def go_on(now):
            t, y, count = now
            sol = diffrax.diffeqsolve(
                terms,
                diffrax.Tsit5(),
                t,
                END,
                None,
                y,
                q,
                stepsize_controller=diffrax.PIDController(tol, tol),
                event=event,
                max_steps=100_000,
            )
            y, (hit, turned) = sol.ys[-1], sol.event_mask
            # (At the root once more, the same event would be there again.)
            after = jnp.where(
                hit,
                jnp.stack([jnp.maximum(y[0], 1e-13), -RESTITUTION * y[1], y[2]]),
                jnp.where(turned, y.at[1].min(-1e-13), y),
            )
            return sol.ts[-1], after, count + turned

        start = jnp.array(0.0), jnp.array(START), jnp.array(0)
        return jax.lax.while_loop(lambda now: now[0] < END, go_on, start)[1:]

    solve, qs = jax.jit(jax.vmap(one)), jnp.array(flows(n))
    return lambda: solve(qs)


def by_scipy(n, tol):
    solve_ivp = imported("scipy.integrate").solve_ivp

    def f(t, y, q):
        return y[1], -1.25 * y[1] - (y[0] + 10) + y[2], 20 * (q - y[0] * math.sqrt(y[2]))

    def closing(t, y, q):
        return y[0]

    def section(t, y, q):
        return y[1]

    closing.terminal, closing.direction, section.direction = True, -1, -1

    def one(q):
        t, y, count = 0.0, np.array(START), 0
        while t < END:
            sol = solve_ivp(
                f,
                (t, END),
                y,
                method="DOP853",
                args=(q,),
                rtol=max(tol, 1e-13),
                atol=tol,
                events=[closing, section],
            )
            t, y, count = sol.t[-1], sol.y[:, -1], count + len(sol.t_events[1])
            if sol.status == 1:
                y = y * (0.0, -RESTITUTION, 1.0)
        return y, count

    def call():
        ends, counts = zip(*map(one, flows(n)), strict=True)
        return np.array(ends), np.array(counts)

    return call


#
# A stop
#


def falling(u, ballistic, t):
    """Height in km, speed in km/s, angle, way along the ground in km (Allen and Eggers, "A study of
    the motion and aerodynamic heating of ballistic missiles", NACA report 1381, 1958)."""
    height, speed, angle, _ = u
    radius = 6371.0 + height
    gravity = 9.81e-3 * (6371.0 / radius) ** 2
    drag = 1.225e9 * jnp.exp(-height / 7.2) * speed**2 / (2 * ballistic)
    return jnp.stack(
        [
            speed * jnp.sin(angle),
            -drag - gravity * jnp.sin(angle),
            (speed / radius - gravity / speed) * jnp.cos(angle),
            speed * jnp.cos(angle) * 6371.0 / radius,
        ]
    )


def reentries(n, *, stops):
    stop = eo.ContinuousCallback(lambda u, t, integrator: u[0] - 20.0, None, eo.terminate)
    options = {"callback": stop} if stops else {}
    prob = eo.ODEProblem(falling, [120.0, 7.5, -0.05, 0.0], (0.0, 600.0), 3e8)
    options |= {"abstol": 1e-8, "reltol": 1e-8, "save_start": False, "trajectories": n}

    @jax.jit
    def solve(ballistic, angle):
        def prob_func(prob, ctx):
            u0 = prob.u0.at[2].set(angle[ctx.index])
            return eo.remake(prob, u0=u0, p=ballistic[ctx.index])

        ens = eo.EnsembleProblem(prob, prob_func)
        sim = eo.solve(ens, eo.Tsit5(), eo.EnsembleThreads(1), **options)
        return sim.u[:, -1], sim.stats.naccept

    rng = np.random.default_rng(0)
    numbers = rng.uniform(1e8, 5e8, n), rng.uniform(-0.1, -0.03, n)
    return lambda: solve(*map(jnp.asarray, numbers))


#
# Callbacks that never act
#


def lotka_volterra(u, p, t):
    return jnp.stack([1.5 * p * u[0] - u[0] * u[1], u[0] * u[1] - 3.0 * u[1]])


# A field, where it starts, the parameters, a component that stays below a number.
QUIET = {
    "Lorenz": (lorenz, [1.0, 0.0, 0.0], (0.0, 21.0), (2, 100.0)),
    "Lotka-Volterra": (lotka_volterra, [1.0, 1.0], (0.8, 1.2), (0, 30.0)),
}
CONDITIONS = {
    "none": None,
    "component": lambda c, most: lambda u, t, integrator: u[c] - most,
    "component (ends)": lambda c, most: lambda u, t, integrator: u[c] - most,
    "squares": lambda c, most: lambda u, t, integrator: jnp.sum(u * u) - most**2,
    "squares (ends)": lambda c, most: lambda u, t, integrator: jnp.sum(u * u) - most**2,
}


def quiet(name, condition, tol, n=2048):
    f, u0, (first, last), where = QUIET[name]
    options = {"abstol": tol, "reltol": tol, "save_start": False, "trajectories": n}
    if CONDITIONS[condition] is not None:
        points = {"interp_points": 0} if condition.endswith("(ends)") else {}
        at = CONDITIONS[condition](*where)
        options["callback"] = eo.ContinuousCallback(at, eo.terminate, **points)
    prob = eo.ODEProblem(f, jnp.array(u0), (0.0, 10.0), 1.0)

    @jax.jit
    def solve(ps):
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=ps[ctx.index]))
        sim = eo.solve(ens, eo.Tsit5(), eo.EnsembleThreads(1), **options)
        return sim.u[:, -1], sim.stats.naccept

    ps = jnp.linspace(first, last, n)
    return lambda: solve(ps)


def quiet_table():
    """Ratios to the time without a callback, by ensemble and tolerance."""
    core, report = last_core(), {}
    print(header(("ensemble", "tolerance", "us a trajectory", *list(CONDITIONS)[1:])))
    for name in QUIET:
        for tol in (1e-6, 1e-8):
            calls = {x: quiet(name, x, tol) for x in CONDITIONS}
            with held(None if core is None else {core}):
                in_turns(calls, 1)  # compiles
                spent = in_turns(calls, 60, least=5, budget=60, clock=time.process_time)
            # (Among so many, the least may be a slip of the clock.)
            few = {x: np.quantile(seconds, 0.2) for x, seconds in spent.items()}
            ratios = {x: few[x] / few["none"] for x in CONDITIONS if x != "none"}
            report[f"{name}, {tol:g}"] = {"us": few["none"] / 2048 * 1e6, **ratios}
            cells = f"{tol:g}", f"{few['none'] / 2048 * 1e6:.2f}"
            print(line((name, *cells, *(f"{x:.3f}" for x in ratios.values()))), flush=True)
    return report


WAYS = {
    "C++": by_cpp,
    "compiled": by_engine,
    "compiled (ends)": functools.partial(by_engine, interp_points=0),
    "Numba": by_numba,
    "heyoka": by_heyoka,
    "diffrax": by_diffrax,
    "SciPy": by_scipy,
}
SLOW = ("diffrax", "SciPy")
STOPS = ("with a stop", "without")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n", type=int, default=512)
    parser.add_argument("--tol", type=float, default=1e-10)
    parser.add_argument("--only", default=",".join(WAYS))
    parser.add_argument("--reentries", type=int, default=10_000)
    parser.add_argument("--quiet", action="store_true", help="the table of those that never act")
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.quiet:
        print(machine(*PEERS))
        report = quiet_table()
        if args.json:
            write_json(args.json, report)
        return
    core, found, first = last_core(), {}, {}
    with held(None if core is None else {core}):
        for name in args.only.split(","):
            n = FEW if name in SLOW else args.n
            try:
                call = WAYS[name](n, args.tol)
                started = time.perf_counter()
                jax.block_until_ready(call())
                first[name] = time.perf_counter() - started
                found[name] = call
            except Skip as why:
                print(f"- {name}: {why}")
        spent = in_turns(found, 5, budget=120, share=20, clock=time.process_time)
    sizes = {name: FEW if name in SLOW else args.n for name in found}
    report = {}
    for name, call in found.items():
        ends, counts = map(np.asarray, call())
        exact, _ = map(np.asarray, by_engine(sizes[name], 1e-13, alg=eo.Vern9())())
        off = np.linalg.norm(ends - exact, axis=1)
        report[name] = {
            "us": min(spent[name]) / sizes[name] * 1e6,
            "error": np.max(off / np.maximum(1, np.linalg.norm(exact, axis=1))),
            "events": counts.mean(),
            "first": first[name],
        }
    base = report.get("C++", next(iter(report.values())))["us"]
    print(machine(*PEERS))
    print(header(("way", "us a trajectory", "to C++", "error", "sections each", "first, s")))
    for name, x in report.items():
        cells = f"{x['us']:.1f}", f"{x['us'] / base:.2f}", f"{x['error']:.0e}"
        print(line((name, *cells, f"{x['events']:.2f}", f"{x['first']:.2f}")))
    with held(None if core is None else {core}):
        calls = {x: reentries(args.reentries, stops=x == "with a stop") for x in STOPS}
        spent = in_turns(calls, 5, least=2, clock=time.process_time)
    print(header(("reentries", "us a trajectory", "steps", "lowest, km"), left=1))
    for name, call in calls.items():
        ends, steps = map(np.asarray, call())
        us = min(spent[name]) / args.reentries * 1e6
        report[name] = {"us": us, "steps": steps.mean()}
        print(line((name, f"{us:.1f}", f"{steps.mean():.1f}", f"{ends[:, 0].min():.1f}")))
    if args.json:
        write_json(args.json, report)


if __name__ == "__main__":
    main()
