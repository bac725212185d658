"""The machine, for gpu_check.py: what there is, the smallest launches, what it can do at most, and
whether launches keep to what XLA promises: order, memory and sizes."""

import functools
import math
import subprocess
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common.contenders import Skip
from gpu_check_times import row_of
from gpu_check_values import is_lost as is_lost, KERNEL, lorenz_ensemble, way_of
from gpu_peaks import peak_of

import ensembleode as eo
from ensembleode.engines.compiled.llvm.builder import ElementPointer, F32, I64
from ensembleode.engines.compiled.llvm.module import Module
from ensembleode.engines.compiled.xla import launch
from ensembleode.tools import doctor


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def checks(part: str, *, small: bool, references: str) -> dict[str, Callable[[], dict[str, Any]]]:
    every = PARTS[part]
    return {name: functools.partial(check, small) for name, check in every.items()}


def passed(is_right: bool = True, **found: Any) -> dict[str, Any]:
    return {"result": "passed" if is_right else "failed", **found}


def needs_gpu() -> None:
    if not on_gpu():
        raise Skip("there is no GPU")


#
# What there is
#


def gpu(small: bool) -> dict[str, Any]:
    """The GPU of JAX, and what its driver says of it."""
    device = jax.devices()[0]
    about = {"device": device.device_kind if on_gpu() else "no GPU"}
    about |= {"platform": device.client.platform_version.replace("\n", ", ")}
    if not small:
        about |= {"driver": _asked("driver_version,memory.total,clocks.max.sm,power.limit")}
    print_about(about)
    return passed(on_gpu() or small, note=f"{about['device']}, {about.get('driver', 'no driver')}")


def print_about(about: dict[str, Any]) -> None:
    """Facts for the head of the table."""
    from gpu_check import say

    say(about=about)


