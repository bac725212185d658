"""Compiles fields for lanes, calls them on arrays, and compares the results with `jax.vmap`'s."""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import llvmlite.binding as llvm
import numpy as np

from ensembleode.engines.compiled.algebra.reading import Memory, OperandReader
from ensembleode.engines.compiled.field.field import evaluate, evaluate_apart
from ensembleode.engines.compiled.llvm import compiler
from ensembleode.engines.compiled.llvm.builder import BOOL, Builder, ElementPointer
from ensembleode.engines.compiled.llvm.module import Module
from ensembleode.fields import Inputs, lower, parameters_of, staged
from ensembleode.fields.ir import Function
from ensembleode.tracing.program import trace


# How many lanes there are numbers for.
LANES = 16


class Field(NamedTuple):
    """A function of the small language, and its numbers.

    - `arrays`: by group and dtype, `[number, lane]`; of the shared ones `[number]`.
    - `t`: `[lane]`, or of all.
    """

    function: Function
    arrays: dict[tuple[str, np.dtype], np.ndarray]
    t: np.ndarray


class Case(NamedTuple):
    """`fn(u, p, t)` and its numbers, lanes first; those of `shared` all lanes have in common.

    - `shared`: of the leaves of `p`, which ones.
    """

    fn: Callable
    u: np.ndarray
    p: Any = ()
    t: Any = 0.25
    shared: tuple[bool, ...] | None = None

    @property
    def axes(self) -> tuple:
        leaves, tree = jtu.tree_flatten(self.p)
        shared = self.shared or (False,) * len(leaves)
        return 0, tree.unflatten([None if x else 0 for x in shared]), self._of(self.t)

    @staticmethod
    def _of(t: Any) -> int | None:
        return 0 if np.ndim(t) else None

    def one(self) -> tuple:
        """The abstract numbers of one lane."""

        def struct(axis, x):
            x = np.asarray(x)
            return jax.ShapeDtypeStruct(x.shape if axis is None else x.shape[1:], x.dtype)

        u, p, t = self.axes
        leaves = [struct(a, x) for a, x in zip(_flat(p), jtu.tree_leaves(self.p), strict=True)]
        p = jtu.tree_unflatten(jtu.tree_structure(self.p), leaves)
        return struct(u, self.u), p, struct(t, self.t)

    def mapped(self, u: Any, p: Any, t: Any) -> Any:
        return jax.vmap(self.fn, in_axes=self.axes)(u, p, t)


def expected_of(cases: Iterable[Case]) -> list[np.ndarray]:
    """By JAX, `[lane, component]`, in one program."""
    cases = list(cases)
    numbers = [jtu.tree_map(jnp.asarray, case[1:4]) for case in cases]
    found = jax.jit(lambda xs: [c.mapped(*x) for c, x in zip(cases, xs, strict=True)])(numbers)
    return [np.asarray(x).reshape(LANES, -1) for x in found]


def _flat(axes: Any) -> list:
    return jtu.tree_leaves(axes, is_leaf=lambda x: x is None)


def lowered(case: Case, *, apart: bool = True, transposed: bool = False) -> Field:
    """**Arguments:**

    - `apart`: whether it may be taken apart into scalars.
    - `transposed`: what pulls the cotangent 1, 2, ... back to the state and the parameters.
    """
    program, consts = trace(case.fn, *case.one())
    leaves = jtu.tree_leaves(case.p)
    axes = _flat(case.axes[1])
    groups = ["shared"] * len(consts) + ["shared" if a is None else "own" for a in axes]
    inputs = Inputs.laid_out(parameters_of(program), groups)
    jaxpr = program.jaxpr
    values = list(zip(groups, (*consts, *leaves), strict=True))
    if transposed:
        out: Any = program.out_avals[0]
        struct = jax.ShapeDtypeStruct(out.shape, out.dtype)
        u: Any = jaxpr.invars[0].aval
        u = jax.ShapeDtypeStruct(u.shape, u.dtype)

        def pulled(consts, cotangent, p, t):
            *p, u = p
            return flat_pull(lambda u, p: program(consts, u, p, t), u, tuple(p), cotangent)

        jaxpr = staged(program, pulled, state=struct, extra=[u])
        inputs = inputs._replace(places=(*inputs.places, ("forward", 0)))
        values.append(("forward", case.u))
    function = lower(jaxpr, inputs, apart=apart)
    arrays: dict = {}
    for group, x in values:
        x = np.asarray(x)
        rows = x.reshape(-1) if group == "shared" else x.reshape(LANES, -1).T
        arrays.setdefault((group, x.dtype), []).append(rows)
    state = np.asarray(case.u).reshape(LANES, -1).T
    if transposed:
        state = np.repeat(cotangent_of(program.out_avals[0]).reshape(-1, 1), LANES, 1)
    arrays["u", state.dtype] = [state]
    joined = {key: np.ascontiguousarray(np.concatenate(found)) for key, found in arrays.items()}
    return Field(function, joined, np.asarray(case.t))


def cotangent_of(aval: Any) -> np.ndarray:
    return (1 + np.arange(aval.size, dtype=aval.dtype)).reshape(aval.shape)


def flat_pull(fn: Callable, u: Any, p: Any, cotangent: Any) -> Any:
    """A cotangent pulled back to the state, and to the parameters that are reals."""
    leaves, tree = jtu.tree_flatten(p)
    chosen = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]

    def of_chosen(u, xs):
        every = list(leaves)
        for i, x in zip(chosen, xs, strict=True):
            every[i] = x
        return fn(u, tree.unflatten(every))

    pulled = jax.vjp(of_chosen, u, [leaves[i] for i in chosen])[1](cotangent)
    return jnp.concatenate([x.reshape(-1).astype(u.dtype) for x in jtu.tree_leaves(pulled)])


