"""The source of a kernel: constants, and functions of the field and of the tableau, before the time
loop of `integrate.cuh` and what is done with it."""

import dataclasses
import functools
import importlib.resources
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from ...program import Program
from ...saving import Saving
from ...solution import ReturnCode
from ...solvers.tableau import Row, Tableau
from ..codegen import Inputs, lower, parameters_of, staged, UntranslatableError
from ..codegen.ir import For, Product, Stmt, Switch, While
from ..lanes import controller as _controller
from ..lanes.controller import PIController
from .numbers import Layout
from .source import cpp_source, literal, type_of


# Threads of a block.
BLOCK = 128
# Loops over states of as many bytes are unrolled, so that all stages are in registers.
_UNROLLED = 96
# A thread that has more numbers of its own reads them where they lie.
_LARGEST_OWN = 32
# Gradients by more parameters are added up in memory.
_LARGEST_GRADIENT = 32
# A field of more statements, loops unrolled, is a function of its own, called at every stage.
_LONGEST_INLINED = 150


@dataclasses.dataclass(frozen=True)
class Description:
    """All that decides a kernel's source.

    - `field`: the vector field, `field(consts, u, p, t)`.
    - `controlled`: how many components of the state step-size control looks at.
    - `tableau`, `controller`: the method; no controller with a fixed step.
    - `saving`: what is saved (however many rows).
    - `layout`: where the numbers lie.
    - `own_times`: whether each trajectory has its own times to save.
    """

    field: Program
    controlled: int
    tableau: Tableau
    controller: PIController | None
    saving: Saving
    layout: Layout
    own_times: bool

    @property
    def size(self) -> int:
        return math.prod(self.field.out_avals[0].shape)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.field.out_avals[0].dtype)


def with_gradients(d: Description) -> tuple[list[int], list[int]]:
    """Which of the constants and parameters of the field have gradients: those of each trajectory,
    and those that all share."""
    found: dict[str, list[int]] = {"own": [], "shared": []}
    for i, aval in enumerate(parameters_of(d.field)):
        if jnp.issubdtype(aval.dtype, jnp.floating):
            found[d.layout.inputs.places[i][0]].append(i)
    return found["own"], found["shared"]


@functools.lru_cache(maxsize=256)
def solving(d: Description) -> str:
    """The source of the kernel `solve`.

    **Raises:** `ValueError` for a field that can't be translated, naming the primitive.
    """
    inputs = _inputs(d)
    outputs = [("T*", "out_u"), ("int*", "out_counts")]
    if d.saving.mode == "steps":
        outputs.insert(1, ("T*", "out_t"))
    return _joined(
        _common(d),
        _defined(SOLVE_PARAMETERS=_declared([*inputs, *outputs]), SOLVE_ARGUMENTS=_named(inputs)),
        _text("forward.cuh"),
        _on_host("solve", [*inputs, *outputs]),
    )


@functools.lru_cache(maxsize=256)
def pulling_back(d: Description) -> str:
    """The source of the kernel `pull_back`.

    **Raises:** `ValueError` for a field that can't be translated, naming the primitive.
    """
    inputs = _inputs(d)
    parameters = [*inputs, ("const T*", "cotangent")]
    if d.saving.mode == "steps":
        parameters += [("const T*", "saved_u"), ("const T*", "saved_t"), ("const int*", "lengths")]
    parameters += [("T*", "out_u0"), ("T*", "out_own"), ("T*", "out_shared")]
    if d.saving.mode != "steps":
        parameters += [("T*", "record"), ("T*", "kept")]
    own, shared = (size_of(d, which) for which in with_gradients(d))
    macros = {"PULL_BACK_PARAMETERS": _declared(parameters), "PULL_BACK_ARGUMENTS": _named(inputs)}
    for name, size in (("OWN", own), ("SHARED", shared)):
        fits = size <= _LARGEST_GRADIENT
        macros[f"{name}_PARAMETERS"] = str(size)
        macros[f"{name}_HERE"] = str(max(1, size * fits))
        macros[f"UNROLL_{name}"] = "UNROLLED" if fits else "ROLLED"
    return _joined(
        _common(d),
        _defined(**macros),
        _transposed(d),
        _text("gradient.cuh"),
        *_pulled_back(d.tableau, d.dtype, dense=d.saving.mode == "times"),
        _text("backward.cuh"),
        _on_host("pull_back", parameters),
    )


