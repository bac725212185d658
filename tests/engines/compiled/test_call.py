"""Kernels as operations of JAX programs: in this process, in others, and loaded again."""

import pickle
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable

import ensembleode as eo
from ensembleode.engines.compiled.llvm import compiler, machine, object_cache
from ensembleode.engines.compiled.xla import call as calls
from ensembleode.engines.compiled.xla.call import call, kernels_in, register, safety_checks
from ensembleode.executors import distributed
from ensembleode.executors.distributed import worker

from .kernels import axpy, fresh, scaled, WHERE
from .machines import limited


@pytest.fixture(autouse=True)
def directory(monkeypatch, tmp_path):
    monkeypatch.setenv(object_cache.VARIABLE, str(tmp_path))


N = 37


def numbers(n=N):
    return jnp.arange(n, dtype=jnp.float64)


def test_it_is_dead_code_where_nothing_uses_it():
    """A failing kernel that nobody needs is never compiled."""

    def f(x):
        call("nonsense", "f", [x], [jax.ShapeDtypeStruct((), x.dtype)])
        return x + 1

    assert jax.jit(f)(1.0) == 2.0


# Adds to one entry of an array, which the caller hands over in place.
TOUCH = """
define void @touch(ptr %i, ptr %before, ptr %x, ptr %old) {
  %at = load i64, ptr %i
  %entry = getelementptr double, ptr %x, i64 %at
  %value = load double, ptr %entry
  %more = fadd double %value, 1.0
  store double %more, ptr %entry
  store double %value, ptr %old
  ret void
}
"""


def test_in_place():
    """The operand keeps its value where it is used again; a loop changes the same array."""

    def touch(i, x):
        outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((), x.dtype)]
        return call(TOUCH, "touch", [i, x], outputs, in_place={1: 0})

    x, i = numbers(), jnp.int64(3)
    for run in (touch, jax.jit(touch)):
        y, old = run(i, x)
        np.testing.assert_array_equal(x, numbers())
        np.testing.assert_array_equal(y, numbers().at[3].add(1))
        assert old == 3
    both = jax.jit(lambda x: (touch(i, x)[0], touch(i + 1, x)[0], x))(x)
    np.testing.assert_array_equal(both[0] + both[1] - both[2], numbers().at[3:5].add(1))
    looped = jax.jit(lambda x: jax.lax.fori_loop(0, N, lambda i, x: touch(i, x)[0], x))(x)
    np.testing.assert_array_equal(looped, numbers() + 1)
    of_loop = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: touch(i, x)[0], x))
    # The loop gets a copy of its own, and makes none itself.
    assert of_loop.lower(x).compile().as_text().count(f"f64[{N}]{{0}} copy(") == 1


def test_nothing_is_copied():
    def where(x):
        return call(WHERE, "where", [x], [jax.ShapeDtypeStruct((2,), jnp.int64)])[0]

    x = jnp.ones(1000)
    for run in (where, jax.jit(where)):
        y = run(x)
        assert y.tolist() == [x.unsafe_buffer_pointer(), y.unsafe_buffer_pointer()]


def test_row_major():
    """Whatever order XLA would rather have an operand or a result in."""
    x = numbers(6).reshape(2, 3)

    @jax.jit
    def f(x):
        y, _ = scaled(x.T)
        return y, (y.T @ x.T), jnp.ravel(y)

    y, product, flat = f(x)
    np.testing.assert_array_equal(y, 2 * x.T + 1)
    np.testing.assert_array_equal(product, (2 * x + 1) @ x.T)
    np.testing.assert_array_equal(flat, (2 * x.T + 1).ravel())


def test_operands_keep_their_bits():
    with jax.enable_x64(False), pytest.raises(TypeError, match=r"reads int64, .* int32"):
        scaled(jnp.ones(3))


