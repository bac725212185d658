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
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.extend import source_info_util


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
        self.out_avals: tuple[Any, ...] = tuple(v.aval for v in jaxpr.outvars)
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

    def depends_on(
        self, inputs: Sequence[bool], constants: Sequence[bool] | None = None
    ) -> list[bool]:
        """Which flat outputs depend on those flat inputs, and constants, that are marked True."""
        constants = [False] * len(self.jaxpr.constvars) if constants is None else constants
        return _dependence(self.jaxpr, [*constants, *inputs])

    def deciding(self) -> list[bool]:
        """Which flat inputs, constants first, decide what is computed: those on which a predicate
        of `lax.cond`, a `while` loop or an index depends."""
        count = len(self.jaxpr.constvars) + len(self.jaxpr.invars)
        _, deciding = _deciding(self.jaxpr, [1 << i for i in range(count)])
        return [bool(deciding >> i & 1) for i in range(count)]


def trace(fn: Callable, *args: Any, rules: bool = False) -> tuple[Program, list]:
    """Trace `fn(*args)`; arrays that it closes over become constants.

    **Arguments:**

    - `fn`: a function of pytrees of arrays.
    - `args`: example arguments (arrays, tracers, Python numbers or `ShapeDtypeStruct`s).
    - `rules`: whether equality must also cover the derivative rules of `jax.custom_jvp` and
        `jax.custom_vjp` functions that `fn` calls. This is needed when the program will be
        differentiated.

    **Returns:** the program, and the list of its constants.
    """
    failed = []

    # A fresh function each time: make_jaxpr caches by identity, and what a function closes
    # over may have been rebound since the last call.
    def called(*a):  # the name `a` is used in JAX's error messages
        try:
            return fn(*a)
        except NOT_TRACEABLE as e:
            # JAX would take milliseconds to shorten its traceback, although another way may be
            # found.
            failed.append(e)

    closed, out_shape = jax.make_jaxpr(called, return_shape=True)(*args)
    if failed:
        raise failed.pop()  # so that no cycle keeps alive what the error refers to
    if any(_nested_consts(eqn) for eqn in closed.jaxpr.eqns):
        # An inner jit of the user's closed over arrays: inlining it turns these into inputs.
        inline = functools.partial(evaluated, closed, instead=inlined)
        closed = jax.make_jaxpr(lambda *a: inline(*jtu.tree_leaves(a)))(*args)
    # Constants have no values, since a program would keep the values alive.
    jaxpr = with_constants(closed.jaxpr, closed.jaxpr.constvars, closed.jaxpr.invars)
    return program_of(jaxpr, jtu.tree_structure(out_shape), rules), list(closed.consts)


def program_of(jaxpr: jex.Jaxpr, out_tree: Any, rules: bool) -> Program:
    """The program of a jaxpr. **Arguments:** `rules`: see `trace`."""
    key = _jaxpr_key(jaxpr)
    if rules:
        calls = list(_custom_calls(jaxpr))
        keys = {i: _rule_key(eqn) for i, eqn in {id(eqn): eqn for eqn in calls}.items()}
        key = (key, tuple(keys[id(eqn)] for eqn in calls))
    return Program(jaxpr, out_tree, key)


# Since JAX 0.11, the constants of a jaxpr are stored with their values.
_CONSTANTS_HAVE_VALUES = "consts" in inspect.signature(jex.Jaxpr).parameters


def with_constants(jaxpr: Any, constants: Sequence, inputs: Sequence) -> jex.Jaxpr:
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
# Dependence
#


def _dependence(jaxpr: jex.Jaxpr, marks: Sequence[bool]) -> list[bool]:
    invars = [*jaxpr.constvars, *jaxpr.invars]
    marked = {v for v, mark in zip(invars, marks, strict=True) if mark}

    def is_marked(atom):
        return not isinstance(atom, jex.Literal) and atom in marked

    for eqn in jaxpr.eqns:
        ins = [is_marked(v) for v in eqn.invars]
        if eqn.primitive.name == "jit":
            outs = _dependence(eqn.params["jaxpr"].jaxpr, ins)
        else:
            outs = [any(ins)] * len(eqn.outvars)
        marked.update(v for v, mark in zip(eqn.outvars, outs, strict=True) if mark)
    return [is_marked(v) for v in jaxpr.outvars]


