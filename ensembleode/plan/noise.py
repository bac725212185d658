"""The noise of stochastic problems, as it is described, and the methods that are for it."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ..fields.derivatives.sparsity import structure
from ..ground.state_tree import StateTree
from ..problem.jump_problem import JumpProblem
from ..problem.stochastic import NoiseGrid, SDEProblem, WienerProcess
from ..solvers import Direct, EM, JuliaAlg, SDESolver, SOSRA, SOSRI, Tsit5
from ..solvers.julia_alg import draws, is_stochastic, OF_EULER
from ..tracing.evaluation import equations
from ..tracing.program import is_inexact, is_tracer, Program


# Primitives through which a value may depend on numbers by which its derivative is zero, besides
# all that return integers or booleans.
_STEPS = {
    "bitcast_convert_type",
    "ceil",
    "cond",
    "custom_jvp_call",
    "custom_vjp_call",
    "floor",
    "gather",
    "nextafter",
    "round",
    "select_n",
    "sign",
    "while",
}
JUMPS = "jumps"


class NoiseNumbers(NamedTuple):
    """The numbers of the noise of one trajectory.

    - `key`: the key of all trajectories; `index` and `repeat`: which trajectory this is, and which
        run of it.
    - `span`: the length of its time span, which derivatives take for a constant.
    - `given`: the numbers that the user gave, by the names of `NoiseTerms.given`.
    """

    key: Any
    index: Any
    repeat: Any
    span: Any
    given: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class NoiseTerms:
    """What a stochastic problem has besides the drift, which is its field.

    All programs have the same constants, of which those from number `first` on are the numbers of
    the noise (see `numbers`).

    - `diffusion`: the diffusion, `g(consts, u, p, t)`.
    - `integrand`: the integrand; None without one.
    - `kind`: `"diagonal"`, `"scalar"` or `"general"`; or `"jumps"`, where the diffusion are the
        propensities of reactions.
    - `shape`: the shape of the noise.
    - `tree`: the structure of a state that is a pytree; None for an array.
    - `given`: which numbers of the noise there are: any of `"factor"`, `"t"`, `"W"`, `"Z"` and
        `"changes"`.
    - `kept`: whether solutions keep the path.
    """

    diffusion: Program
    integrand: Program | None
    kind: str
    shape: tuple[int, ...]
    tree: StateTree | None
    given: tuple[str, ...]
    kept: bool
    first: int

    def mapped(self, change: Callable[[Program], Program], more: int = 0) -> "NoiseTerms":
        """The terms with changed programs, which have `more` constants before the key."""
        integrand = self.integrand and change(self.integrand)
        changes = {"diffusion": change(self.diffusion), "integrand": integrand}
        return dataclasses.replace(self, **changes, first=self.first + more)

    def numbers(self, consts: Sequence) -> NoiseNumbers:
        """The numbers of the noise among the constants of the programs, or what stands in their
        places."""
        key, index, repeat, span, *more = consts[self.first :]
        given = dict(zip(self.given, more, strict=False))
        return NoiseNumbers(key, index, repeat, span, given)

    def rows(self, g: Any) -> Array:
        """A value of the diffusion for the state as engines see it: `[*state]`, or `[*state, m]`
        for a matrix of `m` noises, with one axis in place of the state's for a pytree."""
        if self.tree is None:
            return jnp.asarray(g)  # (A constant is Python's number.)
        if self.kind != "general":
            return self.tree.ravel(g)
        return jnp.concatenate([jnp.reshape(x, (-1, self.size)) for x in jtu.tree_leaves(g)])

    @property
    def size(self) -> int:
        """The number of components of the noise."""
        return math.prod(self.shape)

    @property
    def is_correlated(self) -> bool:
        return "factor" in self.given

    @property
    def is_additive(self) -> bool:
        """Whether the diffusion doesn't depend on the state, other than by products with zero."""
        inputs = [True] + [False] * (len(self.diffusion.jaxpr.invars) - 1)
        if not any(self.diffusion.depends_on(inputs)):
            return True
        jumps = any(
            x.primitive.name in _STEPS or not all(is_inexact(v.aval) for v in x.outvars)
            for x in equations(self.diffusion.jaxpr)
        )
        return not jumps and not structure(self.diffusion).any()


