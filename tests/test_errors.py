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
from ensembleode import aliases
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


def reduction(reduction, u_init=0.0):
    ens = eo.EnsembleProblem(decay(), reduction=reduction, u_init=u_init)
    return eo.solve(ens, trajectories=3)


def case(name, error, match, call):
    return pytest.param(error, match, call, id=name)


PROBLEMS = [
    case("f", TypeError, r"f must be a function.*got 3", lambda: eo.ODEProblem(3, U0, (0, 1))),
    case(
        "integer u0",
        TypeError,
        r"u0 has the integer dtype int64.*1\.0, not 1",
        lambda: eo.ODEProblem(linear, np.array([1, 2]), (0.0, 1.0)),
    ),
    case(
        "u0 a Python integer",
        TypeError,
        "u0 has the integer dtype",
        lambda: eo.ODEProblem(linear, 1, (0.0, 1.0)),
    ),
    case(
        "u0 a dict of words",
        TypeError,
        r"u0\['a'\] must be an array.*got 'one'",
        lambda: eo.ODEProblem(linear, {"a": "one"}, (0.0, 1.0)),
    ),
    case(
        "u0 a string",
        TypeError,
        "u0 must be an array.*got 'abc'",
        lambda: eo.ODEProblem(linear, "abc", (0.0, 1.0)),
    ),
    case(
        "u0 None",
        TypeError,
        "u0 must be an array.*got None",
        lambda: eo.ODEProblem(linear, None, (0.0, 1.0)),
    ),
    case(
        "u0 ragged",
        TypeError,
        r"u0 must be an array.*got \[\[1\.0\], \[1\.0, 2\.0\]\]",
        lambda: eo.ODEProblem(linear, [[1.0], [1.0, 2.0]], (0.0, 1.0)),
    ),
    case(
        "u0 empty",
        ValueError,
        r"u0.*\(0,\)",
        lambda: solve(prob=eo.ODEProblem(linear, np.zeros(0), (0.0, 1.0), 1.0)),
    ),
    case("tspan a number", ValueError, r"tspan must be a pair.*1\.0", lambda: decay(1.0)),
    case("tspan None", ValueError, "tspan must be a pair.*None", lambda: decay(None)),
    case("tspan of one", ValueError, r"tspan must be a pair.*\(0\.0,\)", lambda: decay((0.0,))),
    case("tspan of three", ValueError, "tspan must be a pair", lambda: decay((0.0, 1.0, 2.0))),
    case(
        "tspan infinite",
        ValueError,
        r"tspan must be finite, got \(0\.0, inf\)",
        lambda: decay((0.0, np.inf)),
    ),
    case("tspan nan", ValueError, "tspan must be finite", lambda: decay((np.nan, 1.0))),
    case("tspan complex", ValueError, "tspan.*real numbers, got t1=1j", lambda: decay((0.0, 1j))),
    case("tspan an array", ValueError, "tspan.*real numbers, got t1=", lambda: decay((0.0, U0))),
    case(
        "tspan of strings",
        ValueError,
        "tspan",
        lambda: decay("ab"),
    ),
    case(
        "tspan with None",
        ValueError,
        "tspan.*None",
        lambda: decay((0.0, None)),
    ),
    case(
        "unknown option",
        TypeError,
        "an ODEProblem has no option 'sav': it has saveat",
        lambda: decay(sav=0.1),
    ),
    case(
        "unknown option of remake",
        TypeError,
        r"'trajectories' is neither f, u0, tspan or p nor a solver option.*saveat, abstol",
        lambda: eo.remake(decay(), trajectories=3),
    ),
    case(
        "unknown argument in remake of an ensemble",
        TypeError,
        "EnsembleProblem has no option 'reltol'",
        lambda: eo.remake(eo.EnsembleProblem(decay()), reltol=1e-3),
    ),
    case(
        "an ensemble with one state as u0",
        ValueError,
        r"u0 of EnsembleProblem has the shape of one.*a row for each",
        lambda: eo.EnsembleProblem(decay(), u0=U0),
    ),
    case(
        "an ensemble with other states",
        ValueError,
        r"u0 of EnsembleProblem has the shape \(4, 3\); it must be \[trajectory, 2\]",
        lambda: eo.EnsembleProblem(decay(), u0=np.ones((4, 3))),
    ),
    case(
        "an ensemble with other parameters",
        ValueError,
        r"p of EnsembleProblem must have the structure of the problem's p.*'k'",
        lambda: eo.EnsembleProblem(decay(), p={"k": np.ones(4)}),
    ),
    case(
        "an ensemble with rows for 4 and 5",
        ValueError,
        "same number of trajectories: u0 4, p 5",
        lambda: eo.EnsembleProblem(decay(), u0=np.ones((4, 2)), p=np.ones(5)),
    ),
    case(
        "an ensemble with p of one",
        ValueError,
        "same number of trajectories: no array of p has any",
        lambda: eo.EnsembleProblem(decay(), p=2.0),
    ),
    case(
        "more trajectories than rows",
        ValueError,
        "trajectories=5, and u0 and p of the EnsembleProblem have rows for 4",
        lambda: eo.solve(eo.EnsembleProblem(decay(), u0=np.ones((4, 2))), trajectories=5),
    ),
    *(
        case(
            f"{name} an array of {x.dtype}",
            TypeError,
            rf"{name}.* an array of the dtype {re.escape(str(x.dtype))}.*astype\(float\)",
            lambda name=name, x=x: eo.remake(decay(), **{name: {"k": x}}),
        )
        for name in ("u0", "p")
        for x in (np.array([1.0, None]), np.array(["a", "b"]), np.array(["2026"], "M8[Y]"))
    ),
    case(
        "remake of nothing",
        TypeError,
        "remake takes an ODEProblem, an EnsembleProblem or an integrator, got NoneType",
        lambda: eo.remake(None),
    ),
    case(
        "ensemble of a list",
        TypeError,
        r"prob must be an ODEProblem, got list.*EnsembleProblem\(prob, u0=u0s, p=ps\)",
        lambda: eo.EnsembleProblem([decay()]),
    ),
    case(
        "u_init without reduction",
        ValueError,
        "u_init is given without a reduction",
        lambda: eo.EnsembleProblem(decay(), u_init=0.0),
    ),
    *(
        case(
            f"{name} not callable",
            TypeError,
            f"{name} must be a function or None, got 3",
            lambda name=name: eo.EnsembleProblem(decay(), **{name: 3}),
        )
        for name in ("prob_func", "output_func", "reduction")
    ),
    case(
        "prob_func of one",
        TypeError,
        r"prob_func must take \(prob, ctx\).*takes 1 required.*\(prob\)",
        lambda: eo.EnsembleProblem(decay(), lambda prob: prob),
    ),
    case(
        "prob_func of four",
        TypeError,
        r"prob_func must take \(prob, ctx\).*takes 4 required.*\(a, b, c, d\)",
        lambda: eo.EnsembleProblem(decay(), lambda a, b, c, d: a),
    ),
]

