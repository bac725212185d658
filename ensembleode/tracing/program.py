"""A Python function as a hashable program plus the arrays that it closes over.

`jax.jit` caches by the identity of the function, so a fresh lambda compiles again and an
array it closes over is baked into the compiled code. [`trace`][ensembleode.tracing.program.trace]
removes both: the function becomes a jaxpr that compares equal to every other trace of the
same computation, and its closed-over arrays become inputs. A `Program` is therefore a good
static argument of a jitted function: new numbers never compile, and are never stale.
"""

import functools
import hashlib
import inspect
import itertools
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn
from jaxtyping import PyTree

from .dependence import deciding, depending
from .evaluation import closes_over_arrays, equations, evaluated, inlined
from .reductions import reduced, reduces


_CUSTOM_RULES = ("custom_jvp_call", "custom_vjp_call")
# The exceptions of Python code that can't be traced.
NOT_TRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
RULE_PARAMS = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees")


class Program:
    """A traced function: call it as `program(consts, *args)`.

    Two programs are equal, and hash equally, when they compute the same thing on inputs of
    the same shapes and dtypes, whatever functions they were traced from.
    """

    __slots__ = ("__weakref__", "_hash", "_key", "jaxpr", "out_avals", "out_tree")

    def __init__(self, jaxpr: jex.Jaxpr, out_tree: Any, key: tuple):
        self.jaxpr = jaxpr
        self.out_tree = out_tree
        self.out_avals: tuple = tuple(v.aval for v in jaxpr.outvars)
        self._key = (key, out_tree)
        self._hash = hash(self._key)

    def __call__(self, consts: Sequence, *args: Any) -> Any:
        out = jax.core.eval_jaxpr(self.jaxpr, consts, *jtu.tree_leaves(args))
        return jtu.tree_unflatten(self.out_tree, out)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self._key == other._key

    def __repr__(self) -> str:
        return f"Program({len(self.jaxpr.eqns)} equations, {len(self.jaxpr.constvars)} constants)"

    def depends_on(self, inputs: Sequence[bool]) -> list[bool]:
        """Which flat outputs depend on those flat inputs that are marked True."""
        return depending(self.jaxpr, [*[False] * len(self.jaxpr.constvars), *inputs])

    def deciding(self) -> list[bool]:
        """Which flat inputs, constants first, decide what is computed: those on which a predicate
        of `lax.cond`, a `while` loop or an index depends."""
        count = len(self.jaxpr.constvars) + len(self.jaxpr.invars)
        _, found = deciding(self.jaxpr, [1 << i for i in range(count)])
        return [bool(found >> i & 1) for i in range(count)]


def trace(fn: Callable, *args: Any, rules: bool = False) -> tuple[Program, list]:
    """The program of `fn(*args)`, and the list of its constants: the arrays that `fn` closes over.

    `args` are examples: arrays, tracers, Python numbers or `ShapeDtypeStruct`s. With `rules`, two
    programs are equal only if the derivative rules of the `jax.custom_jvp` and `jax.custom_vjp`
    functions that they call are, too. A program that will be differentiated needs this.
    """
    failed = []

    # A fresh function each time: make_jaxpr caches by identity, and what a function closes
    # over may have been rebound since the last call.
    def called(*a):  # the name `a` is used in JAX's error messages
        try:
            return fn(*a)
        except NOT_TRACEABLE as e:
            failed.append(e)  # JAX would take milliseconds to shorten its traceback

    closed, out_shape = jax.make_jaxpr(called, return_shape=True)(*args)
    if failed:
        raise failed.pop()  # so that no reference cycle keeps the error's objects alive
    if any(map(closes_over_arrays, closed.jaxpr.eqns)):
        # An inner jit of the user's closed over arrays: inlining it turns these into inputs.
        inline = functools.partial(evaluated, closed, instead=inlined)
        closed = jax.make_jaxpr(lambda *a: inline(*jtu.tree_leaves(a)))(*args)
    if reduces(closed):
        with_starts = closed
        closed = jax.make_jaxpr(lambda *a: reduced(with_starts, *jtu.tree_leaves(a)))(*args)
    # Constants have no values, since a program would keep the values alive.
    jaxpr = with_constants(closed.jaxpr, closed.jaxpr.constvars, closed.jaxpr.invars)
    return program_of(jaxpr, jtu.tree_structure(out_shape), rules), list(closed.consts)


