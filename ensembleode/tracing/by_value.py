"""What a Python object is, by value: a digest that is the same in every process.

cloudpickle's bytes are not: they hold line numbers, file names, random names of classes, sets in
the order of their hashes, and which equal strings are one object. So the same parts that it follows
(globals, defaults, closures, nested code, instances by their `__reduce__`) are digested here one by
one. Functions and classes of the standard library and of installed packages go by name and version;
all others by what they hold.
"""

import builtins
import copyreg
import dataclasses
import dis
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import site
import struct
import sys
import sysconfig
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.core
import numpy as np

from ..core.keys import is_key, raw


class NotByValue(Exception):
    """Something of the object has no value that could be told from another: says what."""


def digest_by_value(thing: Any) -> bytes:
    """Sixteen bytes: the same for the same, in every process, and others for what differs.

    Not followed: what is read at run time (files, the environment, the network).

    **Raises:** `NotByValue` where part of it can't be told: a lock, an open file, `eval`.
    """
    try:
        return _Walk().digest(thing)
    except RecursionError as e:
        raise NotByValue("it is nested too deeply") from e


def is_installed(thing: Any) -> bool:
    """Whether this function or class is known by its name, and the version of its package."""
    return _name_of(thing) is not None


# Builtins that reach what can't be seen in the code.
_HIDING = {"eval", "exec", "globals", "__import__"}
# Names that reach any attribute of a module.
_SEARCHING = {"getattr", "vars", "__dict__", "import_module"}
# Of a class or function, what no computation depends on, or what differs between processes.
_ASIDE = {
    "__abstractmethods__",
    "__annotate__",
    "__annotate_func__",
    "__annotations__",
    "__annotations_cache__",
    "__classcell__",
    "__dict__",
    "__doc__",
    "__firstlineno__",
    "__module__",
    "__qualname__",
    "__slotnames__",  # (kept there by copyreg, once an object has been pickled)
    "__static_attributes__",
    "__weakref__",
    "_abc_impl",
}
_ENDS = (type(None), bool, int, str, bytes, type(Ellipsis), type(NotImplemented))
_READS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}