FIELDS = [
    case(
        "f of another shape",
        ValueError,
        r"f must return an array of the shape of the state u, \(2,\).*\(1,\)",
        lambda: field(lambda u, p, t: u[:1]),
    ),
    case(
        "f a scalar",
        ValueError,
        r"f must return an array of the shape.*\(2,\).*\(\)",
        lambda: field(lambda u, p, t: 0.0),
    ),
    case(
        "f of another dtype",
        TypeError,
        r"f must return the dtype of the state u, float32; it returned float64.*"
        r"u0\.astype\('float64'\).*cast inside f",
        lambda: field(lambda u, p, t: u.astype(float) * np.array([1.0, 2.0]), U0_SINGLE),
    ),
    case(
        "f integer",
        TypeError,
        "f must return the dtype of the state u, float64; it returned int64",
        lambda: field(lambda u, p, t: jnp.ones_like(u, int)),
    ),
    *(
        case(
            f"f a {type(value(U0)).__name__}",
            TypeError,
            r"f must return one array of shape \(2,\); it returned the structure.*jnp\.array",
            lambda value=value: field(lambda u, p, t: value(u)),
        )
        for value in (list, tuple, lambda u: {"du": u}, lambda u: None)
    ),
    case(
        "f a string",
        TypeError,
        "f must return an array like the state u.*str",
        lambda: field(lambda u, p, t: "du"),
    ),
    case(
        "f in NumPy",
        TypeError,
        r"\bf must be written in JAX.*jnp",
        lambda: field(lambda u, p, t: np.sin(u)),
    ),
    case(
        "f with a branch",
        TypeError,
        r"\bf must be written in JAX.*jnp\.where",
        lambda: field(lambda u, p, t: u if u[0] > 0 else -u),
    ),
]


# A state or parameters that are something else than f takes them for.
CONTAINERS = [
    *(
        case(
            f"u0 a number, {name}",
            error,
            r"u0.*number.*write u0=\[1\.0\] or jnp\.array\(\[1\.0\]\)",
            lambda f=f: field(f, 1.0),
        )
        for name, error, f in (
            ("indexed", TypeError, lambda u, p, t: -u[0]),
            ("taken apart", TypeError, lambda u, p, t: jnp.array([*u])),
            ("a vector returned", ValueError, lambda u, p, t: jnp.array([-u])),
        )
    ),
    case(
        "p a number, indexed",
        TypeError,
        r"p of the problem is given as a number.*write p=\[1\.0\]",
        lambda: field(lambda u, p, t: -p[0] * u),
    ),
    *(
        case(
            f"p a tuple, {name}",
            TypeError,
            r"f failed.*list or a tuple is no array.*jnp\.array",
            lambda f=f: solve(prob=eo.ODEProblem(f, U0, (0.0, 1.0), (1.0, 2.0))),
        )
        for name, f in {
            "negative": lambda u, p, t: -p * u,
            "times": lambda u, p, t: p * u,
            "in a function": lambda u, p, t: jnp.sin(p) * u,
        }.items()
    ),
    case(
        "other keys",
        TypeError,
        r"f failed: 'a'.*p has the keys 'A'.*p=\{\*\*prob\.p, 'key': value\}",
        lambda: eo.solve(
            eo.remake(
                eo.ODEProblem(lambda u, p, t: -p["a"] * u, U0, (0.0, 1.0), {"a": 1.0}), p={"A": 1.0}
            )
        ),
    ),
    case(
        "another shape of u0",
        ValueError,
        r"prob_func changed u0 from \(2,\) to \(3,\).*f must return an array of the shape",
        lambda: eo.solve(
            eo.EnsembleProblem(
                eo.ODEProblem(lambda u, p, t: jnp.array([u[1], -u[0]]), U0, (0.0, 1.0)),
                lambda prob, ctx: eo.remake(prob, u0=np.ones(3)),
            ),
            trajectories=2,
        ),
    ),
    case(
        "f with an array of objects",
        TypeError,
        r"f computes with a NumPy array of objects.*astype\(float\)",
        lambda: field(lambda u, p, t: u * OBJECTS),
    ),
]
OBJECTS = np.array([1.0, 2.0], dtype=object)