def program_of(jaxpr: jex.Jaxpr, out_tree: Any, rules: bool) -> Program:
    """The program of a jaxpr. **Arguments:** `rules`: see `trace`."""
    key = _jaxpr_key(jaxpr)
    return Program(jaxpr, out_tree, (key, _rules_key(jaxpr)) if rules else key)


# Since JAX 0.11, the constants of a jaxpr are stored with their values.
_CONSTANTS_HAVE_VALUES = "consts" in inspect.signature(jex.Jaxpr).parameters


def with_constants(jaxpr: Jaxpr, constants: Sequence, inputs: Sequence) -> jex.Jaxpr:
    """The same computation, with some of its variables as constants (without their values), and
    others as inputs."""
    values: Any = {"consts": [None] * len(constants)} if _CONSTANTS_HAVE_VALUES else {}
    return jaxpr.replace(constvars=constants, invars=inputs, **values)


class Static:
    """A Python object (often a pytree with numbers in it) as a hashable static argument."""

    __slots__ = ("_key", "value")

    def __init__(self, value: Any):
        leaves, structure = jtu.tree_flatten(value)
        if any(is_tracer(x) for x in leaves):
            raise TypeError(f"{value} holds a traced value; it must be made of Python numbers.")
        self.value = value
        self._key = (structure, tuple(_value_key(x) for x in leaves))

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._key == other._key

    def __repr__(self) -> str:
        return f"Static({self.value})"


