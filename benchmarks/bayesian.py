"""NUTS on solves: effective samples a second, beside diffrax.

    python benchmarks/bayesian.py [--subjects N ...] [--json FILE]

NumPyro's NUTS draws from the posterior of the parameters of

- one series: Lotka-Volterra (rates, start, error; seven unknowns) from 21 measurements of both
  components, with a dense mass matrix;
- N subjects: absorption and saturable elimination of a dose, with a rate of its own for each, from
  8 measurements of each (N + 4 unknowns),

with four chains by `chain_method="vectorized"`, which begin at the truth. The solves are those of

- `eo.solve`: of one problem, or of an `EnsembleProblem` of the subjects;
- `diffrax`: `diffeqsolve`, with `jax.vmap` over the subjects, and its default adjoint
  (`RecursiveCheckpointAdjoint`),

both Tsit5 in float64, at the same tolerances, with the same seeds. All run in one process, held to
one core. Seconds are CPU time: `compile` those until NUTS is compiled, and `run` those of warm-up
and samples. `ESS` is the least effective sample size of the unknowns of the series, or of those
that subjects share. `ms a gradient` is that of the log-density of all chains at once, at their last
draws. `gradients` are those of the samples, without the warm-up: where trees differ in depth
between chains, all chains take those of the deepest.
"""

import argparse
import functools
import os
import time


# (For one thread, which XLA reads when it starts.)
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from common.processes import held, last_core
from common.report import header, line, machine, PEERS, write_json
from common.timing import timed
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import init_to_value, MCMC, NUTS
from numpyro.infer.util import potential_energy, unconstrain_fn

import ensembleode as eo


jax.config.update("jax_enable_x64", True)

CHAINS, MOST = 4, 4096
clock = time.process_time


#
# The solves: functions of a field, `u0`, `p`, saved times and tolerances that return the states and
# whether they succeeded. With `several`, `p` has a row for each trajectory.
#


def by_solve(f, u0, p, times, tol, several):
    of_one = jax.tree.map(lambda x: x[0], p) if several else p
    prob = eo.ODEProblem(f, u0, (0.0, times[-1]), of_one, abstol=tol, reltol=tol, maxiters=MOST)
    sol = eo.solve(eo.EnsembleProblem(prob, p=p) if several else prob, eo.Tsit5(), saveat=times)
    return sol.u, sol.successful


def by_diffrax(f, u0, p, times, tol, several):
    def one(p):
        sol = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, u, p: f(u, p, t)),
            diffrax.Tsit5(),
            0.0,
            times[-1],
            None,
            jnp.asarray(u0),
            p,
            saveat=diffrax.SaveAt(ts=jnp.asarray(times)),
            stepsize_controller=diffrax.PIDController(rtol=tol, atol=tol),
            max_steps=MOST,
            throw=False,
        )
        return sol.ys, sol.result == diffrax.RESULTS.successful

    return (jax.vmap(one) if several else one)(p)


SOLVES = {"eo.solve": by_solve, "diffrax": by_diffrax}


#
# One series
#

YEARS = np.arange(21.0)
MEDIAN = np.array([0.5, 0.03, 0.03, 0.5, 20.0, 10.0, 0.3])  # rates, start, error
SPREAD = np.array([0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 0.5])


def nature(u, p, t):
    hares, lynxes = jnp.exp(u)
    return jnp.stack([p[0] - p[1] * lynxes, p[2] * hares - p[3]])


def series():
    """Logarithms `[time, component]`, with an error of 20%, and the truth."""
    truth = np.array([0.55, 0.03, 0.025, 0.8, 30.0, 5.0, 0.2])
    u, _ = by_solve(nature, np.log(truth[4:6]), truth[:4], YEARS, 1e-8, several=False)
    return np.random.default_rng(1).normal(u, truth[6]), {"x": truth}


def one_series(solve, seen):
    x = numpyro.sample("x", dist.LogNormal(np.log(MEDIAN), SPREAD).to_event(1))
    u, ok = solve(nature, jnp.log(x[4:6]), x[:4], YEARS, 1e-6, several=False)
    numpyro.factor("solved", jnp.where(ok, 0.0, -jnp.inf))
    u = jnp.where(ok, u, 0.0)
    numpyro.sample("seen", dist.Normal(u, x[6]).to_event(2), obs=seen)


#
# Subjects
#

HOURS = np.array([0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0])


def body(u, p, t):
    absorbed = p["absorption"] * u[0]
    return jnp.stack([-absorbed, absorbed - p["maximum"] * u[1] / (3.0 + u[1])])


def in_blood(solve, maxima, absorption, tol):
    p = {"absorption": jnp.full_like(maxima, absorption), "maximum": maxima}
    u, ok = solve(body, np.array([10.0, 0.0]), p, HOURS, tol, several=True)
    return jnp.log(jnp.maximum(jnp.where(ok[:, None], u[:, :, 1], 1.0), 1e-6)), ok


TRUTH = {"mean": np.log(1.5), "spread": 0.3, "absorption": 1.2, "error": 0.1}