def test_errors_of_llvm():
    """And what to do then."""
    with pytest.raises(compiler.CompileError, match=r'(?s)frobnicate.*engine="diffrax"'):
        jax.jit(
            lambda x: call(
                "define void @f(ptr %x, ptr %y) {\n  frobnicate\n}",
                "f",
                [x],
                [jax.ShapeDtypeStruct((), x.dtype)],
            )
        )(1.0)


def test_registered_once(monkeypatch):
    registered = []
    real = jax.ffi.register_ffi_target

    def counted(name, *args, **options):
        registered.append(name)
        return real(name, *args, **options)

    monkeypatch.setattr(jax.ffi, "register_ffi_target", counted)
    for n in (3, 5):
        jax.jit(lambda x: scaled(scaled(x, add=23.0)[0], add=23.0)[0])(numbers(n))
    assert len(registered) == 1
    scaled(numbers(3), add=24.0)
    assert len(registered) == 2


@pytest.fixture
def spare(monkeypatch):
    """How many kernels stay that nobody needs; those of other tests have gone."""
    monkeypatch.setattr(calls, "SPARE", 0)
    jax.clear_caches()
    register([])
    monkeypatch.setattr(calls, "SPARE", 3)
    return 3


def adding(add):
    return jax.jit(lambda x: scaled(x, add=add)[0])


@pytest.mark.slow
def test_kernels_are_freed_that_nothing_can_call(spare):
    before, codes = len(calls._loaded), len(compiler._codes)
    first = adding(100.0)
    kept = np.asarray(first(numbers()))
    for i in range(20):
        for x in (numbers(), numbers(3)):
            np.testing.assert_array_equal(adding(101.0 + i)(x), 2 * x + 101 + i)
    assert len(calls._loaded) <= before + spare + 2
    assert len(compiler._codes) <= codes + spare + 2 + 20 // calls._BLOCK + 1
    # What is held is there, for other shapes too, and what was freed is loaded again.
    np.testing.assert_array_equal(first(numbers()), kept)
    np.testing.assert_array_equal(first(numbers(5)), kept[:5])
    known = len(calls._trampolines)
    np.testing.assert_array_equal(adding(101.0)(numbers()), 2 * numbers() + 101)
    assert len(calls._trampolines) == known


@pytest.mark.slow
@pytest.mark.parametrize("hold", ["lowered", "compiled", "exported", "called"])
def test_kernels_stay_while_something_can_call_them(spare, hold):
    """And no longer, but of what was exported."""
    x, add = numbers(), 200.0 + len(hold)
    f = adding(add)
    (kernel,) = kernels_in(f.trace(x).jaxpr)
    if hold == "lowered":
        held = f.lower(x)
    elif hold == "compiled":
        held = f.lower(x).compile()
    elif hold == "exported":
        checks = safety_checks([kernel])
        held = jax.export.export(f, platforms=["cpu"], disabled_checks=checks)(x)
    else:
        held = register([kernel])
    del f
    jax.clear_caches()
    for i in range(2 * spare):
        adding(300.0 + i)(x)
    assert calls._trampolines[kernel.target].handler.value
    if hold == "lowered":
        held = held.compile()
    if hold != "called":
        run = held.call if hold == "exported" else held
        np.testing.assert_array_equal(run(x), 2 * x + add)
        del run
    del held
    jax.clear_caches()
    for i in range(2 * spare):
        adding(300.0 + i)(x)
    assert bool(calls._trampolines[kernel.target].handler.value) == (hold == "exported")


@pytest.mark.slow
def test_kernels_stay_while_they_run(spare, monkeypatch):
    """Of programs that were forgotten as soon as they began."""
    monkeypatch.setattr(calls, "SPARE", 0)
    x, found = jnp.ones(10**6), []
    for i in range(8):
        found.append(jax.jit(lambda x, i=i: scaled(scaled(x)[0], add=400.0 + i)[0])(x))
        adding(500.0 + i).lower(numbers())
    for i, y in enumerate(found):
        assert (np.asarray(y) == 406 + i).all()


