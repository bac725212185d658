"""What a trace of a function depends on, as a key that is made anew at every call.

Equal keys mean that the function reaches the same: the same code, and in its globals, closure,
defaults and attributes the same values. Numbers, strings, small NumPy arrays and containers count
by what they hold now, JAX's arrays (which can't be written into) and what JAX, NumPy and a few pure
modules define by identity, and functions, classes and plain instances by all that they reach in
turn. Whatever is none of these has no key: `Unkeyed`. So has code that could come by more than its
names tell, or by something else each time (the clock, files, random numbers, an import).

Unlike [`digest_by_value`][ensembleode.tracing.by_value.digest_by_value] this is of one process
only, and has to take microseconds.
"""

import dis
import functools
import hashlib
import struct
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import numpy as np


class Unkeyed(Exception):
    """Something is reached that may have changed without it being seen: says what."""


class Key(NamedTuple):
    """What is reached.

    - `parts`: compared by value; the ids in it are those of `arrays` and `kept`.
    - `arrays`: the arrays (and jitted functions) that count by identity.
    - `kept`: all else that counts by identity. Whoever remembers `parts` must hold on to these, and
        know whether `arrays` are still alive, as ids are used again.
    """

    parts: tuple
    arrays: tuple
    kept: tuple


class Abstract(NamedTuple):
    """In place of an array: its value doesn't count, but its shape and dtype do."""

    aval: Any


def abstract(x: Any) -> Abstract:
    return Abstract(jax.typeof(x))


