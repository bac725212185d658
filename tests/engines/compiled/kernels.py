"""Small kernels for the tests, and fresh processes to run them in."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

from ensembleode.engines.compiled.llvm.builder import ElementPointer, F64, I64
from ensembleode.engines.compiled.llvm.module import Module
from ensembleode.engines.compiled.xla.call import call


REPOSITORY = pathlib.Path(__file__).parents[3]


def axpy(width, add=1.0, *, is_gpu=False):
    """`axpy(a, x, n) -> y, s`: `y = a * x + add` and the sum of `x`, of `n` numbers."""
    m = Module(width, is_gpu=is_gpu)
    names = ("a", "x", "n", "y", "s")
    linkage = "ptx_kernel" if is_gpu else "external"
    with m.function("axpy", [f"ptr noalias %{x}" for x in names], linkage=linkage) as b:
        a, x, y, s = (ElementPointer(b, f"%{name}", F64) for name in ("a", "x", "y", "s"))
        factor, n = a.load(0), ElementPointer(b, "%n", I64).load(0)
        i, sums = b.variable(I64, 0, of_lanes=False), b.variable(F64, 0.0)

        def some():
            at = b.lane_numbers() + i.get()
            mask = at < n
            found = x.gather(at, mask, 0.0)
            y.scatter(at, mask, factor * found + add)
            sums.set(sums.get() + found)
            i.set(i.get() + m.width)

        b.while_(lambda: i.get() < n, some)
        total = b.variable(F64, 0.0, of_lanes=False)
        b.for_(m.width, lambda lane: total.set(total.get() + b.entry(sums.get(), lane)))
        s.store(0, total.get())
        b.return_()
    return m.text


def scaled(x, a=2.0, *, width=4, add=1.0):
    """`a * x + add`, and the sum of `x`."""
    n = x.size
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((), x.dtype)]
    return call(axpy(width, add), "axpy", [jnp.asarray(a, x.dtype), x, np.int64(n)], outputs)


# Where its operand and its result are.
WHERE = """
define void @where(ptr %x, ptr %y) {
  %a = ptrtoint ptr %x to i64
  %b = ptrtoint ptr %y to i64
  %second = getelementptr i64, ptr %y, i64 1
  store i64 %a, ptr %y
  store i64 %b, ptr %second
  ret void
}
"""


def fresh(script, **environment):
    """What a new process prints."""
    every = os.environ | {"PYTHONPATH": str(REPOSITORY), "JAX_ENABLE_X64": "1"} | environment
    done = subprocess.run(
        [sys.executable, "-c", script], env=every, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