def time_first(t, y):
    return -y


def time_last(y, t):
    return -y


def scipy_with_parameters(t, y, p):
    return -p * y


def odeint_with_parameters(y, t, k):
    return -k * y


def without_time(u, p):
    return -u


def julia_in_place(du, u, p, t):
    du[0] = -u[0]


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


def without_parameters(f):
    return solve(prob=eo.ODEProblem(f, U0, (0.0, 1.0)))


SIGNATURES = [
    *(
        case(
            f"f {fn.__name__}",
            TypeError,
            rf"\bf must take.*f\(u, p, t\).*{match}",
            lambda fn=fn: field(fn),
        )
        for fn, match in (
            (time_first, r"takes \(t, y\): write f\(y, p, t\)"),
            (time_last, r"takes \(y, t\): write f\(y, p, t\)"),
            (scipy_with_parameters, r"\(t, y, p\), with the time first.*f\(y, p, t\)"),
            (odeint_with_parameters, r"\(y, t, k\), with the time second.*f\(y, k, t\)"),
            (without_time, r"takes \(u, p\): give it all three"),
            (julia_in_place, r"takes \(du, u, p, t\): in place.*return du"),
        )
    ),
    case(
        "f of a partial",
        TypeError,
        "with the time first",
        lambda: field(functools.partial(scipy_with_parameters)),
    ),
    *(
        case(
            f"f {fn.__name__}",
            TypeError,
            r"f must return du, and can't write it into an array.*jnp\.array.*\.at\[0\]\.set",
            lambda fn=fn: field(fn),
        )
        for fn in (numpy_in_place, jax_in_place)
    ),
    *(
        case(
            f"a network that is given a matrix {u0.shape}",
            error,
            r"jax\.vmap\(p, in_axes=1, out_axes=1\)\(u\).*EnsembleColumns\(\)",
            lambda u0=u0: eo.solve(eo.ODEProblem(lambda u, p, t: p(u), u0, (0.0, 1.0), LAYER)),
        )
        for u0, error in ((jnp.ones((2, 3)), ValueError), (jnp.ones((3, 2)), TypeError))
    ),
    *(
        case(
            f"f uses p, which is None: {name}",
            TypeError,
            r"p is None, as this problem has no parameters.*ODEProblem\(f, u0, tspan, p\)",
            lambda fn=fn: without_parameters(fn),
        )
        for name, fn in {
            "subscript": lambda u, p, t: p[0] * u,
            "product": lambda u, p, t: p * u,
            "key": lambda u, p, t: p["k"] * u,
        }.items()
    ),
    *(
        case(
            f"f {fn.__name__}",
            TypeError,
            rf"f needs to know {name}, .*functools\.partial",
            lambda fn=fn, p=p: solve(prob=eo.ODEProblem(fn, U0, (0.0, 1.0), p)),
        )
        for fn, p, name in (
            (loop, {"a": 1.0, "n": np.array(3)}, r"p\['n'\]"),
            (flagged, {"a": 1, "more": (jnp.array(True), 2.0)}, r"p\['more'\]\[0\]"),
        )
    ),
    case(
        "f with a mask",
        TypeError,
        r"f must be written in JAX.*jnp\.where",
        lambda: field(lambda u, p, t: u[u > 0]),
    ),
]


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


