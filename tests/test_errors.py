"""Bad input raises at once, names the argument, and compiles nothing."""

import doctest
import functools
import inspect
import pickle
import re

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.problem import unknown_options
from ensembleode.solvers.julia_alg import PACKAGES

from .problems import decay, linear


U0 = np.array([1.0, 2.0])
U0_SINGLE = np.array([1.0, 2.0], np.float32)
BACKWARDS = (1.0, 0.0)
PID = diffrax.PIDController(rtol=1e-3, atol=1e-6)

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module", autouse=True)
def warm():
    """What JAX compiles once a process, whatever is solved: keys, and constants of each shape."""
    others = (1.0, np.ones(3), np.ones(4), np.ones(5), np.ones((4, 2)), np.ones((4, 3)))
    for constant in (1, np.array([1, 2]), U0, U0_SINGLE, U0[:1], U0[:0], *others):
        jnp.asarray(constant)
    eo.ODEProblem(linear, 1.0, (0.0, 1.0))
    ens = eo.EnsembleProblem(decay(), output_func=lambda sol, ctx: None)
    with pytest.raises(TypeError):
        eo.solve(ens, trajectories=3)


def solve(alg=None, ensemblealg=None, *, prob=None, trajectories=3, **options):
    """Solves an ensemble in which nothing is wrong but what is given here."""
    ens = eo.EnsembleProblem(prob or decay())
    return eo.solve(ens, alg, ensemblealg, trajectories=trajectories, **options)


def field(f, u0=U0):
    return solve(prob=eo.ODEProblem(f, u0, (0.0, 1.0), 1.0))


def made(prob_func):
    return eo.solve(eo.EnsembleProblem(decay(), prob_func), trajectories=3)


def remade(**changes):
    """A prob_func that remakes with functions of the index, a Python integer."""

    def prob_func(prob, ctx):
        return eo.remake(prob, **{name: fn(int(ctx.index)) for name, fn in changes.items()})

    return made(prob_func)


def output(output_func):
    return eo.solve(eo.EnsembleProblem(decay(), output_func=output_func), trajectories=3)


def case(error, match, call):
    return pytest.param(error, match, call, id=match)


OBJECTS = np.array([1.0, 2.0], dtype=object)


def numpy_in_place(u, p, t):
    du = np.zeros(2)
    du[0] = -u[0]
    return du


def jax_in_place(u, p, t):
    du = jnp.zeros(2)
    du[0] = -u[0]
    return du


def loop(u, p, t):
    for _ in range(p["n"]):
        u = 0.5 * u
    return u


def flagged(u, p, t):
    return -u if p["more"][0] else u


LAYER = jax.tree_util.Partial(lambda w, b, u: jnp.tanh(w @ u + b), np.ones((2, 2)), np.ones(2))


def with_callback(
    condition, affect=lambda integrator: integrator, length=None, u0=(1.0, 2.0), p=1.0
):
    """A solve with a callback of these functions: a vector one where it has a length."""
    if length is None:
        callback = eo.ContinuousCallback(condition, affect)
    else:
        callback = eo.VectorContinuousCallback(condition, affect, length)
    prob = eo.ODEProblem(lambda u, p, t: -p * u, jnp.array(u0), (0.0, 1.0), p)
    return eo.solve(prob, callback=callback)


def first(u, t, integrator):
    return u[0]


def with_affect(change, **how):
    return lambda: with_callback(
        first, lambda integrator: eo.remake(integrator, **change(integrator)), **how
    )


# What people do with a context as if it were the index.
AS_INDEX = (
    lambda i: 2.0 * i,
    lambda i: i + 1,
    lambda i: -i,
    lambda i: jnp.where(i > 0, 1.0, 2.0),
    lambda i: [1.0, 2.0, 3.0][i],
    lambda i: U0[i],
    lambda i: jnp.asarray(U0)[i],
    lambda i: jnp.sin(i),
    lambda i: float(i),
)

