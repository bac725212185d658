"""Functions as programs of the small language, from what a user writes."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ensembleode.fields import Inputs, lower, parameters_of
from ensembleode.fields.derivatives.forwarding import forwarded
from ensembleode.fields.ir import Function
from ensembleode.fields.lowering.values import is_stored_as_bits
from ensembleode.ground.keys import raw
from ensembleode.tracing.program import trace

from .python_printer import run


# The package has the function under the module's name.
_lower = importlib.import_module("ensembleode.fields.lowering.lower")


class Lowered:
    """`fn(u, p, t)`, and how to evaluate it.

    **Arguments:**

    - `apart`: whether it may be taken apart into scalars.
    - `groups`: of the leaves of `p`, where they lie; what `fn` closes over is shared.
    - `storage`: the dtype in which parameters are stored.
    - `limits`: further arguments of `lower`.
    """

    def __init__(
        self,
        fn: Callable,
        u: Any,
        p: Any = (),
        t: Any = 0.0,
        *,
        apart: bool = True,
        groups: Sequence[str] | None = None,
        storage: Any = np.float64,
        **limits: int,
    ):
        program, consts = trace(fn, u, p, t)
        leaves = jtu.tree_leaves(p)
        groups = groups or ["own"] * len(leaves)
        self.groups = ["shared"] * len(consts) + list(groups)
        self.consts = consts
        self.storage = np.dtype(storage)
        inputs = Inputs.laid_out(parameters_of(program), self.groups, storage)
        if apart:
            self.function: Function = lower(program.jaxpr, inputs, **limits)
        else:
            with mock.patch.object(_lower, "scalarise", return_value=None):
                self.function = lower(program.jaxpr, inputs, **limits)

    def memory(self, p: Any) -> dict[str, np.ndarray]:
        """The groups of the parameters."""
        parts: dict = {group: [] for group in ("own", "shared", "forward")}
        for group, x in zip(self.groups, (*self.consts, *jtu.tree_leaves(p)), strict=True):
            x = np.asarray(raw(x)).reshape(-1)
            if group != "forward":
                as_bits = is_stored_as_bits(x.dtype, self.storage)
                x = x.view(self.storage) if as_bits else x.astype(self.storage)
            parts[group].append(x)
        return {k: np.concatenate(v) if v else np.empty(0) for k, v in parts.items()}

    def __call__(self, u: Any, p: Any = (), t: Any = 0.0, *, moves: bool = True) -> np.ndarray:
        """**Arguments:** `moves`: whether arrays that are only moved are made."""
        fn = self.function if moves else forwarded(self.function)
        return run(fn, np.asarray(u), **self.memory(p), t=t)


def agree(
    fn: Callable,
    u: Any,
    p: Any = (),
    t: Any = 0.25,
    rtol: float = 1e-12,
    expected: Any = None,
    **options: Any,
) -> list[Function]:
    """That both forms compute what JAX does, also without arrays that are only moved; the two
    programs."""
    u = jnp.asarray(u)
    expected = np.asarray(jax.jit(fn)(u, p, t) if expected is None else expected)
    programs = []
    for apart in (True, False):
        program = Lowered(fn, u, p, t, apart=apart, **options)
        got = program(u, p, t)
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got, expected.reshape(-1), rtol=rtol, atol=rtol)
        np.testing.assert_array_equal(program(u, p, t, moves=False), got)
        programs.append(program.function)
    return programs