#
# The parts
#


def _joined(*parts: str) -> str:
    return "\n".join(parts)


def _text(name: str) -> str:
    return importlib.resources.files("ensembleode.engines.kernel").joinpath(name).read_text()


def _defined(**macros: Any) -> str:
    return "".join(f"#define {name} {value}\n" for name, value in macros.items())


def _common(d: Description) -> str:
    """All up to the time loop of a trajectory."""
    return _joined(
        _text("primitives.cuh"),
        _constants(d),
        _lane(d),
        _function("field", "u", d.field.jaxpr, d.layout.inputs, d.size),
        *_stages(d.tableau, d.dtype),
        _text("integrate.cuh"),
    )


def _function(name: str, argument: str, jaxpr: jex.Jaxpr, inputs: Inputs, size: int) -> str:
    try:
        fn = lower(jaxpr, inputs, size)
        return cpp_source(fn, name, argument, apart=_length(fn.body) > _LONGEST_INLINED)
    except UntranslatableError as e:
        what = "f" if name == "field" else "the derivative of f"
        raise ValueError(
            f"{what} can't be translated to CUDA C++: it uses {e.what}, at {e.where}. Write that "
            "part otherwise, or use EnsembleGPUArray()."
        ) from e


def _length(stmts: Sequence[Stmt]) -> int:
    """How many statements these are, loops unrolled."""
    total = 0
    for stmt in stmts:
        match stmt:
            case For(_, n, body):
                total += n * _length(body)
            case While(test, _, body):
                total += _length((*test, *body))
            case Switch(_, cases):
                total += sum(map(_length, cases))
            case Product(out, x, _):
                total += out.rows * out.columns * x.columns
            case _:
                total += 1
    return total


def _transposed(d: Description) -> str:
    """What pulls a cotangent back through the field: to the state, and then to the parameters,
    those of each trajectory before those shared."""
    own, shared = with_gradients(d)
    which = [*own, *shared]
    n = len(d.field.jaxpr.constvars)

    def transposed(consts, cotangent, p, t):
        *p, u = p
        numbers = [*consts, *p]

        def field(u, chosen):
            every = list(numbers)
            for i, x in zip(which, chosen, strict=True):
                every[i] = x
            return d.field(every[:n], u, tuple(every[n:]), t)

        to_u, to_chosen = jax.vjp(field, u, [numbers[i] for i in which])[1](cotangent)
        return jnp.concatenate([x.reshape(-1).astype(d.dtype) for x in (to_u, *to_chosen)])

    state: Any = d.field.jaxpr.invars[0].aval
    struct = jax.ShapeDtypeStruct(state.shape, state.dtype)
    jaxpr = staged(d.field, transposed, state=struct, extra=[struct])
    places = (*d.layout.inputs.places, ("forward", 0))
    inputs = d.layout.inputs._replace(places=places)
    return _function("transposed", "forward", jaxpr, inputs, d.size + size_of(d, which))


def size_of(d: Description, which: Sequence[int]) -> int:
    """How many numbers these constants and parameters of the field are."""
    avals = parameters_of(d.field)
    return sum(math.prod(avals[i].shape) for i in which)