# Where one error is said of several things.
SEVERAL = [
    *(
        case(
            TypeError,
            r"f must return one array of shape \(2,\); it returned the structure.*jnp\.array",
            lambda value=value: field(lambda u, p, t: value(u)),
        )
        for value in (list, tuple, lambda u: {"du": u}, lambda u: None)
    ),
    *(
        case(
            error,
            r"u0.*number.*write u0=\[1\.0\] or jnp\.array\(\[1\.0\]\)",
            lambda f=f: field(f, 1.0),
        )
        for error, f in (
            (TypeError, lambda u, p, t: -u[0]),
            (TypeError, lambda u, p, t: jnp.array([*u])),
            (ValueError, lambda u, p, t: jnp.array([-u])),
        )
    ),
    *(
        case(
            TypeError,
            r"f failed.*list or a tuple is no array.*jnp\.array",
            lambda f=f: solve(prob=eo.ODEProblem(f, U0, (0.0, 1.0), (1.0, 2.0))),
        )
        for f in (lambda u, p, t: -p * u, lambda u, p, t: p * u, lambda u, p, t: jnp.sin(p) * u)
    ),
    *(
        case(
            TypeError,
            r"f must return du, and can't write it into an array.*jnp\.array.*\.at\[0\]\.set",
            lambda fn=fn: field(fn),
        )
        for fn in (numpy_in_place, jax_in_place)
    ),
    *(
        case(
            error,
            r"jax\.vmap\(p, in_axes=1, out_axes=1\)\(u\).*EnsembleColumns\(\)",
            lambda u0=u0: eo.solve(eo.ODEProblem(lambda u, p, t: p(u), u0, (0.0, 1.0), LAYER)),
        )
        for u0, error in ((jnp.ones((2, 3)), ValueError), (jnp.ones((3, 2)), TypeError))
    ),
    *(
        case(
            TypeError,
            r"p is None, as this problem has no parameters.*ODEProblem\(f, u0, tspan, p\)",
            lambda fn=fn: solve(prob=eo.ODEProblem(fn, U0, (0.0, 1.0))),
        )
        for fn in (lambda u, p, t: p[0] * u, lambda u, p, t: p * u, lambda u, p, t: p["k"] * u)
    ),
    *(
        case(
            AttributeError,
            rf"module 'ensembleode' has no attribute '{name}': .*{match}",
            lambda name=name: getattr(eo, name),
        )
        for name, match in {
            "Rodas5": r"eo\.Rodas5P\(\).*eo\.JuliaAlg\('Rodas5\(\)'\)",
            "FBDF": r"eo\.Kvaerno5\(\).*eo\.JuliaAlg\('FBDF\(\)'\)",
            "AutoDP5": r"switches.*eo\.JuliaAlg\('AutoDP5\(Rosenbrock23\(\)\)'\)",
            "LSODA": r"eo\.AutoTsit5\(eo\.Rosenbrock23\(\)\) switches by itself",
            "BDF": r"for stiff problems there are eo\.Rodas5P\(\)",
            "Radau": r"for stiff problems there are eo\.Rodas5P\(\)",
            "RK45": r"here it is eo\.Dopri5\(\), or better eo\.Tsit5\(\)",
            "BS3": r"here it is eo\.Bosh3\(\)",
            "OwrenZen5": r"eo\.Vern7\(\).*eo\.JuliaAlg\('OwrenZen5\(\)'\)",
            "LambaEM": r"for an eo\.SDEProblem there are eo\.SOSRI\(\)",
            "ConstantRateJump": r"eo\.JumpProblem",
            "VelocityVerlet": "symplectic",
            "Event": r"eo\.ContinuousCallback\(condition, affect\)",
            "SaveAt": "saveat=",
        }.items()
    ),
    *(
        case(
            TypeError,
            "saveat must be a number or an array of times",
            lambda value=value: solve(saveat=value),
        )
        for value in (
            *(["a", "b"], "all", {"a": 1}, 1j, True, [0.5 + 0.1j]),
            np.array([0, 1], "timedelta64[s]"),
        )
    ),
    case(
        TypeError,
        "saveat must be a number.*Rows of different lengths.*put jnp.inf behind",
        lambda: solve(saveat=[[0.5], [0.5, 1.0]]),
    ),
    case(
        ValueError,
        r"saveat has the shape \(4, 1\).*3 trajectories",
        lambda: solve(prob=decay(saveat=np.full((4, 1), 0.5))),
    ),
    case(
        ValueError,
        r"saveat has the shape \(3, 1\).*an ensemble",
        lambda: eo.solve(decay(saveat=[[0.5], [0.6], [0.7]])),
    ),
    *(
        case(
            ValueError,
            r"EnsembleGPUKernel\(devices=.*\) names GPUs.*eo\.EnsembleThreads\(\)",
            lambda devices=devices: solve(eo.Tsit5(), eo.EnsembleGPUKernel(devices=devices)),
        )
        for devices in (2, jax.devices("cpu"))
    ),
    *(
        case(
            TypeError,
            r"alg must be a solver, got the class Tsit5; give Tsit5\(\)",
            lambda alg=alg: solve(alg),
        )
        for alg in (eo.Tsit5, diffrax.Tsit5)
    ),
    *(
        case(
            TypeError,
            r"sensealg must be.*DirectAdjoint\(\).*got",
            lambda sensealg=sensealg: solve(sensealg=sensealg),
        )
        for sensealg in ("direct", eo.DirectAdjoint)
    ),
    *(
        case(
            TypeError,
            rf"{name} gets a context, which is no number.*ctx\.index.*ctx\.sim_id",
            lambda fn=fn, run=run: run(fn),
        )
        for fn in AS_INDEX
        for name, run in {
            r"prob_func\(prob, ctx\)": lambda fn: made(lambda prob, i: eo.remake(prob, p=fn(i))),
            r"output_func\(sol, ctx\)": lambda fn: output(
                lambda sol, i: (sol.u[-1] * fn(i), False)
            ),
        }.items()
    ),
    *(
        case(
            TypeError,
            "output_func must be written in JAX.*jnp instead of np.*jnp.where",
            lambda value=value: output(lambda sol, ctx: (value(sol), False)),
        )
        for value in (
            lambda sol: np.asarray(sol.u),
            lambda sol: np.sin(sol.u),
            lambda sol: sol.u if sol.u[0, 0] > 0 else -sol.u,
            lambda sol: float(sol.u[0, 0]),
            lambda sol: sol.u[: sol.length],
            lambda sol: sol.u[sol.u > 0],
        )
    ),
    *(
        case(TypeError, rf"has no option '{name}': .*{match}", lambda of=of, x=name: of(**{x: 1.0}))
        for name, match in {
            "rtol": "it is called reltol",
            "atol": "it is called abstol",
            "method": r"alg, such as eo\.Tsit5\(\), or eo\.Rodas5P\(\) if stiff",
            "max_step": "it is called dtmax",
            "gamma": r"eo\.PIController\(gamma=",
            "events": r"called callback.*eo\.ContinuousCallback\(condition, affect\)",
            "step_ts": "it is called tstops",
            "jump_ts": "it is called d_discontinuities",
            "t_eval": "it is called saveat",
            "dense_output": r"save_everystep=True.*sol\(t\)",
            "prob_funk": "it has",
        }.items()
        for of in (
            solve,
            lambda **options: eo.remake(decay(), **options),
            decay,
            lambda **options: eo.EnsembleProblem(decay(), **options),
        )
    ),
    *(
        case(TypeError, f"{name} must be", lambda name=name, x=x: solve(**{name: x}))
        for name, x in (("seed", "a"), ("seed", 1.5), ("key", "a"), ("key", 3))
    ),
    *(
        case(
            ValueError,
            f"{name} is given with an array saveat.*leave it out",
            lambda name=name, value=value: solve(saveat=[0.5], **{name: value}),
        )
        for name in ("save_start", "save_end")
        for value in (True, False)
    ),
]