def _asked(fields: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi: {error}"
    return done.stdout.strip()


def computes(small: bool) -> dict[str, Any]:
    """That JAX itself works here."""
    x = jnp.arange(1024.0)
    found = jax.jit(lambda x: jnp.sum(jnp.sin(x) ** 2 + jnp.cos(x) ** 2))(x)
    return passed(abs(float(found) - 1024.0) < 0.1, note=f"{found:.2f} of 1024")


def doctored(small: bool) -> dict[str, Any]:
    report = doctor.report()
    problems = [f"{x['problem']} {x['remedy']}" for x in report["problems"]]
    extras = [name for name, extra in report["extras"].items() if extra["missing"]]
    about = {"gpu, by doctor": report["gpu"], "devices": ", ".join(report["devices"])}
    print_about(about | {"threads": report["threads"], "extras that are not there": extras})
    return passed(not problems, note="; ".join([report["gpu"], *problems]))


def kernels_can_run(small: bool) -> dict[str, Any]:
    needs_gpu()
    pieces = launch.missing()
    note = f"{launch.launcher().__name__}, {launch.arch_here()}" if not pieces else " ".join(pieces)
    return passed(not pieces, note=note)


#
# The smallest kernel
#


THREADS = 1000


@functools.cache
def _saxpy() -> launch.PtxKernel:
    """`a x` of as many numbers, and `a + x`."""
    m = Module(1, is_gpu=True)
    pointers = ("%a", "%x", "%y", "%z")
    parameters = ["i64 %thread", "i64 %threads", *(f"ptr {x}" for x in pointers)]
    with m.function("saxpy", parameters, attributes="alwaysinline") as b:
        a, x, y, z = (ElementPointer(b, name, F32) for name in pointers)
        i = b.parameter("%thread", I64)

        def one() -> None:
            y.store(i, a.load(0) * x.load(i))
            z.store(i, a.load(0) + x.load(i))

        b.if_(i < THREADS, one)
        b.return_()
    return launch.PtxKernel(m.text, "saxpy", 2, 2)


def saxpy(a: Any, x: Any, how: Any = None) -> list[Any]:
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    blocks = -(-THREADS // launch.BLOCK)
    return (how or launch.launcher())(_saxpy(), blocks, [a, x], [like, like])


def launched(how: Any) -> dict[str, Any]:
    a, x = np.float32(2.0), np.arange(THREADS, dtype=np.float32)
    y, z = jax.jit(lambda a, x: saxpy(a, x, how))(a, x)
    return passed(bool((np.asarray(y) == a * x).all() and (np.asarray(z) == a + x).all()))


def by_xla(small: bool) -> dict[str, Any]:
    needs_gpu()
    if not launch._knows_target():
        raise Skip("the plugin has no call for PTX")
    return launched(launch.custom_call)


def by_triton(small: bool) -> dict[str, Any]:
    """The second launcher, for when the first is gone."""
    needs_gpu()
    if launch._triton() is None:
        raise Skip("the plugin has no call for Triton's kernels")
    return launched(launch.triton_call)


def smallest_solve(small: bool) -> dict[str, Any]:
    prob = eo.ODEProblem(lambda u, p, t: -u, jnp.ones(1), (0.0, 1.0))
    ens = eo.EnsembleProblem(prob)
    u = eo.solve(ens, eo.Tsit5(), eo.EnsembleGPUKernel(), trajectories=1).u
    off = abs(float(u[0, -1, 0]) - math.exp(-1.0))
    return passed(off < 1e-3, note=f"{off:.1e} from exp(-1)")


#
# What the machine can do
#


def copied(small: bool) -> dict[str, Any]:
    """Read and write of device memory."""
    x = jnp.ones(2**16 if small else 2**29, jnp.float32)
    row = row_of(jax.jit(lambda x: x + 1.0), (x,))
    rate = 2 * x.nbytes / row["best"]
    row["note"] = f"{rate / 1e9:.4g} GB/s"
    return row | ({"memory_fraction": rate / peak.memory} if (peak := _peak()) else {})


def multiplied(real: str, small: bool) -> dict[str, Any]:
    """A chain of fused multiply-adds in each thread."""
    length, n = 512, 2**12 if small else 2**24
    if real == "float64" and not small:
        n //= 2

    def chain(x: Any, a: Any, b: Any) -> Any:
        for _ in range(length):
            x = x * a + b
        return x

    with jax.enable_x64(real == "float64"):
        x, a, b = (jnp.asarray(np.asarray(v, real)) for v in (np.ones(n), 0.999, 1e-3))
        row = row_of(jax.jit(chain), (x, a, b))
    rate = 2 * length * n / row["best"]
    row["note"] = f"{rate / 1e12:.4g} TFLOP/s"
    return row | ({"flops_fraction": rate / getattr(peak, real)} if (peak := _peak()) else {})


def _peak() -> Any:
    return peak_of(jax.devices()[0].device_kind)


def latency(small: bool) -> dict[str, Any]:
    """A program of one small operation of XLA, called in a row; and waited for each time."""
    add, x = jax.jit(lambda x: x + 1.0), jnp.ones(128)
    row = row_of(add, (x,))
    return row | {"note": f"one call, waited for: {1e6 * row['waited']:.3g} us"}


def kernel_latency(small: bool) -> dict[str, Any]:
    """A program that launches a hundred kernels of ours, one after the other: of each."""
    needs_gpu()
    a, x = jnp.float32(1.0), jnp.ones(THREADS, jnp.float32)
    row = row_of(jax.jit(lambda a, x: _chain(lambda x: saxpy(a, x)[0], x, 100)), (a, x))
    return row | {"note": f"{1e6 * row['best'] / 100:.3g} us for each of a hundred"}


def _chain(f: Callable, x: Any, times: int) -> Any:
    for _ in range(times):
        x = f(x)
    return x


#
# Order, memory, sizes
#


def in_order(small: bool) -> dict[str, Any]:
    """Kernels read what XLA has just written, and XLA and the next kernel read what they write. A
    launch that didn't wait would show as other bits, in some run or other."""
    n, runs = (64, 3) if small else (2**17, 40)
    way = way_of(KERNEL)

    def solve(u0: Any) -> Any:
        prob = eo.ODEProblem(lambda u, p, t: -p * u, u0[0], (0.0, 1.0), jnp.float32(0.5))
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=u0[ctx.index]))
        return way.solve(ens, eo.Tsit5(), trajectories=n, save_start=False).u[:, -1]

    def once(x: Any) -> Any:
        return jnp.cos(solve(jnp.sin(x) + 1.5)) * 1.5

    x = jnp.asarray(np.random.default_rng(0).normal(size=(n, 2)).astype(np.float32))
    together = jax.jit(lambda x: _chain(once, x, 4))
    alone, expected = jax.jit(once), x
    for _ in range(4):
        expected = jax.block_until_ready(alone(expected))
    found = [together(x) for _ in range(runs)]
    in_a_row = [_chain(alone, x, 4) for _ in range(runs)]
    off = [float(jnp.max(jnp.abs(y - expected))) for y in (*found, *in_a_row)]
    # (In one program, XLA may fuse the operations between the kernels in another way, and rounding
    # may then change a step.)
    others = sum(bool((y != found[0]).any()) for y in found)
    others += sum(bool((y != expected).any()) for y in in_a_row)
    note = f"{others} of {2 * runs} runs have other bits"
    return passed(max(off) < 1e-3 and not others, difference=max(off), allowed=1e-3, note=note)