def is_tracer(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def being_staged() -> bool:
    """Whether we are inside a `jax.jit` (where even constants become tracers)."""
    return is_tracer(jax.device_put(np.float32(0)))  # this compiles nothing


#
# Equality
#


class _Identity:
    """A hashable stand-in for an unhashable object, compared by identity. It keeps the object
    alive, so that no other object gets its id."""

    __slots__ = ("obj",)

    def __init__(self, obj):
        self.obj = obj

    def __hash__(self):
        return id(self.obj)

    def __eq__(self, other):
        return isinstance(other, _Identity) and self.obj is other.obj


def _jaxpr_key(jaxpr: jex.Jaxpr) -> tuple:
    numbers: dict = {}
    binders = tuple((_number(v, numbers), v.aval) for v in [*jaxpr.constvars, *jaxpr.invars])
    eqns = tuple(_equation_key(eqn, numbers) for eqn in jaxpr.eqns)
    return len(jaxpr.constvars), binders, eqns, tuple(_atom_key(x, numbers) for x in jaxpr.outvars)


def _number(var: Any, numbers: dict) -> int:
    """The number of a variable, which is the next one for a new variable."""
    return numbers.setdefault(var, len(numbers))


def _atom_key(x: Any, numbers: dict) -> PyTree:
    is_literal = isinstance(x, jex.Literal)
    return ("lit", x.aval, _array_key(x.val)) if is_literal else _number(x, numbers)


def _equation_key(eqn: JaxprEqn, numbers: dict) -> tuple:
    custom = eqn.primitive.name in _CUSTOM_RULES
    named = custom or eqn.primitive.name in ("jit", "remat", "checkpoint")
    params = tuple(
        (k, _value_key(v))
        for k, v in sorted(eqn.params.items())
        if not (k == "name" and named) and not (custom and k in RULE_PARAMS)
    )
    ins = tuple(_atom_key(x, numbers) for x in eqn.invars)
    outs = tuple((_number(v, numbers), v.aval) for v in eqn.outvars)
    return eqn.primitive, ins, outs, params


_OF_RESULTS = ("treedef_out", "static_out")


def _value_key(value: Any) -> Any:
    if isinstance(value, jex.ClosedJaxpr):
        return _jaxpr_key(value.jaxpr), tuple(_array_key(c) for c in value.consts)
    if isinstance(value, jex.Jaxpr):
        return _jaxpr_key(value)
    if isinstance(value, tuple | list):
        return type(value), tuple(_value_key(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _value_key(v)) for k, v in sorted(value.items()))
    if isinstance(value, np.ndarray | jax.Array) and not is_tracer(value):
        return _array_key(value)
    if isinstance(value, functools.partial):
        return functools.partial, _value_key((value.func, value.args, value.keywords))
    if isinstance(value, jtu.PyTreeDef):
        # (Has jaxprs in it where Equinox passes a function to a primitive.)
        structure: Any = value
        return _value_key(structure.node_data()), *map(_value_key, structure.children())
    if all(hasattr(value, name) for name in _OF_RESULTS):
        # The structure of the results of Equinox's primitives (a linear solve, in root finders):
        # each trace makes its own, which is compared by identity.
        leaves, structure = jtu.tree_flatten([getattr(value, name) for name in _OF_RESULTS])
        return structure, tuple(map(_value_key, leaves))
    try:
        hash(value)
    except TypeError:
        return _Identity(value)
    # 1 == 1.0 == True in Python, but these are different constants in a program.
    return type(value), value


def _array_key(value: Any) -> tuple:
    if is_tracer(value):
        raise TypeError(
            "the derivative rule of a custom_jvp or custom_vjp function closes over a value that "
            "an outer jit, grad or vmap traces, which JAX can't follow there: make it an argument "
            f"of the function. (It is a {value.aval.str_short()}.)"
        )
    array = np.asarray(value)
    data = array.tobytes()
    if len(data) > 64:
        data = hashlib.sha256(data).digest()
    return array.dtype, array.shape, data


def custom_calls(jaxpr: jex.Jaxpr) -> Iterator:
    """The equations that call functions with their own derivative rules, at any depth."""
    return (eqn for eqn in equations(jaxpr) if eqn.primitive.name in _CUSTOM_RULES)


def tangents_of(eqn: JaxprEqn) -> jex.ClosedJaxpr:
    """The forward-mode derivative rule of a call, as a jaxpr. Raises what the rule raises."""

    def pushed(args, tangents):
        return jax.jvp(*_of_inexact(eqn, args), tuple(tangents))

    args = structs_of(eqn.invars)
    return jax.make_jaxpr(pushed)(args, list(filter(is_inexact, args)))


def _cotangents_of(eqn: JaxprEqn) -> jex.ClosedJaxpr:
    """The reverse-mode derivative rule of a call, as a jaxpr. Raises what the rule raises."""

    def pullback(args, cotangents):
        call, diff = _of_inexact(eqn, args)
        return jax.vjp(lambda *xs: list(filter(is_inexact, call(*xs))), *diff)[1](cotangents)

    cotangents = list(filter(is_inexact, structs_of(eqn.outvars)))
    return jax.make_jaxpr(pullback)(structs_of(eqn.invars), cotangents)


def _of_inexact(eqn: JaxprEqn, args: Sequence) -> tuple[Callable, tuple]:
    """A call as a function of its real or complex arguments, the ones that have tangents; and these
    arguments."""

    def call(*inexact):
        rest = iter(inexact)
        every = [next(rest) if is_inexact(x) else x for x in args]
        return eqn.primitive.bind(*every, **eqn.primitive.get_bind_params(eqn.params))

    return call, tuple(filter(is_inexact, args))


def structs_of(variables: Sequence) -> list[jax.ShapeDtypeStruct]:
    """The shapes and dtypes of the variables of a jaxpr."""
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]


def substituted(values: Sequence, places: Iterable[int], others: Iterable) -> list:
    """The values, with others at these places."""
    found = list(values)
    for place, other in zip(places, others, strict=True):
        found[place] = other
    return found


def is_inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def custom_rules(jaxpr: Jaxpr, calls: Callable[[Any], Iterator]) -> Iterator[tuple]:
    """The derivative rules of the functions that a jaxpr calls, and of those that these rules call.
    `calls(jaxpr)` gives the equations in a jaxpr that call functions with rules of their own.

    **Returns:** first `(None, None, numbers)` for the jaxpr itself, and then a tuple for each rule:
    the call; its rule as a jaxpr, or the exception that it raises; and the numbers of the rules
    that this one calls, counted from zero in the order in which they come here. Each rule comes
    once. Derivatives of higher than the third order have None in place of the rule.
    """
    numbers: dict = {}
    queue: list[tuple] = []

    def numbered(inner, order):
        found = []
        for eqn in calls(inner):
            avals = tuple(v.aval for v in eqn.invars)
            name = _value_key(eqn.params["call_jaxpr"]), avals, _written(_rule_of(eqn))
            if name not in numbers:
                numbers[name] = len(queue)
                queue.append((eqn, order))
            found.append(numbers[name])
        return tuple(found)

    yield None, None, numbered(jaxpr, 1)
    for eqn, order in queue:  # which grows
        if order > _ORDERS or len(queue) > _MOST_RULES:
            yield eqn, None, ()
            continue
        try:
            # (A rule for the forward mode implies the reverse mode, which takes twice as long to
            # trace.)
            forward = eqn.primitive.name == "custom_jvp_call"
            rule = tangents_of(eqn) if forward else _cotangents_of(eqn)
        except Exception as e:  # the rule raises
            yield eqn, e, ()
        else:
            yield eqn, rule, numbered(rule.jaxpr, order + 1)