def numbers_of(prob: SDEProblem | JumpProblem) -> dict[str, Any]:
    """The numbers of the noise of a problem, by their names."""
    if isinstance(prob, JumpProblem):
        leaves = (jnp.reshape(x, (len(x), -1)) for x in jtu.tree_leaves(prob.changes))
        return {"changes": jnp.concatenate(list(leaves), axis=1)}
    if isinstance(prob.noise, WienerProcess) and prob.noise.factor is not None:
        return {"factor": prob.noise.factor}
    if isinstance(prob.noise, NoiseGrid):
        named = {"t": prob.noise.t, "W": prob.noise.W, "Z": prob.noise.Z}
        return {name: x for name, x in named.items() if x is not None}
    return {}


def noise_of(
    prob: SDEProblem | JumpProblem, u0: PyTree, tree: StateTree | None, diffusion: Program
) -> tuple[str, tuple[int, ...]]:
    """The kind and the shape of the noise.

    **Raises:** `TypeError` or `ValueError` where `g`, `noise_rate_prototype` or `noise` have other
    structures, shapes or dtypes than the problem needs.
    """
    if isinstance(prob, JumpProblem):
        return _jumps(prob, diffusion)
    prototype, given = prob.noise_rate_prototype, numbers_of(prob)
    shape = u0.shape if tree is None else (tree.size,)
    kind = "scalar" if getattr(prob.noise, "scalar", False) else "diagonal"
    of_state = jtu.tree_structure(0) if tree is None else tree.structure
    shapes = [shape] if tree is None else list(tree.shapes)
    noise: tuple[int, ...] = () if kind == "scalar" else shape
    if prototype is not None:
        kind, leaves = "general", jtu.tree_leaves(prototype)
        sizes = {np.shape(x)[-1] if np.ndim(x) else 0 for x in leaves}
        before = [np.shape(x)[:-1] for x in leaves]
        if jtu.tree_structure(prototype) != of_state or before != shapes or len(sizes) != 1:
            raise ValueError(
                "noise_rate_prototype must be like u0, with one more axis, [*state, m], for m "
                f"noises; it has the shapes {jax.tree.map(np.shape, prototype)}, and u0 "
                f"{jax.tree.map(np.shape, prob.u0)}."
            )
        noise = (sizes.pop(),)
        shapes = [(*x, *noise) for x in shapes]
    if kind == "diagonal" and "W" in given:
        # A path without axes is that of a scalar noise.
        kind, noise = ("scalar", ()) if given["W"].ndim == 1 and shape != () else (kind, noise)
    _check_diffusion(diffusion, of_state, shapes, u0.dtype)
    if "W" in given and given["W"].shape[1:] != noise:
        raise ValueError(
            f"W of NoiseGrid has the shape {given['W'].shape}; here it must be "
            f"{('grid', *noise)}, as the noise is {kind}."
        )
    if "W" in given:
        _check_cover(given["t"], prob.tspan)
    if "factor" in given and given["factor"].shape[0] != math.prod(noise):
        raise ValueError(
            f"factor of WienerProcess has the shape {given['factor'].shape}, and there are "
            f"{math.prod(noise)} noises."
        )
    return kind, noise