# By what they say.
TYPE_ERRORS = {
    # Problems and ensembles
    r"f must be a function.*got 3": lambda: eo.ODEProblem(3, U0, (0, 1)),
    r"u0 has the integer dtype int64.*1\.0, not 1": lambda: eo.ODEProblem(
        linear, np.array([1, 2]), (0.0, 1.0)
    ),
    "u0 has the integer dtype": lambda: eo.ODEProblem(linear, 1, (0.0, 1.0)),
    r"u0\['a'\] must be an array.*got 'one'": lambda: eo.ODEProblem(
        linear, {"a": "one"}, (0.0, 1.0)
    ),
    "u0 must be an array.*got 'abc'": lambda: eo.ODEProblem(linear, "abc", (0.0, 1.0)),
    "u0 must be an array.*got None": lambda: eo.ODEProblem(linear, None, (0.0, 1.0)),
    r"u0 must be an array.*got \[\[1\.0\], \[1\.0, 2\.0\]\]": lambda: eo.ODEProblem(
        linear, [[1.0], [1.0, 2.0]], (0.0, 1.0)
    ),
    "an ODEProblem has no option 'sav': it has saveat": lambda: decay(sav=0.1),
    r"'trajectories' is neither f, u0, tspan or p nor a solver option.*saveat, abstol": lambda: (
        eo.remake(decay(), trajectories=3)
    ),
    "EnsembleProblem has no option 'reltol'": lambda: eo.remake(
        eo.EnsembleProblem(decay()), reltol=1e-3
    ),
    "remake takes an ODEProblem, an EnsembleProblem or an integrator, got NoneType": lambda: (
        eo.remake(None)
    ),
    r"prob must be an ODEProblem, got list.*EnsembleProblem\(prob, u0=u0s, p=ps\)": lambda: (
        eo.EnsembleProblem([decay()])
    ),
    r"prob_func must take \(prob, ctx\).*takes 1 required.*\(prob\)": lambda: eo.EnsembleProblem(
        decay(), lambda prob: prob
    ),
    r"prob_func must take \(prob, ctx\).*takes 4 required.*\(a, b, c, d\)": lambda: (
        eo.EnsembleProblem(decay(), lambda a, b, c, d: a)
    ),
    # What f returns, and what it is written in
    r"f must return the dtype of the state u, float32; it returned float64.*"
    r"u0\.astype\('float64'\).*cast inside f": lambda: field(
        lambda u, p, t: u.astype(float) * np.array([1.0, 2.0]), U0_SINGLE
    ),
    "f must return the dtype of the state u, float64; it returned int64": lambda: field(
        lambda u, p, t: jnp.ones_like(u, int)
    ),
    "f must return an array like the state u.*str": lambda: field(lambda u, p, t: "du"),
    r"\bf must be written in JAX.*jnp": lambda: field(lambda u, p, t: np.sin(u)),
    r"\bf must be written in JAX.*jnp\.where": lambda: field(lambda u, p, t: u if u[0] > 0 else -u),
    # States and parameters that are something else than f takes them for
    r"p of the problem is given as a number.*write p=\[1\.0\]": lambda: field(
        lambda u, p, t: -p[0] * u
    ),
    r"f failed: 'a'.*p has the keys 'A'.*p=\{\*\*prob\.p, 'key': value\}": lambda: eo.solve(
        eo.remake(
            eo.ODEProblem(lambda u, p, t: -p["a"] * u, U0, (0.0, 1.0), {"a": 1.0}), p={"A": 1.0}
        )
    ),
    r"f computes with a NumPy array of objects.*astype\(float\)": lambda: field(
        lambda u, p, t: u * OBJECTS
    ),
    # What f takes
    "with the time first": lambda: field(functools.partial(lambda t, y, p: -p * y)),
    r"f must be written in JAX.*jnp\.where": lambda: field(lambda u, p, t: u[u > 0]),
    # Callbacks
    "callback must be an eo.ContinuousCallback.*got float": lambda: solve(callback=1.0),
    "callback must be an eo.Cont": lambda: eo.ODEProblem(
        lambda u, p, t: u, 1.0, (0.0, 1.0), callback=first
    ),
    "condition of ContinuousCallback must be a function": lambda: eo.ContinuousCallback(
        1.0, eo.terminate
    ),
    "callback must be an eo.": lambda: eo.CallbackSet(first),
    "terminate takes an integrator": lambda: eo.terminate(decay()),
    "condition of callback 0, .* must return a real number, got None": lambda: with_callback(
        lambda u, t, integrator: None
    ),
    "must return a real number; it returned bool": lambda: with_callback(
        lambda u, t, integrator: u[0] > 0
    ),
    "must return a boolean; it returned float64": lambda: solve(
        callback=eo.DiscreteCallback(lambda u, t, integrator: t, eo.terminate)
    ),
    "condition of callback 0, .* can't be called": lambda: with_callback(lambda u, t: t),
    "affect of callback 0, .* must return the integrator, got NoneType .*return.*missing": lambda: (
        with_callback(first, lambda integrator: None)
    ),
    "must make a state of the dtype of u0, float64.*float32": with_affect(
        lambda i: {"u": i.u.astype("float32")}
    ),
    "must make a state of the structure of u0": with_affect(lambda i: {"u": {"x": i.u}}),
    "an affect changes u and p of the integrator, not t": with_affect(lambda i: {"t": 1.0}),
    "must make parameters of the structure of p": with_affect(lambda i: {"p": (1.0, 2.0)}),
    "changes leaf 0 of p, int64": with_affect(lambda i: {"p": i.p + 1}, p=jnp.array(1)),
    # Names of others
    "solve has no option 'saveatt': it has saveat": lambda: solve(saveatt=1),
    # Times to save
    "saveat must be a number or an array of times": lambda: solve(
        saveat=[[0.1], [0.1, 0.2], [0.3]]
    ),
    # Options
    r"solver is the second argument.*\(ens, eo\.Tsit5\(\), eo\.EnsembleThreads\(\)\)": lambda: (
        solve(eo.EnsembleThreads(), eo.Vern7())
    ),
    "abstol must be.*'tight'": lambda: solve(abstol="tight"),
    "dt must be a finite step size.*'a'": lambda: solve(dt="a"),
    "alg must be a solver, got the string": lambda: solve("Tsit5"),
    r"ensemblealg must be one of.*EnsembleSerial\(\).*give an instance, with \(\)": lambda: solve(
        eo.Tsit5(), eo.EnsembleSerial
    ),
    "ensemblealg must be one of.*got 'serial'": lambda: solve(eo.Tsit5(), "serial"),
    r"ensemblealg must be one of.*got Tsit5\(\)": lambda: solve(eo.Tsit5(), eo.Tsit5()),
    "ensemblealg is given with a single ODEProblem": lambda: eo.solve(decay(), eo.EnsembleSerial()),
    "stepsize_controller must be one such as eo.PIController.*got 'pid'": lambda: solve(
        stepsize_controller="pid"
    ),
    # prob_func and output_func
    r"prob_func must return an ODEProblem, got NoneType \(is a `return` missing\?\)": lambda: made(
        lambda prob, ctx: None
    ),
    r"prob_func cannot assign to field 'u0'.*`return eo\.remake\(prob, u0=": lambda: made(
        lambda prob, ctx: setattr(prob, "u0", prob.u0)
    ),
    r"affect of callback 0, .* cannot assign to field 'u'.*`return eo\.remake\(integrator, u=": (
        lambda: with_callback(first, lambda integrator: setattr(integrator, "u", integrator.u))
    ),
    r"output_func must return.*rerun a boolean; its rerun has the shape \(2,\)": lambda: output(
        lambda sol, ctx: (sol.u, sol.u[-1] > 0)
    ),
    "output_func must return.*rerun a boolean": lambda: output(lambda sol, ctx: (sol.u, "no")),
    "output_func must return.*arrays": lambda: output(lambda sol, ctx: ("a", False)),
    # Of several names, or values
    **{
        rf"{name}.* an array of the dtype {re.escape(str(x.dtype))}.*astype\(float\)": (
            lambda name=name, x=x: eo.remake(decay(), **{name: {"k": x}})
        )
        for name in ("u0", "p")
        for x in (np.array([1.0, None]), np.array(["a", "b"]), np.array(["2026"], "M8[Y]"))
    },
    **{
        f"{name} must be a function or None, got 3": lambda name=name: eo.EnsembleProblem(
            decay(), **{name: 3}
        )
        for name in ("prob_func", "output_func", "reduction")
    },
    **{
        rf"\bf must take.*f\(u, p, t\).*{match}": lambda fn=fn: field(fn)
        for fn, match in (
            (lambda t, y: -y, r"takes \(t, y\): write f\(y, p, t\)"),
            (lambda y, t: -y, r"takes \(y, t\): write f\(y, p, t\)"),
            (lambda t, y, p: -p * y, r"\(t, y, p\), with the time first.*f\(y, p, t\)"),
            (lambda y, t, k: -k * y, r"\(y, t, k\), with the time second.*f\(y, k, t\)"),
            (lambda u, p: -u, r"takes \(u, p\): give it all three"),
            (lambda du, u, p, t: None, r"takes \(du, u, p, t\): in place.*return du"),
        )
    },
    **{
        rf"f needs to know {name}, .*functools\.partial": lambda fn=fn, p=p: solve(
            prob=eo.ODEProblem(fn, U0, (0.0, 1.0), p)
        )
        for fn, p, name in (
            (loop, {"a": 1.0, "n": np.array(3)}, r"p\['n'\]"),
            (flagged, {"a": 1, "more": (jnp.array(True), 2.0)}, r"p\['more'\]\[0\]"),
        )
    },
    **{
        f"got the string '{text}'; {match}": lambda t=text: solve(t)
        for text, match in {
            "tsit5": r"give eo\.Tsit5\(\)\.",
            "BDF": r"for stiff problems there are eo\.Rodas5P\(\)",
            "RK45": r"here it is eo\.Dopri5",
            "nothing": r"give one such as eo\.Tsit5\(\), or eo\.Rodas5P\(\)",
        }.items()
    },
    **{
        f"{name} is given with a single ODEProblem.*EnsembleProblem": lambda options=options: (
            eo.solve(decay(), eo.Tsit5(), **options)
        )
        for name, options in (
            ("ensemblealg", {"ensemblealg": eo.EnsembleSerial()}),
            ("trajectories", {"trajectories": 3}),
            ("batch_size", {"batch_size": 3}),
            ("progress", {"progress": True}),
        )
    },
    **{
        f"solve takes an ODEProblem or an EnsembleProblem, got {type(x).__name__}": (
            lambda x=x: eo.solve(x, trajectories=3)
        )
        for x in ([], None, linear)
    },
    **{
        f"prob_func must return an ODEProblem, got {type(x).__name__}.*eo.remake": (
            lambda x=x: made(lambda prob, ctx: x)
        )
        for x in (1.0, [], U0)
    },
    **{
        rf"output_func must return a pair \(out, rerun\).*returned {got}": lambda value=value: (
            output(lambda sol, ctx: value(sol))
        )
        for value, got in (
            (lambda sol: sol.u, ""),
            (lambda sol: None, "NoneType"),
            (lambda sol: [sol.u, False], "list"),
            (lambda sol: (sol.u, False, 1), "tuple"),
        )
    },
}
VALUE_ERRORS = {
    # Problems and ensembles
    r"u0.*\(0,\)": lambda: solve(prob=eo.ODEProblem(linear, np.zeros(0), (0.0, 1.0), 1.0)),
    r"tspan must be a pair.*1\.0": lambda: decay(1.0),
    "tspan must be a pair.*None": lambda: decay(None),
    r"tspan must be a pair.*\(0\.0,\)": lambda: decay((0.0,)),
    "tspan must be a pair": lambda: decay((0.0, 1.0, 2.0)),
    r"tspan must be finite, got \(0\.0, inf\)": lambda: decay((0.0, np.inf)),
    "tspan must be finite": lambda: decay((np.nan, 1.0)),
    "tspan.*real numbers, got t1=1j": lambda: decay((0.0, 1j)),
    "tspan.*real numbers, got t1=": lambda: decay((0.0, U0)),
    "tspan": lambda: decay("ab"),
    "tspan.*None": lambda: decay((0.0, None)),
    r"u0 of EnsembleProblem has the shape of one.*a row for each": lambda: eo.EnsembleProblem(
        decay(), u0=U0
    ),
    r"u0 of EnsembleProblem has the shape \(4, 3\); it must be \[trajectory, 2\]": lambda: (
        eo.EnsembleProblem(decay(), u0=np.ones((4, 3)))
    ),
    r"p of EnsembleProblem must have the structure of the problem's p.*'k'": lambda: (
        eo.EnsembleProblem(decay(), p={"k": np.ones(4)})
    ),
    "same number of trajectories: u0 4, p 5": lambda: eo.EnsembleProblem(
        decay(), u0=np.ones((4, 2)), p=np.ones(5)
    ),
    "same number of trajectories: no array of p has any": lambda: eo.EnsembleProblem(
        decay(), p=2.0
    ),
    "trajectories=5, and u0 and p of the EnsembleProblem have rows for 4": lambda: eo.solve(
        eo.EnsembleProblem(decay(), u0=np.ones((4, 2))), trajectories=5
    ),
    "u_init is given without a reduction": lambda: eo.EnsembleProblem(decay(), u_init=0.0),
    # What f returns, and what it is written in
    r"f must return an array of the shape of the state u, \(2,\).*\(1,\)": lambda: field(
        lambda u, p, t: u[:1]
    ),
    r"f must return an array of the shape.*\(2,\).*\(\)": lambda: field(lambda u, p, t: 0.0),
    # States and parameters that are something else than f takes them for
    r"prob_func changed u0 from \(2,\) to \(3,\).*f must return an array of the shape": lambda: (
        eo.solve(
            eo.EnsembleProblem(
                eo.ODEProblem(lambda u, p, t: jnp.array([u[1], -u[0]]), U0, (0.0, 1.0)),
                lambda prob, ctx: eo.remake(prob, u0=np.ones(3)),
            ),
            trajectories=2,
        )
    ),
    # Callbacks
    "neither an affect nor an affect_neg": lambda: eo.ContinuousCallback(first, None),
    "rootfind of ContinuousCallback must be eo.LeftRootFind": lambda: eo.ContinuousCallback(
        first, eo.terminate, rootfind=True
    ),
    "interp_points of .* must be a whole number": lambda: eo.ContinuousCallback(
        first, eo.terminate, interp_points=-1
    ),
    "dtrelax of .* must be a positive number": lambda: eo.ContinuousCallback(
        first, eo.terminate, dtrelax=0
    ),
    "repeat_nudge of .* between 0 and 1": lambda: eo.ContinuousCallback(
        first, eo.terminate, repeat_nudge=1
    ),
    "save_positions of .* must be a pair": lambda: eo.DiscreteCallback(
        first, eo.terminate, save_positions=True
    ),
    "length of VectorContinuousCallback": lambda: eo.VectorContinuousCallback(
        first, eo.terminate, 0
    ),
    r"callback 0, a ContinuousCallback must return a real number.*\(\).*\(2,\)": lambda: (
        with_callback(lambda u, t, integrator: u)
    ),
    r"of the shape \(3,\); it returned the shape \(2,\)": lambda: with_callback(
        lambda u, t, integrator: u, lambda integrator, mask: integrator, 3
    ),
    "affect of callback 0, .* must make a state of the shape of u0": with_affect(
        lambda i: {"u": i.u[:1]}
    ),
    "must make parameters of the shapes of p": with_affect(lambda i: {"p": i.u}),
    "max_events must be a positive integer": lambda: solve(max_events=0),
    "engine='diffrax' can't run .*callback": lambda: solve(
        callback=eo.ContinuousCallback(lambda u, t, i: t, eo.terminate), engine="diffrax"
    ),
    # Times to save
    r"saveat has the time 1\.5, outside tspan=\(0\.0, 1\.0\)": lambda: solve(saveat=[0.5, 1.5]),
    r"saveat has the time 1\.5, outside tspan=\(1\.0, 0\.0\)": lambda: solve(
        prob=decay(BACKWARDS), saveat=[1.5, 0.5]
    ),
    "saveat has the time nan, outside": lambda: solve(saveat=[0.5, np.nan]),
    "saveat is not sorted: it must be increasing": lambda: solve(saveat=[0.5, 0.2]),
    "saveat is not sorted: it must be decreasing, as time runs backwards": lambda: solve(
        prob=decay(BACKWARDS), saveat=[0.2, 0.5]
    ),
    "saveat is not sorted": lambda: solve(saveat=[[0.1, 0.2], [0.1, 0.2], [0.2, 0.1]]),
    "saveat is empty; leave it out": lambda: solve(saveat=[]),
    r"saveat must be a number.*\(3, 1, 1\)": lambda: solve(saveat=np.zeros((3, 1, 1))),
    "saveat": lambda: solve(saveat=1e-12),
    r"saveat has the shape \(2, 1\).*\[trajectory, time\].*3 trajectories": lambda: solve(
        saveat=[[0.5], [0.6]]
    ),
    r"saveat has the shape \(4, 1\).*3 trajectories": lambda: solve(saveat=np.full((4, 1), 0.5)),
    r"saveat has the shape \(2, 1\).*3 trajectories": lambda: solve(
        prob=decay(saveat=[[0.5], [0.6]])
    ),
    r"saveat has the shape \(3, 1\).*an ensemble": lambda: eo.solve(
        decay(), saveat=[[0.5], [0.6], [0.7]]
    ),
    "saveat and save_everystep=True are both given": lambda: solve(saveat=0.1, save_everystep=True),
    # Options
    r"trajectories is missing.*trajectories=100": lambda: solve(trajectories=None),
    "abstol must be.*nan": lambda: solve(abstol=np.nan),
    r"abstol.*\(3,\).*\(2,\)": lambda: solve(abstol=np.full(3, 1e-6)),
    r"dt=-0\.1 is negative, and tspan runs forwards.*; give its size": lambda: solve(dt=-0.1),
    "save_end=False is given with save_everystep=True": lambda: solve(
        save_end=False, save_everystep=True
    ),
    "save_start=False and save_end=False leave nothing to save": lambda: solve(
        save_end=False, save_start=False
    ),
    "saveat=2 has no time between the ends": lambda: solve(
        save_end=False, save_start=False, saveat=2.0
    ),
    r"dt must be a finite step size.*array": lambda: solve(dt=np.array([0.1, 0.2])),
    "dt is missing: Euler has a fixed step.*dt=0.01": lambda: solve(eo.Euler()),
    "dt is missing: adaptive=False": lambda: solve(eo.Tsit5(), adaptive=False),
    "Euler has no error estimate, so adaptive must be False": lambda: solve(
        eo.Euler(), adaptive=True, dt=0.1
    ),
    "Euler has no error estimate.*stepsize_controller": lambda: solve(
        eo.Euler(), stepsize_controller=PID
    ),
    # prob_func and output_func
    r"prob_func varies the shape or dtype of u0.*index 1.*\(2,\).*before.*\(1,\)": lambda: remade(
        u0=lambda i: np.ones(1 + i)
    ),
    "prob_func varies the shape or dtype of u0.*float32.*float64": lambda: remade(
        u0=lambda i: U0 if i == 0 else U0_SINGLE
    ),
    r"prob_func varies the shapes or dtypes in p.*index 1.*\(2,\).*before.*\(1,\)": lambda: remade(
        p=lambda i: np.ones(1 + i), f=lambda i: lambda u, p, t: p.sum() * u
    ),
    "prob_func varies which times are saved.*rows=3.*rows=2.*rows up with jnp.inf": lambda: remade(
        saveat=lambda i: np.linspace(0, 1, 2 + i)
    ),
    "prob_func varies the computation that f does.*one ensemble for each": lambda: remade(
        f=lambda i: lambda u, p, t: -u if i == 0 else jnp.sin(u)
    ),
    "prob_func varies the computation that f does": lambda: remade(
        f=lambda i: by_name,
        p=lambda i: {"function": "sin" if i == 0 else "cos"},
    ),
    "prob_func varies the solver options.*'maxiters': 11.*before.*'maxiters': 10": lambda: remade(
        maxiters=lambda i: 10 + i
    ),
    # Of several names, or values
    **{
        f"max_norm must be a positive number, got {x}": lambda x=x: solve(max_norm=x)
        for x in (0.0, -1.0, np.nan)
    },
    r"sensealg=BacksolveAdjoint\(\) solves the adjoint.*of which max_norm": lambda: solve(
        eo.Tsit5(), max_norm=1.0, engine="diffrax", sensealg=eo.BacksolveAdjoint()
    ),
    **{
        f"saveat must be a positive spacing.*got {value}": lambda value=value: solve(saveat=value)
        for value in (0.0, -0.1, np.inf, np.nan)
    },
    **{
        rf"{kind.__name__}\(backend='CUDA'\) names a package of Julia.*'julia'": lambda kind=kind: (
            solve(eo.Tsit5(), kind(backend="CUDA"))
        )
        for kind in (eo.EnsembleGPUKernel, eo.EnsembleGPUArray)
    },
    **{
        rf"{name} must be a positive integer, got {value}\.": lambda name=name, value=value: solve(
            **{name: value}
        )
        for name, values in {
            "trajectories": (0, -1, 2.5, True),
            "batch_size": (0, -1, 2.5),
            "max_repeats": (0, 1.5),
            "maxiters": (0, 2.5),
        }.items()
        for value in values
    },
    **{
        f"{name} must be zero or positive, got {value}": lambda name=name, value=value: solve(
            **{name: value}
        )
        for name, value in {"abstol": -1e-6, "reltol": -1.0}.items()
    },
    **{
        f"dt must be a finite step size other than zero, got {value}": lambda value=value: solve(
            dt=value
        )
        for value in (0.0, np.nan, np.inf)
    },
    **{
        f"no engine can run {type(alg).__name__} .*{why}": lambda alg=alg: solve(alg)
        for alg, why in (
            (diffrax.EulerHeun(), "not du/dt = f.*Use an ODE solver"),
            (diffrax.SemiImplicitEuler(), "not du/dt = f.*Use an ODE solver"),
            (object(), "neither an ensembleode solver nor a diffrax one"),
        )
    },
    **{
        f"engine must be 'auto' or one of.*'diffrax'.*got {engine!r}": lambda engine=engine: solve(
            engine=engine
        )
        for engine in ("foo", None)
    },
    **{
        f"stepsize_controller and {name} are both given.*drop one": lambda name=name, value=value: (
            solve(stepsize_controller=PID, **{name: value})
        )
        for name, value in {
            "abstol": 1e-3,
            "reltol": 1e-3,
            "adaptive": True,
            "dtmin": 1e-3,
            "dtmax": 1e-3,
            "internalnorm": eo.MaxNorm(),
        }.items()
    },
}


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        *(case(TypeError, match, call) for match, call in TYPE_ERRORS.items()),
        *(case(ValueError, match, call) for match, call in VALUE_ERRORS.items()),
        *SEVERAL,
    ],
)
def test_bad_input(error, match, call, compiles):
    with pytest.raises(error, match="(?s)" + match):
        call()
    assert compiles.count == 0