class _Walk:
    """Digests things, each of them once."""

    def __init__(self, inside: int = 0):
        self._digests: dict[int, bytes] = {}
        self._open: dict[int, int] = {}  # where in the path to the present thing each is
        self._alive: list[Any] = []  # so that an id stays that of one thing
        self._modules: set[tuple[str, frozenset[str]]] = set()
        self._inside = inside

    def digest(self, thing: Any) -> bytes:
        if type(thing) in _ENDS:
            return _joined(type(thing).__name__, repr(thing))
        if type(thing) is float:
            return _joined("float", struct.pack("<d", thing))
        if id(thing) in self._digests:
            return self._digests[id(thing)]
        if id(thing) in self._open:
            return _joined("again", self._open[id(thing)])
        self._open[id(thing)] = len(self._open)
        self._alive.append(thing)
        digest = _joined(*self._parts(thing))
        del self._open[id(thing)]
        self._digests[id(thing)] = digest
        return digest

    def _parts(self, thing: Any) -> Iterator[Any]:
        kind = type(thing)
        if isinstance(thing, jax.core.Tracer):
            raise NotByValue("it holds a value that is being traced")
        if isinstance(thing, np.ndarray | jax.Array):
            yield from self._of_array(thing)
        elif kind in (tuple, list):
            yield kind.__name__
            yield from map(self.digest, thing)
        elif kind is dict:
            yield "dict"
            yield from self._of_items(thing.items())
        elif kind in (set, frozenset):
            yield kind.__name__
            yield from sorted(map(self._apart, thing))
        elif kind is types.CodeType:
            yield from self._of_code(thing)
        elif kind is types.ModuleType:
            yield from self._of_module(thing, None)
        elif kind is types.CellType:
            yield from self._of_cell(thing, set())
        elif kind is types.MappingProxyType:
            yield "mapping"
            yield from self._of_items(thing.items())
        elif known := _name_of(thing):
            yield from ("named", " ".join(known))
        elif kind is types.FunctionType:
            yield from self._of_function(thing)
        elif kind is types.MethodType:
            yield from ("method", self.digest(thing.__func__), self.digest(thing.__self__))
        elif kind is types.BuiltinFunctionType:
            yield from ("builtin", thing.__name__, self.digest(thing.__self__))
        elif kind is property:
            yield "property"
            yield from map(self.digest, (thing.fget, thing.fset, thing.fdel))
        elif kind in (staticmethod, classmethod):
            yield from (kind.__name__, self.digest(thing.__func__))
        elif kind is functools.cached_property:  # (which has a lock)
            yield from ("cached_property", self.digest(thing.func))
        elif kind in (types.MemberDescriptorType, types.GetSetDescriptorType):
            yield from ("slot", thing.__name__)
        elif kind is dataclasses.Field:  # (whose type may be any annotation)
            yield "field"
            parts = ("name", "default", "default_factory", "init", "repr", "hash", "compare")
            yield from (self.digest(getattr(thing, x)) for x in (*parts, "metadata", "kw_only"))
        elif isinstance(thing, type):
            yield from self._of_class(thing)
        elif (wrapped := _wrapped(thing)) is not None:  # jitted, or with a cache
            yield from ("wrapped", f"{kind.__module__}.{kind.__qualname__}", self.digest(wrapped))
        else:
            yield from self._of_instance(thing)

    def _apart(self, thing: Any) -> bytes:
        """By itself, whatever came before it: the elements of a set have no order."""
        if self._inside > 50:
            raise NotByValue("it has sets within sets without end")
        return _Walk(self._inside + 1).digest(thing)

    def _of_items(self, items: Any) -> Iterator[bytes]:
        for key, value in items:
            yield self.digest(key)
            yield self.digest(value)

    def _of_names(self, names: dict[str, Any]) -> Iterator[bytes]:
        """Of attributes, whose order tells nothing."""
        return self._of_items((k, names[k]) for k in sorted(names))

    def _of_array(self, x: Any) -> Iterator[Any]:
        yield from ("array", str(x.dtype), str(x.shape))
        values = np.asarray(raw(x) if is_key(x) else x)
        if values.dtype.hasobject:
            yield self.digest(values.tolist())
        else:
            yield values.tobytes()

    #
    # Functions
    #

    def _of_function(self, fn: types.FunctionType) -> Iterator[Any]:
        yield from ("function", self.digest(fn.__code__))
        yield self.digest(fn.__defaults__)
        yield from self._of_names(fn.__kwdefaults__ or {})
        names = set(_names(fn.__code__))
        for cell in fn.__closure__ or ():
            yield from self._of_cell(cell, names)
        yield "attributes"
        yield from self._of_names({k: v for k, v in vars(fn).items() if k not in _ASIDE})
        yield "globals"
        home = str(fn.__globals__.get("__name__"))
        if version := _version_of(home):
            # (A function that an installed package made: its globals are the package's.)
            yield f"{home} {version}"
            return
        read = set(_global_names(fn.__code__))
        if hiding := sorted((_HIDING & read) - set(fn.__globals__)):
            raise NotByValue(f"{fn.__qualname__} calls {hiding[0]}")
        for name in sorted(read):
            yield name
            if name in fn.__globals__:
                yield from self._referred(fn.__globals__[name], names)
            else:
                yield f"builtin {hasattr(builtins, name)}"
        for name in sorted(_imported(fn.__code__, fn.__globals__)):
            try:
                module = importlib.import_module(name)
            except ImportError:
                yield f"no module {name}"
            else:
                yield from self._of_module(module, names)

    def _of_cell(self, cell: Any, names: set[str]) -> Iterator[Any]:
        try:
            value = cell.cell_contents
        except ValueError:  # not filled yet
            yield "empty cell"
        else:
            yield from self._referred(value, names)

    def _referred(self, value: Any, names: set[str]) -> Iterator[Any]:
        """What code that has these names refers to."""
        if type(value) is types.ModuleType:
            yield from self._of_module(value, names)
        else:
            yield self.digest(value)

    def _of_code(self, code: types.CodeType) -> Iterator[Any]:
        """All but where it is written."""
        yield from ("code", platform.python_implementation(), code.co_code)
        yield str((code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount))
        yield str((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars))
        yield str(code.co_flags)
        yield getattr(code, "co_exceptiontable", b"")
        yield from map(self.digest, code.co_consts)

    def _of_module(self, module: types.ModuleType, names: set[str] | None) -> Iterator[Any]:
        """Of a module that is not installed: what code with these names can reach of it."""
        name = module.__name__
        if version := _version_of(name):
            yield from ("module", f"{name} {version}")
            return
        if names is None:
            raise NotByValue(f"it holds the module {name}, and not a function of it")
        if searching := sorted(_SEARCHING & names):
            raise NotByValue(f"it may reach all of the module {name} by {searching[0]}")
        yield "part of a module"
        seen = (name, frozenset(names))
        if seen in self._modules:
            return
        self._modules.add(seen)
        for attribute in sorted(names & set(vars(module))):
            yield attribute
            yield from self._referred(vars(module)[attribute], names)

    #
    # Classes and instances
    #

    def _of_class(self, cls: type) -> Iterator[Any]:
        yield from ("class", cls.__name__, self.digest(type(cls)))
        yield from map(self.digest, cls.__bases__)
        own = {k: v for k, v in vars(cls).items() if k not in _ASIDE}
        yield from self._of_names(own)

    def _of_instance(self, thing: Any) -> Iterator[Any]:
        """By what pickle would make it of."""
        try:
            reduce = copyreg.dispatch_table.get(type(thing))
            reduced = reduce(thing) if reduce else thing.__reduce_ex__(4)
        except Exception as e:  # whatever a class says that can't be pickled
            raise NotByValue(f"it holds {_a(thing)}, which can't be pickled") from e
        if isinstance(reduced, str):  # a name in its module
            if not (home := _name_of(type(thing))):
                raise NotByValue(f"it holds {_a(thing)}, which has but a name, {reduced!r}")
            yield from ("named", " ".join(home), reduced)
            return
        parts: Any = (*reduced, None, None, None)
        make, arguments, state, elements, items = parts[:5]
        yield from ("instance", self.digest(make), self.digest(arguments))
        yield from self._of_state(state)
        yield "elements"
        yield from map(self.digest, elements or ())
        yield "items"
        yield from self._of_items(items or ())

    def _of_state(self, state: Any) -> Iterator[Any]:
        if type(state) is dict and all(type(k) is str for k in state):
            yield "attributes"
            yield from self._of_names(state)
        else:
            yield self.digest(state)


