"""From the problem that `prob_func` returns for a trajectory to its numbers and the traced `f`."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PyTree

from ..ground.devices.alone import without_mesh
from ..ground.keys import words_of
from ..ground.state_tree import check_tolerance_shape, StateTree, tree_of
from ..jumps.callback_tracing import Tracing
from ..jumps.consistent_start import with_equations_after_jumps
from ..plan.checked_reads import check_new_parameters, check_reads
from ..plan.events import TracedCallbacks
from ..plan.extended_state import Extension, integrals_of, with_integrand
from ..plan.given import GivenInputs
from ..plan.implicit_form import check_jacobian, ImplicitForm, product_of, with_constants_around
from ..plan.known_times import before_jumps, in_order, own_times, scheduled
from ..plan.noise import check_stochastic, noise_of, NoiseTerms, numbers_of
from ..plan.real_numbers import with_real_numbers
from ..plan.saved_components import saved_components
from ..plan.saving import resolve_saving
from ..plan.trajectory_numbers import Trajectories, TrajectoryNumbers
from ..problem.callbacks import all_of
from ..problem.initialization import BrownFullBasicInit
from ..problem.jump_problem import JumpProblem
from ..problem.number_table import NumberRow, NUMBERS, of_kind
from ..problem.ode_function import in_order_of, mass_of, ODEFunction, prototype_of, singular_mass_of
from ..problem.options import holds_tolerances, resolve, STATIC_OPTIONS, time_dtype_of
from ..problem.problem import EnsembleContext, EnsembleProblem, ODEProblem
from ..problem.saving_callback import check_saving_function, saving_among, SavingCallback
from ..problem.stochastic import SDEProblem
from ..tracing.field_errors import check_signature, explain, is_whole, NeedsNumber
from ..tracing.program import is_inexact, is_tracer, Program, Static, structs_of, trace
from ..tracing.purity import check_once, contents, is_known, numbers_in


_CONSTANTS = of_kind("constants")
_TOLERANCES = of_kind("tolerance")
# The default tolerances of stochastic problems, as in StochasticDiffEq.
_TOLERANCES_OF_PATHS = {"abstol": 1e-2, "reltol": 1e-2}
_STOPS = of_kind("stops")


class TrajectoryMaker:
    """Makes the numbers from the problem of one trajectory, and keeps the static parts of that
    problem."""

    def __init__(
        self, ens: EnsembleProblem, solve_options: dict, n: int | None, *, concrete: bool = False
    ):
        self.n = n
        self.ens = ens
        self.solve_options = solve_options
        self.concrete = concrete
        self.kept: dict[str, Any] = {}
        self.options: dict[str, Any] = {}
        # By the name of each program: what was traced last, and the trace.
        self._traced: dict[str, tuple] = {}
        self.programs: dict[str, Program] = {}
        # These, and those that become a part of another one, or belong to a callback.
        self._readers: dict[str, Program] = {}
        self.extension: Extension | None = None
        self.events: TracedCallbacks | None = None
        self.form: ImplicitForm | None = None
        self.noise: NoiseTerms | None = None
        # The numbers of 32 bits that the noise of the trajectory is drawn with.
        self.noise_key: tuple = ()
        self.saving_callback: SavingCallback | None = None
        # The structure of the numbers in p, and p without these numbers.
        self.parameters: tuple[Any, Any] = (None, None)
        # Whether f needs the values of integers in p to be known while tracing.
        self.fixes_whole = False

    def __call__(self, index: ArrayLike, repeat: ArrayLike, key: Array) -> TrajectoryNumbers:
        ctx = EnsembleContext(index, repeat, key)
        prob = self.ens.make(ctx)
        if isinstance(prob, SDEProblem | JumpProblem):
            run = (jnp.asarray(x).astype(jnp.uint32) for x in (index, repeat))
            self.noise_key = words_of(key), *run
        if self.fixes_whole or not any(map(is_whole, jtu.tree_leaves(prob.p))):
            return self._lane(prob, index)
        kept = dict(self.kept)  # Integers are constants only where f needs to know them.
        try:
            return self._lane(prob, index)
        except NeedsNumber:
            self.kept, self.fixes_whole = kept, True
            return self._lane(prob, index)

    def _is_number(self, x: Any) -> bool:
        """Whether a leaf of p is traced."""
        is_numeric = eqx.is_array_like(x) and not isinstance(x, str)
        return is_numeric and not (self.fixes_whole and is_whole(x))

    def _lane(self, prob: ODEProblem, index: Any) -> TrajectoryNumbers:
        tree = tree_of(prob.u0, prob._order)
        given = prob.options, self.solve_options
        if isinstance(prob, SDEProblem):
            given = {**_TOLERANCES_OF_PATHS, **prob.options}, self.solve_options
        if tree is not None:
            given = [_with_tolerances(options, tree) for options in given]
        options = resolve(*given)
        u0: Any = prob.u0 if tree is None else tree.ravel(prob.u0)
        options["save_idxs"] = saved_components(options["save_idxs"], u0, tree)
        dtype = time_dtype_of(u0)
        numeric, others = eqx.partition(prob.p, self._is_number)
        p = tuple(jtu.tree_leaves(numeric))
        self.parameters = jtu.tree_structure(numeric), others
        types = tuple((np.shape(x), getattr(x, "dtype", type(x))) for x in p)
        self._keep("tree", tree, "the structure or the shapes of u0", index)
        self._keep("u0", (u0.shape, u0.dtype), "the shape or dtype of u0", index)
        self._keep("p", types, "the shapes or dtypes in p", index)
        for name in ("saveat", *(row.option for row in _STOPS)):
            _check_rows(name, options[name], self.n)
        saving, times = resolve_saving(options, *prob.tspan, dtype, index, defer=self.concrete)
        fill = "Where only the numbers of times differ, fill shorter rows up with jnp.inf."
        self._keep("saving", saving, "which times are saved", index, fill)
        self.options = {k: options[k] for k in (*STATIC_OPTIONS, "maxiters_given")}
        self._keep("options", Static(self.options), "the solver options", index)
        numbers = {"u0": u0, "p": p, "saveat": times, "count": None, "stop": None}
        for row in _CONSTANTS:
            if row.option == "callback":
                continue
            fn = field_of(prob) if row.option == "f" else options[row.option]
            numbers[row.name] = self._trace(row.option, fn, prob, p, types, dtype, index)
        t0, t1 = numbers["t0"], numbers["t1"] = [_as_real(t, dtype) for t in prob.tspan]
        callback, jumps = options["callback"], own_times(options["d_discontinuities"], dtype, index)
        mass = None
        if isinstance(options["initializealg"], BrownFullBasicInit):
            mass = singular_mass_of(prob.f, u0.shape, tree)
        if mass is not None and jumps is not None:
            callback = with_equations_after_jumps(callback, jumps, t0)
        known = [before_jumps(x, jumps, t0, t1) for x in scheduled(callback, t0, t1, dtype)]
        numbers["callback_consts"] = self._trace_callbacks(
            callback, known, prob, u0, tree, types, t0, mass, index
        )
        self._trace_saving(callback, prob, p, types, dtype, index)
        for row in _STOPS:
            more = known if row.name == "tstops" else ()
            times = in_order(row, options[row.option], more, t0, t1, dtype, index)
            what = f"how many times there are in {row.option} (fill up with inf)"
            self._keep(row.name, np.shape(times), what, index)
            numbers[row.name] = times
        for row in NUMBERS:
            if row.name not in numbers:
                numbers[row.name] = _as_given(row, options, u0.shape, dtype)
        lane = TrajectoryNumbers(**numbers)
        traced = prob, p, types, dtype, index
        if isinstance(prob, SDEProblem | JumpProblem):
            lane = self._noisy(lane, tree, *traced)
        elif self.options["save_noise"]:
            raise ValueError("save_noise=True is for an SDEProblem, and this problem has no noise.")
        elif isinstance(prob.f, ODEFunction):
            more = self._trace("jac", prob.f.jac, prob, p, types, dtype, index)
            lane = self._formed(lane, prob.f, tree, more)
        self._keep(
            "form", self.form, "what is known of f: mass_matrix, jac or jac_prototype", index
        )
        if prob.integrand is not None and self.noise is None:
            more = self._trace("integrand", prob.integrand, prob, p, types, dtype, index)
            lane = self._extended(lane, tree, more)
        self._keep("extension", self.extension, "the integrand", index)
        if prob.f is self.ens.prob.f:
            check_new_parameters(prob.p, self.ens.prob.p, self._is_number, self._readers.values())
        return lane

    def _formed(
        self, lane: TrajectoryNumbers, f: ODEFunction, tree: StateTree | None, more: tuple
    ) -> TrajectoryNumbers:
        """The numbers of a trajectory, with the constants `more` of `jac` after those of the
        field."""
        field, jac = self.programs["f"], self.programs.pop("jac", None)
        (state,) = field.out_avals
        size = state.size if tree is None else tree.components
        order = np.arange(size) if tree is None else tree.written()
        mask, mass = prototype_of(f, size), mass_of(f, state.shape, tree)
        if jac is not None:
            check_jacobian(jac, size, state.dtype if tree is None else tree.dtype)
        if jac is None and mask is None and mass is None:
            return lane
        product = None
        if jac is not None or mask is not None:
            mask = None if mask is None else in_order_of(mask, order)
            if mask is not None and tree is not None and tree.is_complex:
                mask = np.block([[mask, mask], [mask, mask]])
            places = None if mask is None else tuple(mask.ravel().tolist())
            written = None if tree is None else tuple(order.tolist())
            product = product_of(field, jac, places, written)
        self.form = ImplicitForm(product, mass)
        if jac is not None:
            avals: list = [v.aval for v in jac.jaxpr.constvars]
            numbers = tuple((x.shape, x.dtype) for x in avals)
            self.programs["f"] = with_constants_around(field, (), numbers)
        return lane._replace(consts=(*lane.consts, *more))

    def _noisy(self, lane, tree, prob, p, types, dtype, index) -> TrajectoryNumbers:
        """The numbers of a trajectory of a stochastic problem, with the constants of its further
        programs, its key, and the numbers of its noise after those of the drift."""
        check_stochastic(prob, dtype)
        names = ("rates" if isinstance(prob, JumpProblem) else "g", "integrand")
        more = [
            self._trace(name, getattr(prob, name), prob, p, types, dtype, index) for name in names
        ]
        drift, diffusion = self.programs["f"], self.programs.pop(names[0])
        integrand = self.programs.pop("integrand", None)
        kind, shape = noise_of(prob, drift.out_avals[0], tree, diffusion)
        numbers = numbers_of(prob)
        about = *self.noise_key, lane.t1 - lane.t0
        groups = [lane.consts, *more, (*about, *numbers.values())]
        avals = [[(np.shape(x), jnp.result_type(x)) for x in group] for group in groups]

        def with_others(program: Program, i: int) -> Program:
            before, after = itertools.chain(*avals[:i]), itertools.chain(*avals[i + 1 :])
            return with_constants_around(program, tuple(before), tuple(after))

        self.noise = NoiseTerms(
            diffusion=with_others(diffusion, 1),
            integrand=integrand and with_others(integrand, 2),
            kind=kind,
            shape=shape,
            tree=tree,
            given=tuple(numbers),
            kept=bool(self.options["save_noise"]),
            first=sum(map(len, avals[:3])),
        )
        self.programs["f"] = with_others(drift, 0)
        self._keep("noise", self.noise, "the kind or the shape of the noise", index)
        return lane._replace(consts=tuple(itertools.chain(*groups)))

    def _extended(
        self, lane: TrajectoryNumbers, tree: StateTree | None, more: tuple
    ) -> TrajectoryNumbers:
        """The numbers of a trajectory, with the integrals after the state, and with the constants
        `more` of the integrand."""
        field, integrand = self.programs["f"], self.programs.pop("integrand")
        (user,) = structs_of(field.jaxpr.outvars)
        self.extension = extension = Extension(user, integrals_of(integrand, user, tree))
        self.programs["f"] = with_integrand(field, integrand, extension)
        if self.form is not None:
            self.form = self.form.with_integrals(field, integrand, extension)
        tolerances = {x.name: extension.tolerance(getattr(lane, x.name)) for x in _TOLERANCES}
        u0, consts = extension.state(lane.u0), (*lane.consts, *more)
        return lane._replace(u0=u0, consts=consts, **tolerances)

    def _trace(self, name, fn, prob, p, types, dtype, index) -> tuple:
        others = [x for x in jtu.tree_leaves(prob.p) if not self._is_number(x)]
        same = (fn, jtu.tree_structure(prob.p), types, *others)
        before, (program, consts) = self._traced.get(name, ((), (None, ())))
        if fn is None:
            program, consts = None, ()
        elif not _identical(before, same):  # if identical, it is the program traced before
            with self._said_of_u0(prob, name):
                program, consts = trace_program(prob, name, fn, p, dtype, self._is_number)
        self._keep(name, program, f"the computation that {name} does", index)
        if program is not None:
            self.programs[name] = program
            self._readers[name] = program
        self._traced[name] = same, (program, consts)
        return consts

    @contextlib.contextmanager
    def _said_of_u0(self, prob: ODEProblem, name: str) -> Iterator[None]:
        """A context in which errors of a function say so if `u0` has another shape than the
        problem's."""
        try:
            yield
        except (TypeError, ValueError, IndexError) as e:
            before, after = (jax.tree.map(np.shape, x.u0) for x in (self.ens.prob, prob))
            if before == after or isinstance(e, NeedsNumber):
                raise
            kind = next(x for x in (TypeError, ValueError, IndexError) if isinstance(e, x))
            raise kind(
                f"prob_func changed u0 from {before} to {after}, and {name} can't take that: {e}"
            ) from e

    def _trace_callbacks(self, callback, known, prob, u0, tree, types, t0, mass, index) -> tuple:
        others = [x for x in jtu.tree_leaves(prob.p) if not self._is_number(x)]
        same = (callback, jtu.tree_structure(prob.p), types, prob.f, *known, *others)
        before, (events, consts) = self._traced.get("callback", ((), (None, ())))
        if all(isinstance(x, SavingCallback) for x in all_of(callback)):
            events, consts = None, ()
        elif not _identical(before, same):
            u = jax.ShapeDtypeStruct(u0.shape, u0.dtype)
            tracing = Tracing(u, tree, prob.p, self._is_number, t0, field_of(prob), mass)
            events = tracing.events(callback, known)
            consts = tuple(tracing.consts)
        self._keep("callback", events, "the computation that a callback does", index)
        self._traced["callback"] = same, (events, consts)
        self.events = events
        for i, part in enumerate(() if events is None else events.parts):
            self._readers[f"callback {i}"] = part.program
        return consts

    def _trace_saving(self, callback, prob, p, types, dtype, index) -> None:
        saving = self.saving_callback = saving_among(all_of(callback))
        fn = None if saving is None else saving.fn
        self._trace("fn", fn, prob, p, types, dtype, index)
        if saving is not None:
            values = self.programs.pop("fn").out_avals
            given = self.ens.prob.options.get("callback"), self.solve_options.get("callback")
            own = not any(saving is saving_among(all_of(x)) for x in given)
            changes = () if self.events is None else self.events.changes
            check_saving_function(saving.fn, values, of_prob_func=own, changes=changes)

    def trajectories(self, **fields: Any) -> Trajectories:
        """The ensemble with these fields, and with the static parts that this maker kept."""
        (_, field), *beside = self.programs.items()
        kept = {name: self.kept[name] for name in ("saving", "tree", "extension")}
        kept |= {"options": self.options, "beside": tuple(beside), "events": self.events}
        kept |= {"form": self.form, "noise": self.noise, "saving_callback": self.saving_callback}
        numbers, others = self.parameters
        of_state = kept["tree"], kept["extension"]
        given = GivenInputs(
            fields["lanes"], fields["batched"], *of_state, numbers, others, n=self.n or 1
        )
        return with_real_numbers(Trajectories(field=field, given=given, **kept, **fields))

    def again(self) -> "TrajectoryMaker":
        """A new maker of the same ensemble, to check whether it makes the same numbers."""
        maker = TrajectoryMaker(self.ens, self.solve_options, self.n)
        maker.fixes_whole = self.fixes_whole
        known = self._traced.items()
        maker._traced = {name: x for name, x in known if not any(map(is_tracer, x[1][1]))}
        return maker

    def static_numbers(self) -> tuple:
        """The static parts that it kept and that aren't among the leaves: shapes, and numbers that
        all trajectories share."""
        numbers = contents(list(filter(eqx.is_array_like, jtu.tree_leaves(self.options))))
        return self.kept["u0"], self.kept["p"], self.kept["saving"], numbers

    def _keep(
        self,
        name: str,
        value: Any,
        what: str,
        index: ArrayLike,
        remedy: str = "Solve one ensemble for each.",
    ) -> None:
        if self.kept.setdefault(name, value) != value:
            if isinstance(value, Program):
                remedy += f" (Where {name} differs in a number only, pass it in p.)"
            raise ValueError(
                f"prob_func varies {what} with the index (first at index {index}: {value}, before: "
                f"{self.kept[name]}); all trajectories of an ensemble must have the same. {remedy}"
            )