CALLBACKS = [
    case(
        "callback",
        TypeError,
        "callback must be an eo.ContinuousCallback.*got float",
        lambda: solve(callback=1.0),
    ),
    case(
        "a callback of a problem",
        TypeError,
        "callback must be an eo.Cont",
        lambda: eo.ODEProblem(lambda u, p, t: u, 1.0, (0.0, 1.0), callback=first),
    ),
    case(
        "condition",
        TypeError,
        "condition of ContinuousCallback must be a function",
        lambda: eo.ContinuousCallback(1.0, eo.terminate),
    ),
    case(
        "no affect",
        ValueError,
        "neither an affect nor an affect_neg",
        lambda: eo.ContinuousCallback(first, None),
    ),
    case(
        "rootfind",
        ValueError,
        "rootfind of ContinuousCallback must be eo.LeftRootFind",
        lambda: eo.ContinuousCallback(first, eo.terminate, rootfind=True),
    ),
    case(
        "interp_points",
        ValueError,
        "interp_points of .* must be a whole number",
        lambda: eo.ContinuousCallback(first, eo.terminate, interp_points=-1),
    ),
    case(
        "dtrelax",
        ValueError,
        "dtrelax of .* must be a positive number",
        lambda: eo.ContinuousCallback(first, eo.terminate, dtrelax=0),
    ),
    case(
        "repeat_nudge",
        ValueError,
        "repeat_nudge of .* between 0 and 1",
        lambda: eo.ContinuousCallback(first, eo.terminate, repeat_nudge=1),
    ),
    case(
        "save_positions",
        ValueError,
        "save_positions of .* must be a pair",
        lambda: eo.DiscreteCallback(first, eo.terminate, save_positions=True),
    ),
    case(
        "length",
        ValueError,
        "length of VectorContinuousCallback",
        lambda: eo.VectorContinuousCallback(first, eo.terminate, 0),
    ),
    case("CallbackSet", TypeError, "callback must be an eo.", lambda: eo.CallbackSet(first)),
    case("terminate", TypeError, "terminate takes an integrator", lambda: eo.terminate(decay())),
    case(
        "a vector as condition",
        ValueError,
        r"condition of callback 0, a ContinuousCallback must return a real number.*\(\).*\(2,\)",
        lambda: with_callback(lambda u, t, integrator: u),
    ),
    case(
        "None as condition",
        TypeError,
        "condition of callback 0, .* must return a real number, got None",
        lambda: with_callback(lambda u, t, integrator: None),
    ),
    case(
        "a boolean as condition",
        TypeError,
        "must return a real number; it returned bool",
        lambda: with_callback(lambda u, t, integrator: u[0] > 0),
    ),
    case(
        "a number as discrete condition",
        TypeError,
        "must return a boolean; it returned float64",
        lambda: solve(callback=eo.DiscreteCallback(lambda u, t, integrator: t, eo.terminate)),
    ),
    case(
        "another length",
        ValueError,
        r"of the shape \(3,\); it returned the shape \(2,\)",
        lambda: with_callback(lambda u, t, integrator: u, lambda integrator, mask: integrator, 3),
    ),
    case(
        "condition with two arguments",
        TypeError,
        "condition of callback 0, .* can't be called",
        lambda: with_callback(lambda u, t: t),
    ),
    case(
        "affect of None",
        TypeError,
        "affect of callback 0, .* must return the integrator, got NoneType .*return.* missing",
        lambda: with_callback(first, lambda integrator: None),
    ),
    case(
        "affect of another shape",
        ValueError,
        "affect of callback 0, .* must make a state of the shape of u0",
        with_affect(lambda i: {"u": i.u[:1]}),
    ),
    case(
        "affect of another dtype",
        TypeError,
        "must make a state of the dtype of u0, float64.*float32",
        with_affect(lambda i: {"u": i.u.astype("float32")}),
    ),
    case(
        "affect of another structure",
        TypeError,
        "must make a state of the structure of u0",
        with_affect(lambda i: {"u": {"x": i.u}}),
    ),
    case(
        "affect of t",
        TypeError,
        "an affect changes u and p of the integrator, not t",
        with_affect(lambda i: {"t": 1.0}),
    ),
    case(
        "affect of other parameters",
        TypeError,
        "must make parameters of the structure of p",
        with_affect(lambda i: {"p": (1.0, 2.0)}),
    ),
    case(
        "affect of a parameter's shape",
        ValueError,
        "must make parameters of the shapes of p",
        with_affect(lambda i: {"p": i.u}),
    ),
    case(
        "affect of a whole number",
        TypeError,
        "changes leaf 0 of p, int64",
        with_affect(lambda i: {"p": i.p + 1}, p=jnp.array(1)),
    ),
    case(
        "max_events",
        ValueError,
        "max_events must be a positive integer",
        lambda: solve(max_events=0),
    ),
    case(
        "callbacks of diffrax",
        ValueError,
        "engine='diffrax' can't run .*callback",
        lambda: solve(
            callback=eo.ContinuousCallback(lambda u, t, i: t, eo.terminate), engine="diffrax"
        ),
    ),
]
OTHER_NAMES = [
    *(
        case(
            f"{name} of {where}",
            TypeError,
            rf"has no option '{name}': .*{match}",
            lambda call=call, name=name: call(**{name: 1.0}),
        )
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
            "save_idxs": "output_func=lambda",
            "prob_funk": "it has",
        }.items()
        for where, call in {
            "solve": solve,
            "remake": lambda **options: eo.remake(decay(), **options),
            "ODEProblem": decay,
            "EnsembleProblem": lambda **options: eo.EnsembleProblem(decay(), **options),
        }.items()
    ),
    case(
        "saveatt",
        TypeError,
        "solve has no option 'saveatt': it has saveat",
        lambda: solve(saveatt=1),
    ),
    *(
        case(
            f"eo.{name}",
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
            "EM": "no stochastic ones",
            "VelocityVerlet": "symplectic",
            "Event": r"eo\.ContinuousCallback\(condition, affect\)",
            "SaveAt": "saveat=",
        }.items()
    ),
    *(
        case(f"alg {text}", TypeError, f"got the string '{text}'; {match}", lambda t=text: solve(t))
        for text, match in {
            "tsit5": r"give eo\.Tsit5\(\)\.",
            "BDF": r"for stiff problems there are eo\.Rodas5P\(\)",
            "RK45": r"here it is eo\.Dopri5",
            "nothing": r"give one such as eo\.Tsit5\(\), or eo\.Rodas5P\(\)",
        }.items()
    ),
]