def by_name(u, p, t):
    return getattr(jnp, p["function"])(u)


def test_float64_constant_meets_float32_state():
    """As it comes where dtypes promote freely."""
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.raises(TypeError, match=r"float32; it returned float64.*parameters and constants"),
    ):
        field(lambda u, p, t: u * np.array([1.0, 2.0]), U0_SINGLE)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda data: data.sum(), "got ArrayImpl"),
        (lambda data: None, "got NoneType"),
        (lambda data: data[:2, 0, 0], "got"),
        (lambda data: (0.0, data[:, 0, 0] > 0), "converged"),
    ],
)
def test_reduction_returns_no_pair(returned, said):
    """Found after the first batch, as a reduction may be any Python."""
    ens = eo.EnsembleProblem(decay(), reduction=lambda u, data, i: returned(data), u_init=0.0)
    with pytest.raises(TypeError, match=f"reduction must return a pair .*{said}"):
        eo.solve(ens, trajectories=3)


def test_the_module_is_a_module_still():
    """What asks for a name that is missing gets the answer that it expects."""
    assert not hasattr(eo, "Rodas5")
    assert getattr(eo, "Rodas5", None) is None
    with pytest.raises(ImportError, match="Rodas5"):
        from ensembleode import Rodas5  # noqa: F401  # pyright: ignore
    with pytest.raises(AttributeError) as missing:
        eo.Tsti5  # noqa: B018
    assert (missing.value.name, missing.value.obj) == ("Tsti5", eo)  # "Did you mean: 'Tsit5'?"
    assert dict(inspect.getmembers(eo))["Tsit5"] is eo.Tsit5
    assert type(pickle.loads(pickle.dumps(eo.Tsit5()))) is eo.Tsit5
    assert doctest.DocTestFinder().find(eo)