# The range of the operands that are indices.
_INDICES = {
    "dynamic_slice": slice(1, None),
    "dynamic_update_slice": slice(2, None),
    "gather": slice(1, 2),
    **{f"scatter{kind}": slice(1, 2) for kind in ("", "-add", "-max", "-min", "-mul", "-sub")},
}


def _deciding(jaxpr: jex.Jaxpr, inputs: Sequence[int]) -> tuple[list[int], int]:
    """For each output the set of inputs (as bits) that it depends on, and the set of inputs that
    decide what is computed.

    Where it isn't worthwhile to distinguish, an output depends on all operands of its equation.
    """
    depends = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))
    deciding = 0

    def union(sets):
        return functools.reduce(operator.or_, sets, 0)

    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        ins = [0 if isinstance(v, jex.Literal) else depends[v] for v in eqn.invars]
        outs = [union(ins)] * len(eqn.outvars)
        if name == "while":
            deciding |= union(ins)
        elif name == "cond":
            deciding |= ins[0]
            ins = ins[1:]
        elif name in _INDICES:
            deciding |= union(ins[_INDICES[name]])
        for inner in params_of(eqn):
            if not is_jaxpr(inner):
                continue
            inner = getattr(inner, "jaxpr", inner)
            count = len(inner.constvars) + len(inner.invars)
            is_call = name in _CALLS and count == len(ins)
            inner_outs, more = _deciding(inner, ins if is_call else [union(ins)] * count)
            deciding |= more
            outs = inner_outs if is_call else outs
        depends.update(zip(eqn.outvars, outs, strict=True))
    return [0 if isinstance(v, jex.Literal) else depends[v] for v in jaxpr.outvars], deciding


# Primitives that only evaluate their jaxpr.
_CALLS = ("jit", "remat2", "checkpoint", "custom_jvp_call")


#
# Inlining of inner jits
#


def _nested_consts(eqn) -> bool:
    if eqn.primitive.name != "jit":
        return False
    inner = eqn.params["jaxpr"]
    return bool(inner.consts) or any(_nested_consts(e) for e in inner.jaxpr.eqns)