TIMES = [
    case(
        "saveat outside",
        ValueError,
        r"saveat has the time 1\.5, outside tspan=\(0, 1\)",
        lambda: solve(saveat=[0.5, 1.5]),
    ),
    case(
        "saveat outside backwards",
        ValueError,
        r"saveat has the time 1\.5, outside tspan=\(1, 0\)",
        lambda: solve(prob=decay(BACKWARDS), saveat=[1.5, 0.5]),
    ),
    case(
        "saveat nan",
        ValueError,
        "saveat has the time nan, outside",
        lambda: solve(saveat=[0.5, np.nan]),
    ),
    case(
        "saveat unsorted",
        ValueError,
        "saveat is not sorted: it must be increasing",
        lambda: solve(saveat=[0.5, 0.2]),
    ),
    case(
        "saveat unsorted backwards",
        ValueError,
        "saveat is not sorted: it must be decreasing, as time runs backwards",
        lambda: solve(prob=decay(BACKWARDS), saveat=[0.2, 0.5]),
    ),
    case(
        "saveat unsorted in a row",
        ValueError,
        "saveat is not sorted",
        lambda: solve(saveat=[[0.1, 0.2], [0.1, 0.2], [0.2, 0.1]]),
    ),
    case("saveat empty", ValueError, "saveat is empty; leave it out", lambda: solve(saveat=[])),
    case(
        "saveat of three axes",
        ValueError,
        r"saveat must be a number.*\(3, 1, 1\)",
        lambda: solve(saveat=np.zeros((3, 1, 1))),
    ),
    *(
        case(
            f"saveat {value}",
            ValueError,
            f"saveat must be a positive spacing.*got {value}",
            lambda value=value: solve(saveat=value),
        )
        for value in (0.0, -0.1, np.inf, np.nan)
    ),
    *(
        case(
            f"saveat a {type(value).__name__}",
            TypeError,
            "saveat must be a number or an array of times",
            lambda value=value: solve(saveat=value),
        )
        for value in (
            ["a", "b"],
            "all",
            {"a": 1},
            1j,
            True,
        )
    ),
    case(
        "saveat an array of complex numbers",
        TypeError,
        "saveat must be a number or an array of times",
        lambda: solve(saveat=[0.5 + 0.1j]),
    ),
    case(
        "saveat ragged",
        TypeError,
        "saveat must be a number or an array of times",
        lambda: solve(saveat=[[0.1], [0.1, 0.2], [0.3]]),
    ),
    case(
        "saveat far too fine",
        ValueError,
        "saveat",
        lambda: solve(saveat=1e-12),
    ),
    case(
        "saveat with two rows for three",
        ValueError,
        r"saveat has the shape \(2, 1\).*\[trajectory, time\].*3 trajectories",
        lambda: solve(saveat=[[0.5], [0.6]]),
    ),
    case(
        "saveat with four rows for three",
        ValueError,
        r"saveat has the shape \(4, 1\).*3 trajectories",
        lambda: solve(saveat=np.full((4, 1), 0.5)),
    ),
    case(
        "saveat with two rows kept with the problem",
        ValueError,
        r"saveat has the shape \(2, 1\).*3 trajectories",
        lambda: solve(prob=decay(saveat=[[0.5], [0.6]])),
    ),
    case(
        "saveat with four rows kept with the problem",
        ValueError,
        r"saveat has the shape \(4, 1\).*3 trajectories",
        lambda: solve(prob=decay(saveat=np.full((4, 1), 0.5))),
    ),
    case(
        "saveat with rows for one problem",
        ValueError,
        r"saveat has the shape \(3, 1\).*an ensemble",
        lambda: eo.solve(decay(), saveat=[[0.5], [0.6], [0.7]]),
    ),
    case(
        "saveat with rows kept with one problem",
        ValueError,
        r"saveat has the shape \(3, 1\).*an ensemble",
        lambda: eo.solve(decay(saveat=[[0.5], [0.6], [0.7]])),
    ),
    *(
        case(
            f"{name}={value} with an array saveat",
            ValueError,
            f"{name} is given with an array saveat.*leave it out",
            lambda name=name, value=value: solve(saveat=[0.5], **{name: value}),
        )
        for name in ("save_start", "save_end")
        for value in (True, False)
    ),
    case(
        "saveat with save_everystep",
        ValueError,
        "saveat and save_everystep=True are both given",
        lambda: solve(saveat=0.1, save_everystep=True),
    ),
]