def _machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=0,  # (half the time of 1, and the same results)
        jit=True,
    )


def compiled(text: str) -> Any:
    """An engine, which has to be kept. (By the compiler's own passes, and with little effort at the
    instructions: tests are for what is computed.)"""
    module = llvm.parse_assembly(text)
    module.verify()
    machine = _machine()  # (which the engine takes)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options())
    passes = llvm.create_new_module_pass_manager()
    for name in compiler._PASSES:
        getattr(passes, f"add_{name}_pass")()
    passes.run(module, builder)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


class Columns(OperandReader):
    """Those of some lanes in arrays `[number, lane]`, from a lane on."""

    def __init__(self, b: Builder, keys: Sequence, first: Any):
        self.b, self.first = b, first
        self.buffers = {
            key: ElementPointer(b, f"%numbers{i}", key[1]) for i, key in enumerate(keys)
        }

    def load(self, group, dtype, index):
        buffer = self.buffers[group, dtype]
        if group == "shared":
            return buffer.load(index)
        return buffer.load_lanes(self.first + index * LANES)

    def memory(self, group, dtype, start, end):
        return Memory(self.buffers[group, dtype]) if group == "shared" else None


class Apart(Columns):
    """Own numbers lie apart, `[lane, number]`, as far as a function asks where they are."""

    def __init__(self, b: Builder, keys: Sequence, first: Any, sizes: dict):
        super().__init__(b, keys, first)
        self.sizes = sizes

    def load(self, group, dtype, index):
        if group == "own":
            return self.memory(group, dtype, index, index + 1).load(index)
        return super().load(group, dtype, index)

    def memory(self, group, dtype, start, end):
        if group != "own":
            return super().memory(group, dtype, start, end)
        offsets = (self.b.lane_numbers() + self.first) * self.sizes[group, dtype]
        return Memory(self.buffers[group, dtype], offsets=offsets)


class Kernels:
    """Fields in one module; each is called on all lanes, as many at a time as are in a vector.

    **Arguments:**

    - `way`: whether a field is evaluated `"inline"`, or `"apart"`.
    - `masks`: of each lane, whether it counts; by default without a mask.
    """

    def __init__(
        self,
        fields: Sequence[Field],
        width: int,
        way: str = "inline",
        masks: np.ndarray | None = None,
    ):
        self.fields, self.width, self.way, self.masks = fields, width, way, masks
        self.keys = [list(f.arrays) for f in fields]
        self.module = Module(width)
        for i in range(len(fields)):
            self._write(i)
        self.engine = compiled(self.module.text)

    def _write(self, i: int) -> None:
        field, keys = self.fields[i], self.keys[i]
        parameters = [f"ptr noalias readonly %numbers{k}" for k in range(len(keys))]
        parameters += ["ptr noalias readonly %t", "ptr noalias readonly %mask", "ptr noalias %out"]
        with self.module.function(f"run{i}", parameters, linkage="external") as b:
            time, out = (
                ElementPointer(b, "%t", field.t.dtype),
                ElementPointer(b, "%out", field.function.dtype),
            )

            def body(k):
                first = k * self.width
                t = time.load_lanes(first) if field.t.ndim else time.load(0)
                mask = None
                if self.masks is not None:
                    mask = ElementPointer(b, "%mask", BOOL).load_lanes(first)
                if self.way == "apart":
                    sizes = {key: x.shape[0] for key, x in field.arrays.items()}
                    numbers = Apart(b, keys, first, sizes)
                    found = evaluate_apart(b, field.function, f"field{i}", numbers, t, mask)
                else:
                    found = evaluate(b, field.function, Columns(b, keys, first), t, mask)
                assert len(found) == field.function.size
                for j, x in enumerate(found):
                    assert x.dtype == field.function.dtype
                    out.store_lanes(first + j * LANES, b.spread(x))

            b.for_(LANES // self.width, body)
            b.return_()

    def __call__(self, i: int) -> np.ndarray:
        """`[lane, component]`."""
        field = self.fields[i]
        out = np.zeros((field.function.size, LANES), field.function.dtype)
        mask = np.ones(LANES, bool) if self.masks is None else self.masks
        arrays = []
        for (group, _), x in field.arrays.items():
            if self.way == "apart" and group == "own":
                x = np.ascontiguousarray(x.T)
            arrays.append(x)
        arrays += [field.t.reshape(-1), mask, out]
        function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(arrays))
        function(self.engine.get_function_address(f"run{i}"))(*[x.ctypes.data for x in arrays])
        return out.T


def in_lanes(array: Any) -> np.ndarray:
    """Numbers like these, others in each lane, lanes first."""
    array = np.asarray(array)
    if array.dtype == bool:
        lanes = [array ^ (k % 2 == 1) for k in range(LANES)]
    elif array.dtype.kind in "iu":
        lanes = [
            np.roll(array, k) if array.ndim else np.maximum(array - k, 0) for k in range(LANES)
        ]
    else:
        lanes = [array * (1 - k / 64) for k in range(LANES)]
    return np.stack(lanes).astype(array.dtype)


def same_bits(x: np.ndarray, y: np.ndarray, what: Any = "") -> None:
    """But for those of NaN."""
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y, err_msg=str(what))
    if x.dtype.kind == "f":
        there = ~np.isnan(x)
        signs = np.signbit(x)[there], np.signbit(y)[there]
        np.testing.assert_array_equal(*signs, err_msg=str(what))