def evaluated(jaxpr: Any, *args: Any, consts: Sequence = (), instead: Callable) -> list:
    """Evaluate a jaxpr (closed or not) equation by equation. An equation is bound as it is, unless
    `instead(eqn, ins)` returns outputs for it."""
    consts = consts or getattr(jaxpr, "consts", ())
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom):
        return atom.val if isinstance(atom, jex.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        with source_info_util.user_context(eqn.source_info.traceback):
            outs = instead(eqn, [read(x) for x in eqn.invars])
        if outs is not None:
            env.update(zip(eqn.outvars, outs, strict=True))
            continue
        ins = [v for v in eqn.invars if not isinstance(v, jex.Literal)]
        outs = [v for v in eqn.outvars if not isinstance(v, jex.DropVar)]
        alone = jaxpr.replace(constvars=[], invars=ins, outvars=outs, eqns=[eqn])
        env.update(zip(outs, jax.core.eval_jaxpr(alone, [], *map(read, ins)), strict=True))
    return [read(v) for v in jaxpr.outvars]


def inlined(eqn: Any, ins: Sequence) -> list | None:
    """For `evaluated`: the outputs of an inner jit that closed over arrays; None for other
    equations."""
    if _nested_consts(eqn):
        inner = eqn.params["jaxpr"]
        return evaluated(inner, *ins, consts=list(map(jnp.asarray, inner.consts)), instead=inlined)
    return None


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
    number: dict = {}

    def name(var):
        return number.setdefault(var, len(number))

    def atom(x):
        if isinstance(x, jex.Literal):
            return ("lit", x.aval, _array_key(x.val))
        return name(x)

    binders = tuple((name(v), v.aval) for v in [*jaxpr.constvars, *jaxpr.invars])
    eqns = []
    for eqn in jaxpr.eqns:
        custom = eqn.primitive.name in _CUSTOM_RULES
        named = custom or eqn.primitive.name in ("jit", "remat", "checkpoint")
        params = tuple(
            (k, _value_key(v))
            for k, v in sorted(eqn.params.items())
            if not (k == "name" and named) and not (custom and k in RULE_PARAMS)
        )
        ins = tuple(atom(x) for x in eqn.invars)
        outs = tuple((name(v), v.aval) for v in eqn.outvars)
        eqns.append((eqn.primitive, ins, outs, params))
    return len(jaxpr.constvars), binders, tuple(eqns), tuple(atom(x) for x in jaxpr.outvars)


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
    if all(hasattr(value, name) for name in _OF_RESULTS):
        # How Equinox's primitives (a linear solve, in root finders) put their results together: an
        # object of each trace, compared by identity.
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


def _custom_calls(jaxpr: jex.Jaxpr) -> Iterator:
    """The equations that call functions with their own derivative rules, at any depth."""
    return (eqn for eqn in equations(jaxpr) if eqn.primitive.name in _CUSTOM_RULES)


def equations(jaxpr: Any) -> Iterator:
    """The equations of a jaxpr (closed or not) at any depth, each before the equations inside
    it."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in filter(is_jaxpr, params_of(eqn)):
            yield from equations(inner)


def params_of(eqn: Any) -> list:
    """The parameters of an equation, in which jaxprs (closed or not) are leaves."""
    return jtu.tree_leaves(list(eqn.params.values()), is_leaf=is_jaxpr)


def scan_parts(eqn: Any) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried. Arrays that are scanned
    over, or stacked, have one more axis outside than inside."""

    def same(outside: Any, inside: Any) -> int:
        pairs = zip(outside, inside, strict=True)
        return sum(len(o.aval.shape) == len(i.aval.shape) for o, i in pairs)

    body = eqn.params["jaxpr"].jaxpr
    n_carry = same(eqn.outvars, body.outvars)
    return same(eqn.invars, body.invars) - n_carry, n_carry


def is_jaxpr(x: Any) -> bool:
    return isinstance(x, jex.Jaxpr | jex.ClosedJaxpr)


def tangents_of(eqn: Any) -> jex.ClosedJaxpr:
    """The forward-mode derivative rule of a call, as a jaxpr.

    **Raises:** the exception of a rule that raises one.
    """

    def pushed(args, tangents):
        return jax.jvp(*_of_inexact(eqn, args), tuple(tangents))

    args = _structs(eqn.invars)
    return jax.make_jaxpr(pushed)(args, list(filter(is_inexact, args)))


def _cotangents_of(eqn: Any) -> jex.ClosedJaxpr:
    """The reverse-mode derivative rule of a call, as a jaxpr; raises as `tangents_of` does."""

    def pullback(args, cotangents):
        call, diff = _of_inexact(eqn, args)
        return jax.vjp(lambda *xs: list(filter(is_inexact, call(*xs))), *diff)[1](cotangents)

    cotangents = list(filter(is_inexact, _structs(eqn.outvars)))
    return jax.make_jaxpr(pullback)(_structs(eqn.invars), cotangents)


def _of_inexact(eqn: Any, args: Sequence) -> tuple[Callable, tuple]:
    """A call as a function of those arguments that it has derivatives with respect to; and these
    arguments."""

    def call(*inexact):
        rest = iter(inexact)
        every = [next(rest) if is_inexact(x) else x for x in args]
        return eqn.primitive.bind(*every, **eqn.primitive.get_bind_params(eqn.params))

    return call, tuple(filter(is_inexact, args))


def _structs(atoms: Sequence) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in atoms]


def is_inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _rule_key(eqn: Any, inside: set[tuple] | None = None) -> tuple:
    """A key for the derivative rule of a call, and for the rules inside that.

    A rule usually calls the function itself again, and others. `inside` has the calls within rules
    whose rules are in the key already, at most `_MOST_INSIDE`: those of a root finder with an
    implicit derivative would grow exponentially.
    """
    primal = _value_key(eqn.params["call_jaxpr"]), tuple(v.aval for v in eqn.invars)
    if inside is None:
        inside = set()
    elif primal in inside or len(inside) > _MOST_INSIDE:
        return primal
    inside.add(primal)
    # The reverse mode of a forward rule follows from it, and takes twice as long to trace.
    forward = eqn.primitive.name == "custom_jvp_call"
    try:
        rule = tangents_of(eqn) if forward else _cotangents_of(eqn)
    except Exception as e:
        return primal, type(e), str(e)  # the rule raises
    rules = tuple(_rule_key(e, inside) for e in _custom_calls(rule.jaxpr))
    return _value_key(rule), rules


_MOST_INSIDE = 4