def levels(n):
    """Measurements `[subject, time]`, with an error of 10%, and the truth."""
    rng = np.random.default_rng(0)
    maxima = np.exp(rng.normal(TRUTH["mean"], TRUTH["spread"], n))
    exact, _ = in_blood(by_solve, jnp.asarray(maxima), TRUTH["absorption"], 1e-8)
    return np.exp(rng.normal(exact, TRUTH["error"])), TRUTH | {"maxima": maxima}


def subjects(solve, seen):
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    absorption = numpyro.sample("absorption", dist.LogNormal(0.0, 0.5))
    error = numpyro.sample("error", dist.HalfNormal(0.5))
    with numpyro.plate("subjects", len(seen)):
        maxima = numpyro.sample("maxima", dist.LogNormal(mean, spread))
        level, ok = in_blood(solve, maxima, absorption, 1e-6)
        numpyro.factor("solved", jnp.where(ok, 0.0, -jnp.inf))
        numpyro.sample("levels", dist.LogNormal(level, error).to_event(1), obs=seen)


#
# Sampling
#


def sampled(model, solve, seen, truth, warmup, samples, **how):
    """A row of the table."""
    of_solve = functools.partial(model, solve)
    start = init_to_value(values=jax.tree.map(jnp.asarray, truth))

    def run(key):
        nuts = NUTS(of_solve, init_strategy=start, **how)
        chains = {"num_chains": CHAINS, "chain_method": "vectorized", "progress_bar": False}
        mcmc = MCMC(nuts, num_warmup=warmup, num_samples=samples, **chains)
        mcmc.run(key, seen, extra_fields=("num_steps", "diverging"))
        return mcmc.get_samples(group_by_chain=True), mcmc.get_extra_fields(group_by_chain=True)

    key = jax.random.key(0)
    compiling, compiled = timed(lambda: jax.jit(run).lower(key).compile(), clock=clock)
    running, (draws, extra) = timed(compiled, key, clock=clock)
    shared = [np.asarray(x) for name, x in draws.items() if name != "maxima"]
    return {
        "compile": compiling,
        "run": running,
        "ess": float(min(np.min(effective_sample_size(x)) for x in shared)),
        "r_hat": float(max(np.max(split_gelman_rubin(x)) for x in shared)),
        "gradients": int(extra["num_steps"].max(0).sum()),
        "diverging": int(extra["diverging"].sum()),
        "ms": 1e3 * seconds_of_gradient(of_solve, seen, draws),
    }


def seconds_of_gradient(model, seen, draws):
    last = {name: jnp.asarray(x[:, -1]) for name, x in draws.items()}
    free = jax.vmap(functools.partial(unconstrain_fn, model, (seen,), {}))(last)
    energy = functools.partial(potential_energy, model, (seen,), {})
    gradient = jax.jit(jax.vmap(jax.value_and_grad(energy)))
    jax.block_until_ready(gradient(free))
    return min(timed(gradient, free, clock=clock)[0] for _ in range(10))


def table(title, *args, **how):
    """The rows of one model, which are shown."""
    model, *rest = args
    rows = {name: sampled(model, solve, *rest, **how) for name, solve in SOLVES.items()}
    print(f"\n### {title}\n")
    columns = ("compile, s", "run, s", "ESS", "ESS a second", "to diffrax", "with compiling")
    print(header(["", *columns, "ms a gradient", "gradients", "R-hat", "diverging"]))
    rates = {
        name: (x["ess"] / x["run"], x["ess"] / (x["run"] + x["compile"]))
        for name, x in rows.items()
    }
    for name, x in rows.items():
        cells = [f"{x['compile']:.1f}", f"{x['run']:.2f}", f"{x['ess']:.0f}"]
        cells += [f"{rates[name][0]:.1f}"]
        cells += [f"{a / b:.1f}" for a, b in zip(rates[name], rates["diffrax"], strict=True)]
        cells += [f"{x['ms']:.3f}", x["gradients"], f"{x['r_hat']:.2f}", x["diverging"]]
        print(line([name, *cells]), flush=True)
    return title, rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--subjects", type=int, nargs="*", default=[50, 1000])
    parser.add_argument("--json", metavar="FILE", help="write everything measured")
    options = parser.parse_args()
    about, core = machine(*PEERS, "numpyro"), last_core()
    print(f"{about['cpu']}, {about['cores']} cores, load {about['load']}; {about['versions']}")
    with held(None if core is None else {core}):
        how = {"warmup": 200, "samples": 200, "dense_mass": True}
        tables = [table("One series", one_series, *series(), **how)]
        for n in options.subjects:
            # (So that diffrax takes minutes.)
            how = {"warmup": 100, "samples": 100} if n < 200 else {"warmup": 40, "samples": 40}
            how["max_tree_depth"] = 4
            tables.append(table(f"{n} subjects", subjects, *levels(n), **how))
    if options.json:
        write_json(options.json, {"machine": about, "tables": tables})


if __name__ == "__main__":
    main()