def _identical(a: tuple, b: tuple) -> bool:
    """Whether two traces of f would be the same. Objects are compared by identity."""
    return len(a) == len(b) and all(
        x is y or (i in (1, 2) and x == y) for i, (x, y) in enumerate(zip(a, b, strict=True))
    )


def _with_tolerances(options: dict, tree: StateTree) -> dict:
    """The options, with tolerances that are pytrees like the state turned into vectors."""
    names = [x.option for x in _TOLERANCES if options.get(x.option) is not None]
    return options | {k: tree.tolerance(k, options[k]) for k in names}


def _check_rows(name: str, times: Any, n: int | None) -> None:
    try:
        shape = np.shape(times)
    except (ValueError, TypeError):  # ragged, which is found later; or a list of traced times
        return
    if len(shape) == 2 and shape[0] and shape[0] != n:
        raise ValueError(
            f"{name} has the shape {shape}; two-dimensional, it must be [trajectory, time] with "
            f"{'an ensemble' if n is None else f'{n} trajectories'}."
        )


def field_of(prob: ODEProblem) -> Callable:
    """The vector field of a problem, as the user wrote it."""
    return prob.f.f if isinstance(prob.f, ODEFunction) else prob.f


def trace_program(
    prob: ODEProblem, name: str, fn: Callable, p: tuple, dtype: np.dtype, is_number: Callable
) -> tuple[Program, tuple]:
    """Trace `fn(u, p, t)`, a function of a problem that users call `name`. For `f`, check what it
    returns. `p` are the leaves of the parameters that are traced, for which `is_number` is true.

    **Raises:** `TypeError` or `ValueError` when `f` returns another structure, shape or dtype than
    the state's.
    """
    is_field = name == "f"
    numeric, static = eqx.partition(prob.p, is_number)
    structure = jtu.tree_structure(numeric)
    tree = tree_of(prob.u0, prob._order)

    def of_arrays(u, p, t):
        p = eqx.combine(jtu.tree_unflatten(structure, p), static)
        out = fn(u if tree is None else tree.unravel(u), p, t)
        if tree is None or not is_field:
            return out
        if tree.order is None:
            _check_rate(jax.eval_shape(lambda: out), prob.u0)
        return tree.derivative(out)

    if tree is None:
        u = jax.ShapeDtypeStruct(prob.u0.shape, prob.u0.dtype)
    else:
        u = jax.ShapeDtypeStruct((tree.size,), np.finfo(tree.dtype).dtype)
    t = jax.ShapeDtypeStruct((), dtype)
    if not is_known(fn):
        check_signature(fn, name)
    try:
        program, consts = trace(of_arrays, u, p, t, rules=True)
    except Exception as e:
        paths = [(k, x) for k, x in jtu.tree_leaves_with_path(prob.p) if is_number(x)]
        explained = explain(e, prob.u0, prob.p, paths) if is_field else e
        if explained is e:
            raise
        raise explained from e
    check_reads(name, program, consts)
    check_once(
        fn,
        lambda: numbers_in(program, consts) == numbers_in(*trace(of_arrays, u, p, t)),
        f"{name} gives another value each time it is called with the same u, p and t (by random "
        "numbers of NumPy or Python, or the clock). It is traced once, and they would be drawn "
        "once for the whole solve: draw them before, and pass them in p (in prob_func by "
        "jax.random with ctx.key).",
    )
    if is_field and tree is None:
        _check_rate(jtu.tree_unflatten(program.out_tree, program.out_avals), u)
    return without_mesh(program), tuple(consts)