def operands_are_left_alone(small: bool) -> dict[str, Any]:
    """Where XLA reads the operands of a kernel after it, and where their buffers are given away."""
    n = 64 if small else 2**17
    way = way_of(KERNEL)

    def both(u0: Any) -> Any:
        prob = eo.ODEProblem(lambda u, p, t: -u, u0[0], (0.0, 1.0))
        ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, u0=u0[ctx.index]))
        u = way.solve(ens, eo.Tsit5(), trajectories=n, save_start=False).u[:, -1]
        return u, u + u0

    start = np.random.default_rng(0).normal(size=(n, 2)).astype(np.float32)
    kept = jnp.asarray(start)
    end, total = map(np.asarray, jax.jit(both)(kept))
    given = map(np.asarray, jax.jit(both, donate_argnums=0)(jnp.array(start)))
    same = [np.array_equal(x, y) for x, y in zip((end, total), given, strict=True)]
    right = np.allclose(end, start * math.exp(-1.0), atol=1e-2)
    right &= np.allclose(total, end + start, atol=1e-6)
    return passed(right and all(same) and np.array_equal(np.asarray(kept), start))


def beyond_two_gib(small: bool) -> dict[str, Any]:
    """Results of more bytes than 32 bits can count: the last trajectories, beside those alone."""
    n, rows = (256, 20) if small else (2**20, 600)
    size = 4 * 3 * n * rows
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if memory is not None and memory < 4 * size:
        raise Skip(f"the GPU has {memory / 1e9:.3g} GB, and this takes {4 * size / 1e9:.3g}")
    sim = _saved(n, rows, n, batch_size=n)
    few = np.unique(np.linspace(0, n - 1, 128).astype(int))
    expected = _saved(len(few), rows, n, few)
    found = np.asarray(sim.u[few])
    off = float(np.max(np.abs(found - np.asarray(expected.u))))
    note = f"{size / 1e9:.3g} GB"
    return passed(off < 1e-3, difference=off, allowed=1e-3, note=note)


def _saved(n: int, rows: int, of: int, which: Any = None, **options: Any) -> Any:
    """Lorenz of many rows: all of `of` trajectories, or some of them."""
    rhos = np.linspace(0.0, 21.0, of, dtype=np.float32)
    rhos = jnp.asarray(rhos if which is None else rhos[which])
    prob = lorenz_ensemble(2, "float32").prob
    ens = eo.EnsembleProblem(prob, lambda prob, ctx: eo.remake(prob, p=rhos[ctx.index]))
    times = np.linspace(0.0, 1.0, rows, dtype=np.float32)
    alg, options = eo.Tsit5(), {"saveat": times, "trajectories": n, **options}
    return eo.solve(ens, alg, eo.EnsembleGPUKernel(), **options)


def batches(small: bool) -> dict[str, Any]:
    """An ensemble whose trajectories take more memory together than its batches may: their sum."""
    n, batch, rows = (1000, 100, 10) if small else (2**21, 2**16, 100)
    ens = lorenz_ensemble(n, "float32")
    ens = eo.EnsembleProblem(ens.prob, ens.prob_func, reduction=eo.sum_reduction)
    options = {"saveat": np.linspace(0.0, 1.0, rows, dtype=np.float32), "trajectories": n}
    before = _in_use()
    total = eo.solve(ens, eo.Tsit5(), eo.EnsembleGPUKernel(), batch_size=batch, **options).u
    taken, whole = _in_use() - before, 12 * n * rows
    mean = np.asarray(total)[-1] / n
    note = f"of {whole / 1e9:.3g} GB, {taken / 1e9:.3g} GB at a time; mean end {mean.round(3)}"
    # (Several batches may be on their way.)
    return passed(bool(np.isfinite(mean).all()) and taken < whole / 2, note=note)


def _in_use() -> int:
    """The most bytes yet; 0 where the device doesn't say."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


PARTS: dict[str, dict[str, Callable[[bool], dict[str, Any]]]] = {
    "device": {
        "the GPU": gpu,
        "an operation of JAX": computes,
        "ensembleode doctor": doctored,
        "kernels can run": kernels_can_run,
    },
    "launch": {
        "XLA's custom call by kernel": by_xla,
        "one trajectory by kernel": smallest_solve,
        "Triton's call by kernel": by_triton,
    },
    "limits": {
        "memory: x + 1 by jit": copied,
        "multiply-add, float32 by jit": functools.partial(multiplied, "float32"),
        "multiply-add, float64 by jit": functools.partial(multiplied, "float64"),
        "launch: x + 1 by jit": latency,
        "launch: a hundred by kernel": kernel_latency,
    },
    "streams": {
        "dependent launches by kernel": in_order,
        "operands are left alone by kernel": operands_are_left_alone,
    },
    "large": {
        "batches by kernel": batches,
        "beyond 2^31 bytes by kernel": beyond_two_gib,
    },
}