def _constants(d: Description) -> str:
    info = jnp.finfo(d.dtype)
    integer = {32: "uint32", 64: "uint64"}[info.bits]
    control = d.controller or PIController(1)
    with jax.ensure_compile_time_eval():
        log_least_error = _controller.log2(np.float32(control.least_error))
        (initial_memory,) = control.initial_memory(1)
    extra = len(d.tableau.interpolant.extra_c)
    terms = "".join(f" value = value * rest + {_single(c)};" for c in _controller.TAYLOR[-2::-1])
    return _joined(
        f"typedef {type_of(d.dtype)} T;",
        f"typedef {integer} BITS;",
        "#ifdef __CUDACC_RTC__",
        '#define UNROLLED _Pragma("unroll")',
        '#define ROLLED _Pragma("unroll 1")',
        "#define THREAD int(blockIdx.x * blockDim.x + threadIdx.x)",
        "#else",
        "#define UNROLLED",
        "#define ROLLED",
        "static thread_local int thread_of_host;",
        "#define THREAD thread_of_host",
        "#endif",
        _defined(
            UNROLL="UNROLLED" if d.size * d.dtype.itemsize <= _UNROLLED else "ROLLED",
            BLOCK=BLOCK,
            N=d.size,
            CONTROLLED=d.controlled,
            STAGES=d.tableau.stages,
            ALL_STAGES=d.tableau.stages + extra,
            FSAL=_boolean(d.tableau.fsal),
            ADAPTIVE=_boolean(d.controller is not None),
            HAS_DT=_boolean(d.layout.place_of("dt") is not None),
            ENDS=0,
            TIMES=1,
            STEPS=2,
            MODE=d.saving.mode.upper(),
            SAVES_START=_boolean(d.saving.start),
            SUCCESS=ReturnCode.Success.value,
            MAX_ITERS=ReturnCode.MaxIters.value,
            UNSTABLE=ReturnCode.Unstable.value,
            DT_LESS_THAN_MIN=ReturnCode.DtLessThanMin.value,
            EPS=_number(info.eps, d.dtype),
            EXPONENT=f"BITS({((1 << info.nexp) - 1) << info.nmant}ull)",
            CONTROLLER_ORDER=control.order,
            GAMMA=_single(control.gamma),
            BETA1=_single(control.beta1),
            BETA2=_single(control.beta2),
            SHRINK_MOST=_single(control.shrink_most),
            LEAST=_single(1 / control.grow_most),
            LEAST_FIRST=_single(1 / control.grow_most_first),
            LOG_LEAST_ERROR=_single(log_least_error),
            INITIAL_MEMORY=_single(initial_memory),
            LOG2_A=_single(_controller.LOG2[0]),
            LOG2_B=_single(_controller.LOG2[1]),
            LOG2_C=_single(_controller.LOG2[2]),
            EXP2_LAST=_single(_controller.TAYLOR[-1]),
        ),
        f"#define EXP2_TERMS(value, rest){terms}",
    )


def _boolean(value: bool) -> str:
    return "true" if value else "false"


def _number(value: Any, dtype: Any) -> str:
    return literal(np.dtype(dtype).type(value))


def _single(value: Any) -> str:
    return _number(value, np.float32)


#
# The numbers of a trajectory
#


def _inputs(d: Description) -> list[tuple[str, str]]:
    """The parameters that every kernel has first: type and name."""
    parameters = [("const int*", "sizes"), ("const bool*", "wanted")]
    if d.saving.mode == "times":
        parameters.append(("const T*", "times"))
    for group, dtype, _ in d.layout.sizes:
        parameters.append((f"const {type_of(dtype)}*", f"{group}_{dtype.name}"))
    return parameters