def _jumps(prob: JumpProblem, rates: Program) -> tuple[str, tuple[int, ...]]:
    """The kind and the shape of the noise of reactions.

    **Raises:** `TypeError` or `ValueError` for rates of another shape or dtype, and for those that
    change with the time.
    """
    count = len(jtu.tree_leaves(prob.changes)[0])
    dtype = jtu.tree_leaves(prob.u0)[0].dtype
    outs = [(x.shape, x.dtype) for x in rates.out_avals]
    if rates.out_tree != jtu.tree_structure(0) or outs[0][0] != (count,):
        raise ValueError(
            f"rates must return an array of the shape {(count,)}, a rate for each of the reactions "
            f"in changes; it returned {rates.out_tree} of {[x for x, _ in outs]}."
        )
    if outs[0][1] != dtype:
        raise TypeError(
            f"rates must return the dtype of the state u, {dtype}; it returned {outs[0][1]}: write "
            "out.astype(u.dtype) for the out that it returns."
        )
    only_time = [False] * (len(rates.jaxpr.invars) - 1) + [True]
    if any(rates.depends_on(only_time)):
        raise ValueError(
            "rates depend on the time t, and a JumpProblem has those that change from reaction to "
            "reaction only: change p where they change, by a PresetTimeCallback or a "
            "PeriodicCallback, or solve prob.langevin()."
        )
    return JUMPS, ()


def check_stochastic(prob: SDEProblem | JumpProblem, dtype: DTypeLike) -> None:
    """**Raises:** `ValueError` for what a stochastic problem can't have."""
    state, name = jax.tree.leaves(prob.u0)[0], type(prob).__name__
    if state.dtype != dtype:
        raise ValueError(f"the state of an {name} must be real, and u0 is {state.dtype}.")
    if getattr(prob.f, "mass_matrix", None) is not None:
        raise ValueError("f of an SDEProblem has no mass_matrix: multiply by its inverse.")
    t0, t1 = prob.tspan
    # (Where this is traced, arrays would be compared in the program.)
    if not is_tracer(t0) and not is_tracer(t1) and float(t1) < float(t0):
        raise ValueError(
            f"tspan of an {name} must run forwards, got ({t0}, {t1}): noise has no past."
        )


def _check_cover(times: Any, tspan: tuple) -> None:
    """**Raises:** `ValueError` for known times that don't cover a known time span."""
    if any(map(is_tracer, (times, *tspan))):
        return
    first, last = np.asarray(times)[[0, -1]].tolist()
    t0, t1 = map(float, tspan)
    near = 1e-6 * (t1 - t0)
    if first > t0 + near or last < t1 - near:
        raise ValueError(
            f"t of NoiseGrid goes from {first:g} to {last:g}; it must cover tspan, from {t0:g} to "
            f"{t1:g}."
        )


def _check_diffusion(program: Program, structure: Any, shapes: Sequence, dtype: DTypeLike) -> None:
    if program.out_tree != structure:
        raise TypeError(
            f"g must return the structure of the state u, {structure}; it returned "
            f"{program.out_tree}."
        )
    for x, shape in zip(program.out_avals, shapes, strict=True):
        if x.shape != shape:
            hint = ""
            if x.shape == ():
                hint = " Of a number, make such an array: jnp.full_like(u, 0.1)."
            if x.shape[: len(shape)] == shape and len(x.shape) == len(shape) + 1:
                hint = " For a matrix of noises, give noise_rate_prototype=jnp.zeros((n, m))."
            raise ValueError(
                f"g must return an array of the shape {shape}; it returned {x.shape}.{hint}"
            )
        if x.dtype != dtype:
            raise TypeError(
                f"g must return the dtype of the state u, {dtype}; it returned {x.dtype}: write "
                "out.astype(u.dtype) for the out that it returns."
            )


def method_for(alg: Any, noise: NoiseTerms | None) -> Any:
    """The method `alg`; where it is None, the default one for this noise, or for an ODE.

    **Raises:** `ValueError` for a method that isn't for this noise, or for no noise.
    """
    if noise is None:
        alg = Tsit5() if alg is None else alg
        if isinstance(alg, SDESolver | Direct):
            problem = "JumpProblem" if isinstance(alg, Direct) else "SDEProblem"
            raise ValueError(
                f"{type(alg).__name__} is for an eo.{problem}, and this is an ODEProblem: "
                "give such a problem, or a method for ODEs, as eo.Tsit5()."
            )
        if isinstance(alg, JuliaAlg) and is_stochastic(alg.description):
            raise ValueError(
                f"{alg.text} is for an eo.SDEProblem, and this is an ODEProblem: give such a "
                "problem, or a method for ODEs, as eo.Tsit5()."
            )
        return alg
    if noise.kind == JUMPS:
        if not isinstance(alg, Direct | None):
            raise ValueError(
                f"{type(alg).__name__} isn't for a JumpProblem: leave alg out, or pass eo.Direct()."
            )
        return Direct()
    if alg is None:
        alg = _default_method(noise)
    wrong = _not_for(alg, noise)
    if wrong is not None:
        raise ValueError(wrong)
    return alg