def _check_rate(out: Any, u: PyTree) -> None:
    """**Raises:** `TypeError` or `ValueError` for what `f` returned, where that isn't like a state
    `u` that is an array."""
    structure = jtu.tree_structure(out)
    if structure != jtu.tree_structure(0):
        hint = "Use jnp.array([...]) or jnp.stack on its parts."
        if structure == jtu.tree_structure(None):
            hint = "Is a `return` missing? " + hint
        raise TypeError(
            f"f must return one array of shape {u.shape}; it returned the structure "
            f"{structure}. {hint}"
        )
    if out.shape != u.shape:
        hint = "It is called as f(u, p, t)."
        if u.shape == ():
            hint = "u0 is a number: write u0=[1.0] or jnp.array([1.0]) for a vector of one."
        raise ValueError(
            f"f must return an array of the shape of the state u, {u.shape}; it returned the shape "
            f"{out.shape}. ({hint})"
        )
    if out.dtype != u.dtype:
        remedy = "write out.astype(u.dtype) for the out that it returns"
        if is_inexact(out):
            remedy = f"give u0 that dtype (u0.astype('{out.dtype}')), or cast inside f"
        raise TypeError(
            f"f must return the dtype of the state u, {u.dtype}; it returned {out.dtype}: {remedy} "
            "(parameters and constants of another precision or kind are the usual cause)."
        )


def _as_given(
    row: NumberRow, options: dict[str, Any], shape: tuple, dtype: np.dtype
) -> Array | np.ndarray | None:
    """The numbers of an option, in the form that the user gave."""
    value = options[row.option]
    if row.kind == "tolerance":
        if holds_tolerances(options["stepsize_controller"]):
            return None
        check_tolerance_shape(row.option, value, shape)
    return None if value is None else _as_real(value, row.dtype or dtype)


def _as_real(x: PyTree, dtype: DTypeLike) -> Array | np.ndarray:
    # (Converted by NumPy, a concrete number stays concrete inside of a trace.)
    return x.astype(dtype) if is_tracer(x) else np.asarray(x, dtype)