def _joined(*parts: Any) -> bytes:
    """The digest of bytes, of digests and of words, each with its length."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<q", len(data)))
        digest.update(data)
    return digest.digest()


def _a(thing: Any) -> str:
    return f"a {type(thing).__module__}.{type(thing).__qualname__}"


def _wrapped(thing: Any) -> Any:
    """The Python function in a jitted one (of JAX or Numba), or in one with a cache."""
    module = type(thing).__module__.partition(".")[0]
    if module in ("jaxlib", "functools", "numba") and callable(thing):
        return getattr(thing, "__wrapped__", None) or getattr(thing, "py_func", None)
    return None


#
# What code refers to
#


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """It, and the functions within it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


def _names(code: types.CodeType) -> Iterator[str]:
    """All names: of globals, attributes and modules."""
    for each in _codes(code):
        yield from each.co_names


def _global_names(code: types.CodeType) -> Iterator[str]:
    for each in _codes(code):
        for instruction in dis.get_instructions(each):
            if instruction.opname in _READS:
                yield instruction.argval


def _imported(code: types.CodeType, home: dict[str, Any]) -> Iterator[str]:
    """The modules that are imported when it runs."""
    for each in _codes(code):
        before: list[Any] = [None, None]
        for instruction in dis.get_instructions(each):
            if instruction.opname == "IMPORT_NAME":
                name, level = instruction.argval, before[-2]
                if level:
                    package = home.get("__package__") or ""
                    name = importlib.util.resolve_name("." * level + name, package)
                yield name
            before = [before[-1], instruction.argval]


#
# What is known by its name
#


def _name_of(thing: Any) -> tuple[str, str] | None:
    """Name and version of a function or class that is installed; None for others."""
    if isinstance(thing, types.MethodDescriptorType | types.WrapperDescriptorType):
        owner = _name_of(thing.__objclass__)
        return owner and (f"{owner[0]}.{thing.__name__}", owner[1])
    if isinstance(thing, np.ufunc):
        module, name = "numpy", thing.__name__
    else:
        if not (isinstance(thing, type) or callable(thing)):
            return None
        module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not thing:
        return None
    version = _version_of(module)
    return (f"{module}.{name}", version) if version else None


@functools.cache
def _version_of(module: str) -> str | None:
    """Of the standard library, or of the package that is installed; None for others, such as one
    that is being edited."""
    top = module.partition(".")[0]
    if top == __name__.partition(".")[0]:
        from ..core.version import __version__

        return __version__
    file = _file_of(module) or _file_of(top)
    if top in sys.stdlib_module_names and (file is None or _is_in(file, _standard())):
        return f"Python {sys.version_info.major}.{sys.version_info.minor}"
    if file is None or not _is_in(file, _installed()):
        return None
    versions = [importlib.metadata.version(x) for x in _distributions().get(top, ())]
    return ", ".join(sorted(set(versions))) or None


def _file_of(module: str) -> str | None:
    found = sys.modules.get(module)
    return getattr(found, "__file__", None)


def _is_in(file: str, folders: list[str]) -> bool:
    place = os.path.realpath(file)
    return any(place.startswith(os.path.join(folder, "")) for folder in folders)


@functools.cache
def _standard() -> list[str]:
    paths = sysconfig.get_paths()
    return [os.path.realpath(paths[x]) for x in ("stdlib", "platstdlib")]


@functools.cache
def _installed() -> list[str]:
    paths = sysconfig.get_paths()
    folders = [paths["purelib"], paths["platlib"], *site.getsitepackages()]
    return [os.path.realpath(x) for x in (*folders, site.getusersitepackages())]


@functools.cache
def _distributions() -> dict[str, list[str]]:
    return dict(importlib.metadata.packages_distributions())