def test_whatever_is_said_to_be_here_is():
    """Each name in the hints exists, and so does every method that Julia is said to have."""
    words = vars(unknown_options).values()
    texts = [x for x in words if isinstance(x, str)]
    texts += [text for x in words if isinstance(x, dict) for text in map(str, x.values())]
    for name in {name for text in texts for name in re.findall(r"eo\.(\w+)\(", text)}:
        assert hasattr(eo, name), name
    for package in PACKAGES.values():
        for name in package.split():
            if not hasattr(eo, name):
                eo.JuliaAlg(re.findall(r"JuliaAlg\('(.*)'\)", unknown_options.instead_of(name))[0])
    options = inspect.signature(eo.solve).parameters
    assert not set(options) & set(unknown_options._OPTIONS)


@pytest.mark.parametrize("transform", [jax.jit, jax.grad])
def test_a_derivative_rule_that_closes_over_a_traced_value(transform):
    def scaled_by(a):
        @jax.custom_jvp
        def g(x):
            return -x

        g.defjvp(lambda primals, tangents: (g(*primals), a * tangents[0]))
        return g

    def end(a):
        return eo.solve(eo.ODEProblem(lambda u, p, t: scaled_by(a)(u), U0, (0.0, 1.0))).u[-1, 0]

    with pytest.raises(TypeError, match=r"derivative rule.*make it an argument of the function"):
        transform(end)(-2.0)


def test_a_field_of_integers():
    """The advice can be taken."""
    with pytest.raises(TypeError, match=r"returned int\d+: write out.astype\(u.dtype\)"):
        field(lambda u, p, t: jnp.where(u > 0, 1, 2))