def _declared(parameters: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{kind} __restrict__ {name}" for kind, name in parameters)


def _named(parameters: Sequence[tuple[str, str]]) -> str:
    return ", ".join(name for _, name in parameters)


def _lane(d: Description) -> str:
    """`struct Lane`, and what reads it."""
    inputs = _inputs(d)
    local = {
        (group, dtype)
        for group, dtype, size in d.layout.sizes
        if group == "own" and size <= _LARGEST_OWN
    }
    fields, set_up, readers = [], [], []
    for group, dtype, size in d.layout.sizes:
        name, kind = f"{group}_{dtype.name}", type_of(dtype)
        place = "j"
        if (group, dtype) in local:
            fields.append(f"  {kind} {name}[{size}];")
            load = f"lane.{name}[j] = {name}[size_t(j) * lane.n + i];"
            set_up.append(f"  UNROLLED for (int j = 0; j < {size}; ++j) {load}")
        else:
            fields.append(f"  const {kind}* __restrict__ {name};")
            set_up.append(f"  lane.{name} = {name};")
            place = "size_t(j) * lane.n + lane.i" if group == "own" else "j"
        readers.append(
            f"DEVICE {kind} {name}(const Lane& lane, int j) {{ return lane.{name}[{place}]; }}"
        )
    if d.saving.mode == "times":
        fields.append("  const T* __restrict__ times;")
        set_up.append("  lane.times = times;")
    return _joined(
        "struct Lane {",
        "  int i, n, rows, maxiters, record;",
        "  bool wanted;",
        *fields,
        "};",
        f"DEVICE Lane lane_of(int i, {_declared(inputs)}) {{",
        "  Lane lane;",
        "  lane.i = i;",
        "  lane.n = sizes[0];",
        "  lane.rows = sizes[1];",
        "  lane.maxiters = sizes[2];",
        "  lane.record = sizes[6];",
        "  lane.wanted = wanted[i];",
        *set_up,
        "  return lane;",
        "}",
        *readers,
        *_readers(d),
    )


def _readers(d: Description) -> Iterator[str]:
    """What reads the numbers that have a name."""
    for name in ("t0", "t1", "dt"):
        yield f"DEVICE T {name}(const Lane& lane) {{ return {_read(d, name, '0')}; }}"
    for name in ("abstol", "reltol", "u0"):
        place = d.layout.place_of(name)
        which = "0" if place is None or (place.size == 1 and name != "u0") else "i"
        yield f"DEVICE T {name}(const Lane& lane, int i) {{ return {_read(d, name, which)}; }}"
    if d.saving.mode == "times":
        place = "size_t(row) * lane.n + lane.i" if d.own_times else "row"
        time = f"lane.times[{place}]"
        if d.layout.place_of("count") is not None:
            # Beyond those that are meant: infinitely far.
            beyond = "t1(lane) < t0(lane) ? -infinity(T(0)) : infinity(T(0))"
            time = f"row < {_read(d, 'count', '0')} ? {time} : ({beyond})"
        yield f"DEVICE T time_at(const Lane& lane, int row) {{ return {time}; }}"


def _read(d: Description, name: str, which: str) -> str:
    place = d.layout.place_of(name)
    if place is None:
        return "0"
    return f"{place.group}_{place.dtype.name}(lane, {place.start} + {which})"


#
# The stages of the method
#


def _stages(tableau: Tableau, dtype: np.dtype) -> Iterator[str]:
    interpolant = tableau.interpolant
    signature = "(const Lane& lane, const T* y, T t, T h, T (*k)[N]"
    yield f"DEVICE void first_stages{signature}, T* y2) {{"
    yield "  T w[N];"
    for s, (c, row) in enumerate(zip(tableau.c[1:], tableau.a, strict=True), start=1):
        target = "y2" if tableau.fsal and s == tableau.stages - 1 else "w"
        yield from _stage(target, c, row, s, dtype)
    if not tableau.fsal:
        yield f"  UNROLL for (int i = 0; i < N; ++i) y2[i] = y[i] + h * ({_sum(tableau.b, dtype)});"
    yield "}"
    yield f"DEVICE void last_stages{signature}) {{"
    yield "  T w[N];"
    extra = zip(interpolant.extra_c, interpolant.extra_a, strict=True)
    for s, (c, row) in enumerate(extra, start=tableau.stages):
        yield from _stage("w", c, row, s, dtype)
    yield "}"
    yield "DEVICE void error_estimate(T (*k)[N], T h, T* error) {"
    # From the last stage to the first, as the lanes engine does.
    error = tableau.error or (0.0,)
    terms = _sum(error, dtype, backwards=True) or "T(0)"
    yield f"  UNROLL for (int i = 0; i < N; ++i) error[i] = h * ({terms});"
    yield "}"
    yield "DEVICE void interpolate(const T* y, T (*k)[N], T h, T theta, T* u) {"
    weights = dict(_weights(tableau, dtype))
    for s, weight in weights.items():
        yield f"  const T w{s} = {weight};"
    terms = " + ".join(f"w{s} * k[{s}][i]" for s in weights)
    yield f"  UNROLL for (int i = 0; i < N; ++i) u[i] = y[i] + h * ({terms});"
    yield "}"


def _stage(target: str, c: float, row: Row, s: int, dtype: np.dtype) -> Iterator[str]:
    yield f"  UNROLL for (int i = 0; i < N; ++i) {target}[i] = y[i] + h * ({_sum(row, dtype)});"
    yield f"  field(lane, {target}, t + {_number(c, dtype)} * h, k[{s}]);"


def _sum(row: Row, dtype: np.dtype, *, backwards: bool = False) -> str:
    terms = [
        f"k[{s}][i]" if w == 1 else f"{_number(w, dtype)} * k[{s}][i]"
        for s, w in enumerate(row)
        if w
    ]
    return " + ".join(terms[::-1] if backwards else terms)


def _weights(tableau: Tableau, dtype: np.dtype) -> Iterator[tuple[int, str]]:
    """The weights of the stages at `theta`, but for those that are zero."""
    for s, row in enumerate(tableau.interpolant.weights):
        if any(row):
            text = _number(row[-1], dtype)
            for w in row[-2::-1]:
                text = f"({text} * theta + {_number(w, dtype)})"
            yield s, f"{text} * theta"


def _pulled_back(tableau: Tableau, dtype: np.dtype, *, dense: bool) -> Iterator[str]:
    """What pulls back through the stages of a step, and through its dense output."""
    yield "DEVICE void pull_interpolant(T theta, const T* to_u, T (*to_k)[N]) {"
    for s, weight in _weights(tableau, dtype):
        yield f"  const T w{s} = {weight};"
        yield f"  UNROLL for (int i = 0; i < N; ++i) to_k[{s}][i] += w{s} * to_u[i];"
    yield "}"
    signature = "(const Lane& lane, const T* y, T t, T h, T (*k)[N]"
    results = "T (*to_k)[N], T* to_y, const Gradient& gradient) {"
    yield f"DEVICE void pull_last_stages{signature}, {results}"
    yield "  T w[N], to_w[N];"
    interpolant = tableau.interpolant
    extra = list(zip(interpolant.extra_c, interpolant.extra_a, strict=True))
    for s in reversed(range(len(extra))):
        yield from _pulled_stage(*extra[s], tableau.stages + s, dtype)
    yield "}"
    yield f"DEVICE void pull_first_stages{signature}, const T* to_y2, {results}"
    yield "  T w[N], to_w[N];"
    last = tableau.stages - 1
    if not tableau.fsal:
        yield "  UNROLL for (int i = 0; i < N; ++i) to_y[i] += to_y2[i];"
        yield from _spread(tableau.b, "to_y2", dtype)
    elif not dense:
        # Nothing depends on the field at the end of the step, but the end itself.
        yield "  UNROLL for (int i = 0; i < N; ++i) to_y[i] += to_y2[i];"
        yield from _spread(tableau.a[-1], "to_y2", dtype)
        last -= 1
    for s in range(last, 0, -1):
        ends = tableau.fsal and s == tableau.stages - 1
        yield from _pulled_stage(
            tableau.c[s], tableau.a[s - 1], s, dtype, "to_y2" if ends else None
        )
    yield "  pull_field(lane, to_k[0], y, t, to_w, gradient);"
    yield "  UNROLL for (int i = 0; i < N; ++i) to_y[i] += to_w[i];"
    yield "}"


def _pulled_stage(
    c: float, row: Row, s: int, dtype: np.dtype, more: str | None = None
) -> Iterator[str]:
    """Through stage `s`, to whose state there is `more` of a cotangent."""
    yield f"  UNROLL for (int i = 0; i < N; ++i) w[i] = y[i] + h * ({_sum(row, dtype)});"
    yield f"  pull_field(lane, to_k[{s}], w, t + {_number(c, dtype)} * h, to_w, gradient);"
    if more:
        yield f"  UNROLL for (int i = 0; i < N; ++i) to_w[i] += {more}[i];"
    yield "  UNROLL for (int i = 0; i < N; ++i) to_y[i] += to_w[i];"
    yield from _spread(row, "to_w", dtype)


def _spread(row: Row, what: str, dtype: np.dtype) -> Iterator[str]:
    for s, w in enumerate(row):
        if w:
            term = f"{_number(w, dtype)} * (h * {what}[i])"
            yield f"  UNROLL for (int i = 0; i < N; ++i) to_k[{s}][i] += {term};"


def _on_host(name: str, parameters: Sequence[tuple[str, str]]) -> str:
    """What runs all threads one after the other, where this is compiled for the host."""
    arguments = ", ".join(f"({kind})pointers[{i}]" for i, (kind, _) in enumerate(parameters))
    return _joined(
        "#ifndef __CUDACC_RTC__",
        'extern "C" void run_on_host(void** pointers, int threads) {',
        "  for (thread_of_host = 0; thread_of_host < threads; ++thread_of_host)",
        f"    {name}({arguments});",
        "}",
        "#endif",
        "",
    )