OPTIONS = [
    case(
        "the solver after the algorithm",
        TypeError,
        r"solver is the second argument.*solve\(ens, eo\.Tsit5\(\), eo\.EnsembleThreads\(\)\)",
        lambda: solve(eo.EnsembleThreads(), eo.Vern7()),
    ),
    *(
        case(
            f"{kind.__name__} with a backend of Julia",
            ValueError,
            rf"{kind.__name__}\(backend='CUDA'\) names a package of Julia.*engine='julia'",
            lambda kind=kind: solve(eo.Tsit5(), kind(backend="CUDA")),
        )
        for kind in (eo.EnsembleGPUKernel, eo.EnsembleGPUArray)
    ),
    *(
        case(
            f"kernels on {name} without a GPU",
            ValueError,
            r"EnsembleGPUKernel\(devices=.*\) names GPUs.*eo\.EnsembleThreads\(\)",
            lambda devices=devices: solve(eo.Tsit5(), eo.EnsembleGPUKernel(devices=devices)),
        )
        for name, devices in {"two devices": 2, "a list": jax.devices("cpu")}.items()
    ),
    case(
        "trajectories missing",
        ValueError,
        r"trajectories is missing.*trajectories=100",
        lambda: solve(trajectories=None),
    ),
    *(
        case(
            f"{name}={value}",
            ValueError,
            rf"{name} must be a positive integer, got {value}\.",
            lambda name=name, value=value: solve(**{name: value}),
        )
        for name, values in {
            "trajectories": (0, -1, 2.5, True),
            "batch_size": (0, -1, 2.5),
            "max_repeats": (0, 1.5),
            "maxiters": (0, 2.5),
        }.items()
        for value in values
    ),
    *(
        case(
            f"{name}={value}",
            ValueError,
            f"{name} must be zero or positive, got {value}",
            lambda name=name, value=value: solve(**{name: value}),
        )
        for name, value in {"abstol": -1e-6, "reltol": -1.0}.items()
    ),
    case("abstol nan", ValueError, "abstol must be.*nan", lambda: solve(abstol=np.nan)),
    case(
        "abstol a string",
        TypeError,
        "abstol must be.*'tight'",
        lambda: solve(abstol="tight"),
    ),
    case(
        "abstol of another shape",
        ValueError,
        r"abstol.*\(3,\).*\(2,\)",
        lambda: solve(abstol=np.full(3, 1e-6)),
    ),
    *(
        case(
            f"dt={value}",
            ValueError,
            f"dt must be a finite step size other than zero, got {value}",
            lambda value=value: solve(dt=value),
        )
        for value in (0.0, np.nan, np.inf)
    ),
    case(
        "dt against the direction of time",
        ValueError,
        r"dt=-0\.1 is negative, and tspan runs forwards.*; give its size",
        lambda: solve(dt=-0.1),
    ),
    case(
        "save_end with save_everystep",
        ValueError,
        "save_end=False is given with save_everystep=True",
        lambda: solve(save_end=False, save_everystep=True),
    ),
    case(
        "nothing saved",
        ValueError,
        "save_start=False and save_end=False leave nothing to save",
        lambda: solve(save_end=False, save_start=False),
    ),
    case(
        "nothing saved between the ends",
        ValueError,
        "saveat=2 has no time between the ends",
        lambda: solve(save_end=False, save_start=False, saveat=2.0),
    ),
    case(
        "dt an array",
        ValueError,
        r"dt must be a finite step size.*array",
        lambda: solve(dt=np.array([0.1, 0.2])),
    ),
    case(
        "dt a string",
        TypeError,
        "dt must be a finite step size.*'a'",
        lambda: solve(dt="a"),
    ),
    case(
        "fixed step without dt",
        ValueError,
        "dt is missing: Euler has a fixed step.*dt=0.01",
        lambda: solve(eo.Euler()),
    ),
    case(
        "adaptive=False without dt",
        ValueError,
        "dt is missing: adaptive=False",
        lambda: solve(eo.Tsit5(), adaptive=False),
    ),
    case(
        "adaptive=True without an error estimate",
        ValueError,
        "Euler has no error estimate, so adaptive must be False",
        lambda: solve(eo.Euler(), adaptive=True, dt=0.1),
    ),
    case("alg by name", TypeError, "alg must be a solver, got the string", lambda: solve("Tsit5")),
    *(
        case(
            f"alg {type(alg).__name__}",
            ValueError,
            f"no engine can run {type(alg).__name__} .*{why}",
            lambda alg=alg: solve(alg),
        )
        for alg, why in (
            (diffrax.EulerHeun(), "not du/dt = f.*Use an ODE solver"),
            (diffrax.SemiImplicitEuler(), "not du/dt = f.*Use an ODE solver"),
            (object(), "neither an ensembleode solver nor a diffrax one"),
        )
    ),
    *(
        case(
            f"alg a class of {alg.__module__.split('.')[0]}",
            TypeError,
            r"alg must be a solver, got the class Tsit5; give Tsit5\(\)",
            lambda alg=alg: solve(alg),
        )
        for alg in (eo.Tsit5, diffrax.Tsit5)
    ),
    *(
        case(
            f"engine={engine}",
            ValueError,
            f"engine must be 'auto' or one of.*'diffrax'.*got {engine!r}",
            lambda engine=engine: solve(engine=engine),
        )
        for engine in ("foo", None)
    ),
    case(
        "ensemblealg a class",
        TypeError,
        r"ensemblealg must be one of.*EnsembleSerial\(\).*give an instance, with \(\)",
        lambda: solve(eo.Tsit5(), eo.EnsembleSerial),
    ),
    case(
        "ensemblealg a string",
        TypeError,
        "ensemblealg must be one of.*got 'serial'",
        lambda: solve(eo.Tsit5(), "serial"),
    ),
    case(
        "ensemblealg a solver",
        TypeError,
        r"ensemblealg must be one of.*got Tsit5\(\)",
        lambda: solve(eo.Tsit5(), eo.Tsit5()),
    ),
    *(
        case(
            f"{name} with one problem",
            TypeError,
            f"{name} is given with a single ODEProblem.*EnsembleProblem",
            lambda options=options: eo.solve(decay(), eo.Tsit5(), **options),
        )
        for name, options in (
            ("ensemblealg", {"ensemblealg": eo.EnsembleSerial()}),
            ("trajectories", {"trajectories": 3}),
            ("batch_size", {"batch_size": 3}),
            ("progress", {"progress": True}),
        )
    ),
    case(
        "ensemblealg as alg of one problem",
        TypeError,
        "ensemblealg is given with a single ODEProblem",
        lambda: eo.solve(decay(), eo.EnsembleSerial()),
    ),
    *(
        case(
            f"sensealg {name}",
            TypeError,
            r"sensealg must be.*DirectAdjoint\(\).*got",
            lambda sensealg=sensealg: solve(sensealg=sensealg),
        )
        for name, sensealg in {"a string": "direct", "a class": eo.DirectAdjoint}.items()
    ),
    case(
        "stepsize_controller",
        TypeError,
        "stepsize_controller must be one such as eo.PIController.*got 'pid'",
        lambda: solve(stepsize_controller="pid"),
    ),
    *(
        case(
            f"stepsize_controller with {name}",
            ValueError,
            f"stepsize_controller and {name} are both given.*drop one",
            lambda name=name, value=value: solve(stepsize_controller=PID, **{name: value}),
        )
        for name, value in {
            "abstol": 1e-3,
            "reltol": 1e-3,
            "adaptive": True,
            "dtmin": 1e-3,
            "dtmax": 1e-3,
            "internalnorm": eo.MaxNorm(),
        }.items()
    ),
    case(
        "stepsize_controller without an error estimate",
        ValueError,
        "Euler has no error estimate.*stepsize_controller",
        lambda: solve(eo.Euler(), stepsize_controller=PID),
    ),
    *(
        case(
            f"{name}={value!r}",
            TypeError,
            f"{name} must be",
            lambda name=name, value=value: solve(**{name: value}),
        )
        for name, value in (
            ("seed", "a"),
            ("seed", 1.5),
            ("key", "a"),
            ("key", 3),
        )
    ),
    *(
        case(
            f"solve of a {type(prob).__name__}",
            TypeError,
            f"solve takes an ODEProblem or an EnsembleProblem, got {type(prob).__name__}",
            lambda prob=prob: eo.solve(prob, trajectories=3),
        )
        for prob in ([], None, linear)
    ),
]