@pytest.mark.slow
def test_threads_load_and_free_kernels(spare):
    def run(i):
        add = 600.0 + i % 10
        return np.array_equal(adding(add)(numbers()), 2 * numbers() + add)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(run, range(60)))


def test_an_executable_that_was_serialised(spare):
    """It may be loaded at any time."""
    f = adding(700.0).lower(numbers()).compile()
    content = serialize_executable.serialize(f)
    del f
    jax.clear_caches()
    for i in range(2 * spare):
        adding(300.0 + i)(numbers())
    devices = jax.devices()[:1]
    again = serialize_executable.deserialize_and_load(*content, execution_devices=devices)
    np.testing.assert_array_equal(again(numbers()), 2 * numbers() + 700)


def test_on_a_lesser_machine():
    """It is another kernel, with the results of this one."""
    if machine.host().architecture != "x86_64":
        pytest.skip("not x86-64")
    with machine.using(limited("x86-64")):
        # (JAX knows functions it has traced, whatever they were traced for.)
        (lesser,) = kernels_in(jax.make_jaxpr(lambda x: scaled(x))(numbers()))
        y, _ = jax.jit(lambda x: scaled(x))(numbers())
    np.testing.assert_array_equal(y, 2 * numbers() + 1)
    (own,) = kernels_in(jax.make_jaxpr(lambda x: scaled(x))(numbers()))
    assert lesser.machine == limited("x86-64")
    assert lesser.target != own.target


def test_which_kernels_a_program_calls():
    """At any depth, each once."""

    def inner(x):
        return scaled(x, add=2.0)[0]

    def f(x):
        x = jax.jit(inner)(x)
        x = jax.lax.fori_loop(0, 2, lambda i, x: scaled(x, add=3.0)[0], x)
        return jax.lax.cond(x[0] > 0, lambda x: scaled(x, add=4.0)[0], inner, x)

    jax.jit(inner)(numbers())  # (known to JAX before)
    found = kernels_in(jax.jit(f).trace(numbers()).jaxpr)
    assert sorted(k.text for k in found) == sorted(axpy(4, add) for add in (2.0, 3.0, 4.0))
    assert kernels_in(jax.make_jaxpr(jnp.sin)(1.0)) == ()


RUN = """
import pickle, sys
import jax, jax.export, numpy as np
from ensembleode.engines.compiled.xla.call import register
with open({path!r}, "rb") as file:
    program, kernels = pickle.load(file)
f = jax.export.deserialize(bytearray(program)).call
try:
    jax.jit(f)(np.arange(5.0))
except jax.errors.JaxRuntimeError as e:
    print(kernels[0].target in str(e))
register(kernels)
print(np.asarray(jax.jit(f)(np.arange(5.0))).tolist())
"""


@pytest.mark.slow
def test_a_program_goes_to_another_process_with_its_kernels(tmp_path):
    f = jax.jit(lambda x: scaled(x, 3.0)[0])
    structs = [jax.ShapeDtypeStruct((5,), jnp.float64)]
    kernels = kernels_in(f.trace(*structs).jaxpr)
    with pytest.raises(ValueError, match=r"[Cc]ustom call"):
        jax.export.export(f, platforms=["cpu"])(*structs)
    export = jax.export.export(f, platforms=["cpu"], disabled_checks=safety_checks(kernels))
    path = tmp_path / "program"
    path.write_bytes(pickle.dumps((export(*structs).serialize(), kernels)))
    said = fresh(RUN.format(path=str(path))).splitlines()
    assert said == ["True", str([3.0 * x + 1 for x in range(5)])]