def reached(*things: Any) -> Key:
    """The key of all that these reach, and of JAX's configuration.

    **Raises:** `Unkeyed`.
    """
    walk = _Walk()
    try:
        walk.context()
        for thing in things:
            walk.value(thing)
    except Unkeyed:
        raise
    except Exception as e:  # nested too deeply, or whatever an object of the user's raises
        raise Unkeyed(f"looking through it raises {type(e).__name__}") from e
    return Key(tuple(walk.parts), tuple(walk.arrays), tuple(walk.kept))


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What is there to be imported by everyone and does nothing but compute. (Other installed packages
# are walked through, as the user's own code.)
_PURE = _words(
    """abc cmath collections dataclasses diffrax einops ensembleode enum equinox fractions functools
    jax jaxlib jaxtyping lineax math numbers numpy operator optimistix typing"""
)
# And what in them does more, or is not always the same.
_IMPURE_MODULES = (
    *("numpy.random", "numpy.ctypeslib", "numpy.testing", "numpy.f2py", "numpy.lib"),
    *(
        "ensembleode.executors",
        "ensembleode.core.files",
        "ensembleode.core.on_disk",
        "ensembleode.planning",
    ),
    *("ensembleode.serve", "ensembleode.store", "ensembleode.training"),
)
_IMPURE_NAMES = _words(
    """config DataSource datetime64 empty empty_like fromfile fromregex genfromtxt geterr lib load
    loadtxt memmap random save savetxt savez savez_compressed tree_deserialise_leaves
    tree_serialise_leaves"""
)
_ARE_PURE = ("jax.random",)
# Modules that may be handed around: nothing in them is impure, but what shows in a jaxpr.
_HANDED_AROUND = frozenset(("jax.numpy", "jax.lax", "jax.nn", "jax.random", "math", "cmath"))
_BUILTINS = _words(
    """abs all any bool bytes callable complex dict divmod enumerate filter float format frozenset
    getattr hasattr int isinstance issubclass iter len list map max min next object pow property
    range repr reversed round set slice sorted staticmethod classmethod str sum super tuple type zip
    Ellipsis NotImplemented __debug__"""
)
# Attributes by which code comes to what its names don't tell.
_REVEALING = _words(
    """__globals__ __builtins__ __subclasses__ __code__ __closure__ __dict__ __self__ __func__
    __import__ __getattribute__ f_globals f_locals f_back gi_frame tb_frame cell_contents
    __loader__ __spec__"""
)
# What of a class no computation depends on, or what only repeats the rest.
_ASIDE = _words(
    """__abstractclassvars__ __abstractmethods__ __abstractvars__ __annotate__ __annotate_func__
    __annotations__ __annotations_cache__ __dataclass_fields__ __dataclass_params__ __dict__ __doc__
    __firstlineno__ __hash__ __module__ __orig_bases__ __parameters__ __qualname__ __repr__
    __static_attributes__ __weakref__ _abc_impl"""
)
# What every NamedTuple has, for itself.
_OF_TUPLES = _words("__getnewargs__ __match_args__ __new__ _asdict _field_defaults _make _replace")
_MOST_STEPS = 4000
_MOST_BYTES = 2**20

_FLOAT = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")


class _Plain:
    """An object of Python, with nothing in it that its `__dict__` doesn't show."""


class _Walk:
    def __init__(self):
        self.parts: list[Any] = []
        self.arrays: list[Any] = []
        self.kept: list[Any] = []
        self._seen: dict[int, int] = {}
        self._steps = self._bytes = 0

    def context(self) -> None:
        """JAX's configuration, as it is part of its own caches of traces."""
        self._same(_context.trace().jaxpr)
        self.parts.append(str(jax.config.jax_default_prng_impl))  # pyright: ignore

    def value(self, x: Any) -> None:
        kind = type(x)
        if kind in _BY_VALUE:
            self.parts += (kind, x)
            return
        if kind is float:
            self.parts += (kind, _FLOAT.pack(x))
            return
        self._step(1)
        if (
            kind is tuple
        ):  # (Python shares equal ones at times, so it tells nothing if one is met again.)
            self._sequence(x)
            return
        seen = self._seen.get(id(x))
        if seen is not None:
            self.parts += ("again", seen)
            return
        self._seen[id(x)] = len(self._seen)
        # (Alive as long as the walk: another thing could have the same id.)
        handler = _HANDLERS.get(kind)
        if handler is not None:
            handler(self, x)
        else:
            self._other(x)

    def _step(self, count: int) -> None:
        self._steps += count
        if self._steps > _MOST_STEPS:
            raise Unkeyed("it is too much to be looked through at every call")

    #
    # By identity
    #

    def _same(self, x: Any) -> None:
        self.kept.append(x)
        self.parts.append(id(x))

    def _same_while_it_lives(self, x: Any) -> None:
        self.arrays.append(x)
        self.parts.append(id(x))

    def _abstract(self, x: Abstract) -> None:
        self.parts += (Abstract, x.aval)

    #
    # Numbers and containers
    #

    def _complex(self, x: complex) -> None:
        self.parts += (complex, _COMPLEX.pack(x.real, x.imag))

    def _numpy(self, x: np.ndarray | np.generic) -> None:
        if x.dtype.hasobject or x.dtype.fields is not None:
            raise Unkeyed(f"it reaches a NumPy array of {x.dtype}")
        self._bytes += x.nbytes
        if self._bytes > _MOST_BYTES:
            raise Unkeyed("it reaches large NumPy arrays, which may be written into at any time")
        data = x.tobytes()
        data = data if len(data) <= 512 else hashlib.sha256(data).digest()
        self.parts += (type(x), x.dtype, x.shape, data)

    def _sequence(self, x: Any) -> None:
        self._step(len(x))
        self.parts += (type(x), len(x))
        for each in x:
            self.value(each)

    def _mapping(self, x: Any) -> None:
        self._step(len(x))
        self.parts += (type(x), len(x))
        for key, each in x.items():
            self.value(key)
            self.value(each)

    def _slice(self, x: slice | range) -> None:
        self.parts.append(type(x))
        for each in (x.start, x.stop, x.step):
            self.value(each)

    #
    # Functions
    #

    def _function(self, fn: types.FunctionType) -> None:
        home = fn.__globals__.get("__name__")
        if _is_pure(home) and _is_pure_thing(fn) and _is_defined(fn):
            self._same(fn)
            return
        code = fn.__code__
        reads = _reads_of(code)
        self.parts.append(types.FunctionType)
        self._same(code)
        self.value(fn.__defaults__)
        for extra in (fn.__kwdefaults__, fn.__dict__):
            if extra:
                self._mapping(extra)
            else:
                self.parts.append(None)
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:
                raise Unkeyed(f"{name} in it has no value yet") from None
            self._read(value, reads.chains.get(name, ((),)))
        if _is_pure(home):  # made by a pure package for the user: jax.vmap(f), say
            return
        if reads.refusal:
            raise Unkeyed(f"{fn.__qualname__} {reads.refusal}")
        known, builtins = fn.__globals__, fn.__builtins__
        for name in reads.names:
            if name in known:
                self._read(known[name], reads.chains[name])
            elif name in _BUILTINS or isinstance(builtins.get(name), type):
                self._same(builtins[name])
            else:
                raise Unkeyed(f"{fn.__qualname__} calls {name}")

    def _read(self, value: Any, chains: Sequence) -> None:
        """What code does with a variable: of a module, only some attributes are read."""
        if type(value) is not types.ModuleType:
            self.value(value)
            return
        for chain in chains:
            self._attribute(value, chain)

    def _attribute(self, module: types.ModuleType, chain: Sequence) -> None:
        for name in chain:
            path = module.__name__
            pure = _is_pure(path)
            if pure and name in _IMPURE_NAMES and f"{path}.{name}" not in _ARE_PURE:
                raise Unkeyed(f"it uses {path}.{name}")
            if name in _REVEALING:
                raise Unkeyed(f"it reads {name} of {path}")
            try:
                value = getattr(module, name) if pure else module.__dict__[name]
            except (AttributeError, KeyError):
                raise Unkeyed(f"{path} has no {name}") from None
            self.parts += (path, name)
            if type(value) is types.ModuleType:
                module = value
                continue
            if pure and _is_pure_thing(value):
                self._same(value)
            else:
                self.value(value)
            return
        self._module(module)

    def _module(self, module: types.ModuleType) -> None:
        if module.__name__ not in _HANDED_AROUND:
            raise Unkeyed(f"it may reach anything of the module {module.__name__}")
        self._same(module)

    def _method(self, x: types.MethodType) -> None:
        self.parts.append(types.MethodType)
        self.value(x.__func__)
        self.value(x.__self__)

    def _builtin(self, x: Any) -> None:
        home = getattr(x, "__self__", None)
        if not (type(home) is types.ModuleType and _is_pure(home.__name__) and _is_pure_thing(x)):
            raise Unkeyed(f"it reaches {x!r}")
        self._same(x)

    def _partial(self, x: functools.partial) -> None:
        self.parts.append(type(x))
        for each in (x.func, x.args, x.keywords):
            self.value(each)
        self._mapping(vars(x))

    #
    # Classes and instances
    #

    def _wrapper(self, x: staticmethod | classmethod) -> None:
        self.parts.append(type(x))
        self.value(x.__func__)

    def _property(self, x: property) -> None:
        self.parts.append(property)
        for each in (x.fget, x.fset, x.fdel):
            self.value(each)

    def _class(self, cls: type) -> None:
        if _is_defined(cls) and (_is_pure_thing(cls) or cls.__module__ == "builtins"):
            self._same(cls)
            return
        if cls.__flags__ & _IMMUTABLE_TYPE:
            raise Unkeyed(f"it reaches {cls!r}")
        self.parts.append(type)
        self._same(cls)
        self.value(type(cls))
        for base in cls.__bases__:
            self.value(base)
        aside = _ASIDE | _OF_TUPLES if cls.__base__ is tuple else _ASIDE
        own = [(name, x) for name, x in cls.__dict__.items() if name not in aside]
        self.parts.append(len(own))
        for name, x in own:
            self.parts.append(name)
            self.value(x)

    def _other(self, x: Any) -> None:
        kind = type(x)
        if isinstance(x, jax.core.Tracer):
            raise Unkeyed("it reaches a value that is being traced")
        if isinstance(x, jax.Array):
            self._same_while_it_lives(x)
        elif isinstance(x, np.generic):
            self._numpy(x)
        elif isinstance(x, np.dtype):
            self.parts += (np.dtype, x)
        elif isinstance(x, type):
            self._class(x)
        elif callable(x) and _is_pure_thing(x) and _is_defined(x):
            self._same(x)
        elif kind is _FieldOfTuple:
            self.value(x.__reduce__()[1])
        elif isinstance(x, functools.partial) and _is_pure_thing(kind):
            self._partial(x)
        elif kind.__module__ == "jaxlib._jax" and hasattr(x, "__wrapped__"):  # jitted
            self.parts.append("jitted")
            self._same_while_it_lives(x)
            self.value(getattr(x, "__wrapped__"))  # noqa: B009
        elif kind.__base__ is tuple:  # a NamedTuple
            self.value(kind)
            self._sequence(x)
        else:
            self._instance(x)

    def _instance(self, x: Any) -> None:
        kind = type(x)
        if (
            kind.__basicsize__ > _Plain.__basicsize__
            or kind.__itemsize__
            or not isinstance(getattr(x, "__dict__", None), dict)
            or kind.__flags__ & _IMMUTABLE_TYPE
            or any("__slots__" in vars(c) and vars(c)["__slots__"] for c in kind.__mro__)
        ):
            raise Unkeyed(f"it reaches a {kind.__module__}.{kind.__qualname__}")
        self.parts.append("instance")
        self.value(kind)
        self._mapping(x.__dict__)


_FieldOfTuple = type(Key.parts)
_IMMUTABLE_TYPE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: defined in C
_BY_VALUE = frozenset((type(None), bool, int, str, bytes, type(Ellipsis), type(NotImplemented)))
_HANDLERS: dict[type, Callable[[_Walk, Any], None]] = {
    Abstract: _Walk._abstract,
    complex: _Walk._complex,
    np.ndarray: _Walk._numpy,
    list: _Walk._sequence,
    set: _Walk._sequence,
    frozenset: _Walk._sequence,
    dict: _Walk._mapping,
    types.MappingProxyType: _Walk._mapping,
    slice: _Walk._slice,
    range: _Walk._slice,
    object: _Walk._same,
    types.FunctionType: _Walk._function,
    types.MethodType: _Walk._method,
    types.BuiltinFunctionType: _Walk._builtin,
    types.ModuleType: _Walk._module,
    functools.partial: _Walk._partial,
    staticmethod: _Walk._wrapper,
    classmethod: _Walk._wrapper,
    property: _Walk._property,
}


@jax.jit
def _context():
    """Traced anew by JAX where its configuration is another."""
    return 0


#
# What code reads
#


class _Reads(NamedTuple):
    """What a function's code, with that of the functions in it, reads by name.

    - `names`: of globals and builtins.
    - `chains`: of each global and free variable, which attributes of it are read in one go:
        `("linalg", "norm")` for `np.linalg.norm`; `()` where it is handed on as it is.
    - `refusal`: why that doesn't tell everything it may depend on.
    """

    names: tuple[str, ...]
    chains: dict[str, tuple[tuple[str, ...], ...]]
    refusal: str


_GLOBAL = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"))
_FREE = frozenset(("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"))
_ATTRIBUTE = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
_REFUSED = {
    "IMPORT_NAME": "imports a module when it runs",
    "STORE_GLOBAL": "assigns a global variable",
    "DELETE_GLOBAL": "deletes a global variable",
    "STORE_NAME": "assigns a global variable",
}
# From which on bytecode may read variables by instructions that aren't above.
_NEWEST = (3, 14)
# By id, as comparing code objects takes longer than reading them; each is kept so that it is its
# own.
_known_reads: dict[int, tuple[types.CodeType, _Reads]] = {}


def _reads_of(code: types.CodeType) -> _Reads:
    known = _known_reads.get(id(code))
    if known is None:
        if len(_known_reads) > 4096:
            _known_reads.clear()
        known = _known_reads[id(code)] = code, _read_through(code)
    return known[1]


def _read_through(code: types.CodeType) -> _Reads:
    names: dict[str, None] = {}
    chains: dict[str, dict[tuple[str, ...], None]] = {}
    refusals = [] if sys.version_info < _NEWEST else ["is code of a Python that isn't known here"]

    def through(code: types.CodeType, is_class: bool) -> None:
        revealing = sorted(_REVEALING.intersection(code.co_names))
        if revealing:
            refusals.append(f"uses {revealing[0]}")
        instructions = [x for x in dis.get_instructions(code) if x.opname != "EXTENDED_ARG"]
        for i, x in enumerate(instructions):
            if x.opname in _REFUSED and not (is_class and x.opname == "STORE_NAME"):
                refusals.append(_REFUSED[x.opname])
            if x.opname not in _GLOBAL and x.opname not in _FREE:
                continue
            chain = []
            for y in instructions[i + 1 :]:
                if y.opname not in _ATTRIBUTE or y.is_jump_target:
                    break
                chain.append(y.argval)
            if x.opname in _GLOBAL:
                names[x.argval] = None
            chains.setdefault(x.argval, {})[tuple(chain)] = None
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                through(inner, not inner.co_flags & _OPTIMIZED)

    through(code, False)
    refusal = refusals[0] if refusals else ""
    return _Reads(tuple(names), {k: tuple(v) for k, v in chains.items()}, refusal)


_OPTIMIZED = 1  # CO_OPTIMIZED: of a function, not the body of a class


#
# What is pure
#


@functools.cache
def _is_pure(module: Any) -> bool:
    if not isinstance(module, str):
        return False
    if any(module == x or module.startswith(f"{x}.") for x in _IMPURE_MODULES):
        return False
    return module.partition(".")[0] in _PURE


def _is_pure_thing(x: Any) -> bool:
    module = getattr(x, "__module__", None)
    return isinstance(module, str) and _is_pure(module)


def _is_defined(x: Any) -> bool:
    """Whether it is what its module has under its name."""
    module = getattr(x, "__module__", None)
    name = getattr(x, "__qualname__", None) or getattr(x, "__name__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return False
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is x