def _default_method(noise: NoiseTerms) -> SDESolver:
    if noise.is_additive:
        return SOSRA()
    return EM() if noise.kind == "general" or noise.is_correlated else SOSRI()


def _not_for(alg: Any, noise: NoiseTerms) -> str | None:
    """Why a method isn't for this noise; None where it is."""
    name = type(alg).__name__
    if is_of_diffrax(alg):
        return (
            "Euler of diffrax is eo.EM(split=False) here: pass that." if name == "Euler" else None
        )
    if isinstance(alg, Direct):
        return "Direct is for an eo.JumpProblem, and this is an SDEProblem: leave alg out."
    needs = _needs_of(alg)
    if needs is None:
        return (
            f"{name} is for ODEs, and this is an SDEProblem: leave alg out, or pass eo.SOSRI() "
            "(diagonal or scalar noise), eo.SOSRA() (additive), or eo.EM() (any)."
        )
    name = needs.name
    if noise.kind not in needs.kinds:
        return (
            f"{name} is for {' or '.join(needs.kinds)} noise, and this one is {noise.kind}: pass "
            "eo.EM(), or eo.EulerHeun() (Stratonovich)."
        )
    if noise.is_correlated and needs.independent:
        return f"{name} is for independent noises, and WienerProcess has a factor: pass eo.EM()."
    if needs.additive and not noise.is_additive:
        return (
            f"{name} is for additive noise, and g depends on the state u: pass eo.SOSRI(), or "
            "eo.EM()."
        )
    if needs.draws > 1 and "W" in noise.given and "Z" not in noise.given:
        return (
            f"{name} uses a second process: NoiseGrid needs Z, too (sol.Z of a solve with "
            "save_noise=True)."
        )
    return None


class _NeedsOfMethod(NamedTuple):
    """Which noise a method is for.

    - `kinds`: its kinds; `additive`: whether it has to be additive; `independent`: whether its
        components have to be independent.
    - `draws`: how many processes the method draws.
    """

    name: str
    kinds: tuple[str, ...]
    additive: bool
    independent: bool
    draws: int


def _needs_of(alg: object) -> _NeedsOfMethod | None:
    """Which noise a method is for; None for a method that is for none."""
    if isinstance(alg, SDESolver):
        independent = alg.order > 0.5 and not alg.additive
        name = type(alg).__name__
        return _NeedsOfMethod(name, alg.noises, alg.additive, independent, alg.draws)
    if not isinstance(alg, JuliaAlg) or not is_stochastic(alg.description):
        return None
    name = alg.description.name
    additive = "SRA" in name  # SRA1, SOSRA and their kind
    independent = not additive and name not in OF_EULER
    kinds = SDESolver.noises[:2] if independent else SDESolver.noises
    return _NeedsOfMethod(f"JuliaAlg({name})", kinds, additive, independent, draws(alg.description))


def is_of_diffrax(alg: Any) -> bool:
    """Whether this is a method of diffrax for stochastic equations."""
    if not type(alg).__module__.startswith("diffrax"):
        return False
    import diffrax  # imported here, as it takes long, and is mostly not needed

    return isinstance(alg, diffrax.AbstractItoSolver | diffrax.AbstractStratonovichSolver)


def is_adaptive(alg: Any, wanted: bool | None, has_dt: bool) -> bool:
    """Whether the steps of a method adapt to the tolerances: as is `wanted`; or else, if the method
    has error estimates and no size of steps is given."""
    return alg.adaptive and not has_dt if wanted is None else bool(wanted)