SHARED = """
import jax, jax.monitoring
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
from tests.engines.compiled.kernels import scaled

y, s = jax.jit(scaled)(np.arange(5.0))
print(y.tolist(), s)

def f(x):
    y, s = scaled(x)
    return y, s[None]

mesh = Mesh(np.array(jax.devices("cpu")), "x")
shared = jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
y, s = jax.jit(shared)(np.arange(6.0))
print(y.tolist(), s.tolist(), len(y.sharding.device_set))
print(hits.count("/jax/compilation_cache/cache_hits"))
"""


@pytest.mark.slow
def test_on_two_devices_and_from_the_compilation_cache_of_jax(tmp_path):
    """Each device has its half; and what XLA compiled in one process is loaded by the next, with
    the kernels that it calls."""
    environment = {
        "ENSEMBLEODE_NUM_THREADS": "0",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    *first, hits = fresh(SHARED, **environment).splitlines()
    assert first == [
        "[1.0, 3.0, 5.0, 7.0, 9.0] 10.0",
        "[1.0, 3.0, 5.0, 7.0, 9.0, 11.0] [3.0, 12.0] 2",
    ]
    *second, more = fresh(SHARED, **environment).splitlines()
    assert second == first
    assert int(more) >= int(hits) + 2


@jax.custom_batching.custom_vmap
def doubled(x):
    return scaled(x)[0]


@doubled.def_vmap
def _(size, is_batched, x):
    return doubled(x), True


@pytest.mark.slow
def test_workers_are_sent_the_kernels(monkeypatch):
    """With the programs that call them, which are not traced there."""

    def refuse(*args, **options):
        raise AssertionError("pickled")

    monkeypatch.setattr(distributed, "pickled", refuse)
    for name, value in eo.worker_environment().items():
        monkeypatch.setenv(name, value)
    ens = eo.EnsembleProblem(
        eo.ODEProblem(lambda u, p, t: -u, jnp.ones(3), (0.0, 1.0)),
        lambda prob, ctx: eo.remake(prob, u0=prob.u0 * ctx.sim_id),
        output_func=lambda sol, ctx: (doubled(sol.u[-1]), False),
    )
    here = eo.solve(ens, eo.Tsit5(), eo.EnsembleSerial(), trajectories=10)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        there = eo.solve(ens, eo.Tsit5(), eo.EnsembleDistributed(pool), trajectories=10)
    assert jnp.all(here.u > 1)
    np.testing.assert_array_equal(there.u, here.u)


def test_a_worker_that_cant_compile_says_so(monkeypatch):
    f = jax.jit(lambda x, mask: [jnp.where(mask[:, None], scaled(x, add=66.0)[0], 0.0)])
    structs = [jax.ShapeDtypeStruct((4, 2), jnp.float64), jax.ShapeDtypeStruct((4,), bool)]
    kernels = kernels_in(f.trace(*structs).jaxpr)
    export = jax.export.export(f, platforms=["cpu"], disabled_checks=safety_checks(kernels))
    program = worker.ExportedProgram(bytes(export(*structs).serialize()), 1, kernels)
    assert worker._size(program) == len(program.serialised) + len(kernels[0].text)
    rows, kept = np.ones((3, 2)), {"hash": program}
    task = worker.Task("hash", worker.environment(), (rows,), (), 4, 1, 1, kept)
    with monkeypatch.context() as patched:
        patched.setattr(calls, "_loaded", {})
        patched.setattr(compiler, "available", lambda: "there is no LLVM.")
        refused = worker.run(task)
    assert isinstance(refused, worker.TaskRefusal)
    assert refused.why.endswith("can't compile the kernels of the program: there is no LLVM")
    np.testing.assert_array_equal(worker.run(task).each[0], 2 * rows + 66)


def test_kernels_that_are_registered_again():
    kernel = calls.NativeKernel(axpy(2, 55.0), "axpy", 3, 2)
    register([kernel, kernel])
    register([pickle.loads(pickle.dumps(kernel))])
    np.testing.assert_array_equal(scaled(numbers(), width=2, add=55.0)[0], 2 * numbers() + 55)