_ORDERS, _MOST_RULES = 3, 256


def _rules_key(jaxpr: jex.Jaxpr) -> tuple:
    """A key for all `custom_rules` of a jaxpr."""

    def of_one(eqn, rule, calls):
        if isinstance(rule, Exception):
            return type(rule), str(rule)
        if rule is None and eqn is not None:
            return _value_key(eqn.params["call_jaxpr"]), _written(_rule_of(eqn))
        return None if rule is None else _value_key(rule), calls

    return tuple(itertools.starmap(of_one, custom_rules(jaxpr, custom_calls)))


def _rule_of(eqn: JaxprEqn) -> list:
    names = (*RULE_PARAMS[:3], "num_consts", "symbolic_zeros")
    return [eqn.params[name] for name in names if name in eqn.params]


# The functions that JAX puts around the rules of calls that it stages. (Where a later JAX has
# others, the rules of a function are as many as its traces, up to `_ORDERS`.)
_AROUND = re.compile(r"(_memoize|lift_jvp|lift_fwd|(Dynamic)?JaxprTrace\..*)\.<locals>\.")


def _is_wrapped(x: Any) -> bool:
    return hasattr(x, "transforms") and hasattr(x, "f")  # a function within JAX


def _written(value: Any, seen: dict | None = None) -> Any:
    """A key for a function as it is written: its code, and the values that it closes over.

    Functions with equal keys do the same if they exist at the same time. Functions of different
    times may not, since the globals that their code reads may have changed in between.
    """
    seen = {} if seen is None else seen
    if isinstance(value, jax.core.Trace) or type(value).__name__ in ("Store", "EqualStore"):
        return None  # says where JAX staged the call, and whether it has used the rule
    if id(value) in seen:
        return seen[id(value)][0]
    kind = type(value)
    if isinstance(value, types.FunctionType):
        inside = [x.cell_contents for x in value.__closure__ or () if x != types.CellType()]
        if str(value.__module__).startswith("jax.") and _AROUND.match(value.__qualname__):
            rules = [x for x in inside if isinstance(x, types.FunctionType) or _is_wrapped(x)]
            if len(rules) == 1:
                return _written(rules[0], seen)
        inside += [value.__defaults__, value.__kwdefaults__, vars(value)]
        kind = value.__code__, id(value.__globals__)
    elif isinstance(value, types.MethodType):
        inside = [value.__func__, value.__self__]
    elif isinstance(value, functools.partial):
        inside = [value.func, value.args, value.keywords]
    elif isinstance(value, jax.custom_jvp | jax.custom_vjp):
        inside = list(vars(value).values())
    elif _is_wrapped(value):
        if not value.transforms:
            return _written(value.f, seen)
        inside = [value.f, *(args for _, args in value.transforms)]
    elif isinstance(value, tuple | list):
        inside = value
    elif isinstance(value, jex.JaxprEqn):
        inside = _rule_of(value)
        kind = _equation_key(value, {}), tuple(x.aval for x in value.invars)
    elif isinstance(value, jtu.PyTreeDef):
        inside = [value.node_data(), *value.children()]
    elif type(value).__name__ in ("Hashable", "Unhashable"):  # JAX's of a static argument
        return _written(value.val, seen)
    elif isinstance(value, dict):
        inside = [x for item in value.items() for x in item]
    elif hasattr(value, "shape"):
        return _Identity(value)
    else:
        leaves, structure = jtu.tree_flatten(value)
        if len(leaves) == 1 and leaves[0] is value:
            return _value_key(value)
        inside = [structure, *leaves]
    # (With the value, so that no other gets its id.)
    seen[id(value)] = ("again", len(seen)), value
    return kind, *(_written(x, seen) for x in inside)