# What people do with a context as if it were the index.
AS_INDEX = {
    "times": lambda i: 2.0 * i,
    "plus": lambda i: i + 1,
    "negative": lambda i: -i,
    "compared": lambda i: jnp.where(i > 0, 1.0, 2.0),
    "of a list": lambda i: [1.0, 2.0, 3.0][i],
    "of NumPy": lambda i: U0[i],
    "of JAX": lambda i: jnp.asarray(U0)[i],
    "in a function": lambda i: jnp.sin(i),
    "float": lambda i: float(i),
}

FUNCTIONS = [
    *(
        case(
            f"{name}: a context as an index, {what}",
            TypeError,
            rf"{name} gets a context, which is no number.*ctx\.index.*ctx\.sim_id",
            lambda fn=fn, run=run: run(fn),
        )
        for what, fn in AS_INDEX.items()
        for name, run in {
            r"prob_func\(prob, ctx\)": lambda fn: made(lambda prob, i: eo.remake(prob, p=fn(i))),
            r"output_func\(sol, ctx\)": lambda fn: output(
                lambda sol, i: (sol.u[-1] * fn(i), False)
            ),
        }.items()
    ),
    *(
        case(
            f"prob_func returning a {type(value).__name__}",
            TypeError,
            f"prob_func must return an ODEProblem, got {type(value).__name__}.*eo.remake",
            lambda value=value: made(lambda prob, ctx: value),
        )
        for value in (1.0, [], U0)
    ),
    case(
        "prob_func returning nothing",
        TypeError,
        r"prob_func must return an ODEProblem, got NoneType \(is a `return` missing\?\)",
        lambda: made(lambda prob, ctx: None),
    ),
    case(
        "u0 of varying shape",
        ValueError,
        r"prob_func varies the shape or dtype of u0.*index 1.*\(2,\).*before.*\(1,\)",
        lambda: remade(u0=lambda i: np.ones(1 + i)),
    ),
    case(
        "u0 of varying dtype",
        ValueError,
        "prob_func varies the shape or dtype of u0.*float32.*float64",
        lambda: remade(u0=lambda i: U0 if i == 0 else U0_SINGLE),
    ),
    case(
        "p of varying shape",
        ValueError,
        r"prob_func varies the shapes or dtypes in p.*index 1.*\(2,\).*before.*\(1,\)",
        lambda: remade(p=lambda i: np.ones(1 + i), f=lambda i: lambda u, p, t: p.sum() * u),
    ),
    case(
        "saveat of varying length",
        ValueError,
        "prob_func varies which times are saved.*rows=3.*before.*rows=2",
        lambda: remade(saveat=lambda i: np.linspace(0, 1, 2 + i)),
    ),
    case(
        "f of varying computation",
        ValueError,
        "prob_func varies the computation that f does.*one ensemble for each",
        lambda: remade(f=lambda i: lambda u, p, t: -u if i == 0 else jnp.sin(u)),
    ),
    case(
        "f of varying text in p",
        ValueError,
        "prob_func varies the computation that f does",
        lambda: remade(
            f=lambda i: by_name,
            p=lambda i: {"function": "sin" if i == 0 else "cos"},
        ),
    ),
    case(
        "maxiters varies",
        ValueError,
        "prob_func varies the solver options.*'maxiters': 11.*before.*'maxiters': 10",
        lambda: remade(maxiters=lambda i: 10 + i),
    ),
    *(
        case(
            f"output_func returning {name}",
            TypeError,
            rf"output_func must return a pair \(out, rerun\).*returned {got}",
            lambda value=value: output(lambda sol, ctx: value(sol)),
        )
        for name, value, got in (
            ("an array", lambda sol: sol.u, ""),
            ("nothing", lambda sol: None, "NoneType"),
            ("a list", lambda sol: [sol.u, False], "list"),
            ("a triple", lambda sol: (sol.u, False, 1), "tuple"),
        )
    ),
    case(
        "rerun an array",
        TypeError,
        r"output_func must return.*rerun a boolean; its rerun has the shape \(2,\)",
        lambda: output(lambda sol, ctx: (sol.u, sol.u[-1] > 0)),
    ),
    case(
        "rerun a string",
        TypeError,
        "output_func must return.*rerun a boolean",
        lambda: output(lambda sol, ctx: (sol.u, "no")),
    ),
    case(
        "out a string",
        TypeError,
        "output_func must return.*arrays",
        lambda: output(lambda sol, ctx: ("a", False)),
    ),
    *(
        case(
            f"output_func with {name}",
            TypeError,
            "output_func must be written in JAX.*jnp instead of np.*jnp.where",
            lambda value=value: output(lambda sol, ctx: (value(sol), False)),
        )
        for name, value in (
            ("np", lambda sol: np.asarray(sol.u)),
            ("a NumPy function", lambda sol: np.sin(sol.u)),
            ("a branch", lambda sol: sol.u if sol.u[0, 0] > 0 else -sol.u),
            ("float", lambda sol: float(sol.u[0, 0])),
            ("a traced slice", lambda sol: sol.u[: sol.length]),
            ("a traced mask", lambda sol: sol.u[sol.u > 0]),
        )
    ),
]


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        *PROBLEMS,
        *FIELDS,
        *CONTAINERS,
        *SIGNATURES,
        *CALLBACKS,
        *OTHER_NAMES,
        *TIMES,
        *OPTIONS,
        *FUNCTIONS,
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
    ("error", "match", "call"),
    [
        case(
            "an array",
            TypeError,
            "reduction must return a pair .*got ArrayImpl",
            lambda: reduction(lambda u, data, indices: data.sum()),
        ),
        case(
            "nothing",
            TypeError,
            "reduction must return a pair .*got NoneType",
            lambda: reduction(lambda u, data, indices: None),
        ),
        case(
            "an array of two",
            TypeError,
            "reduction must return a pair .*got",
            lambda: reduction(lambda u, data, indices: data[:2, 0, 0]),
        ),
        case(
            "converged an array",
            TypeError,
            "reduction must return a pair .*converged",
            lambda: reduction(lambda u, data, indices: (u, data[:, 0, 0] > 0)),
        ),
    ],
)
def test_reduction_returns_no_pair(error, match, call):
    """Found after the first batch, as a reduction may be any Python."""
    with pytest.raises(error, match=match):
        call()


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
    words = vars(aliases).values()
    texts = [x for x in words if isinstance(x, str)]
    texts += [text for x in words if isinstance(x, dict) for text in map(str, x.values())]
    for name in {name for text in texts for name in re.findall(r"eo\.(\w+)\(", text)}:
        assert hasattr(eo, name), name
    for package in PACKAGES.values():
        for name in package.split():
            if not hasattr(eo, name):
                eo.JuliaAlg(re.findall(r"JuliaAlg\('(.*)'\)", aliases.instead_of(name))[0])
    options = inspect.signature(eo.solve).parameters
    assert not set(options) & set(aliases._OPTIONS)


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
