"""What the numbers of a solve depend on, in short: the same for the same, in every process."""

import contextlib
import hashlib
import importlib.metadata
import re
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np

from .executors.job import Job
from .keys import raw
from .options import time_dtype_of
from .program import params_of, Program


def fingerprint(job: Job) -> dict[str, Any]:
    """What the numbers depend on, by name; what begins with # is a digest."""
    from . import __version__

    plan, shared = job.plan, job.trajectories.shared
    packages = (
        "jax",
        "jaxlib",
        *(("diffrax", "equinox", "lineax", "optimistix") * (plan.engine.name == "diffrax")),
    )
    versions = {"ensembleode": __version__} | {p: importlib.metadata.version(p) for p in packages}
    fields = {
        "#f": plan.field,
        "#output_func": plan.output,
        "#the solver's options": plan.method.value,
        "#saveat": (plan.saving, shared.saveat, shared.count),
        "#u0": (plan.state, shared.u0),
        "#p": shared.p,
        "#what f closes over": shared.consts,
        "#tspan": (shared.t0, shared.t1),
        "#abstol": shared.abstol,
        "#reltol": shared.reltol,
        "#dt": shared.dt,
        "#key (or seed)": job.key,
        "#what output_func closes over": job.output_consts,
        "#which of them prob_func changes": plan.batched,
    }
    digests = {name: f"{digest_of([_text(value)]):016x}" for name, value in fields.items()}
    return {
        "engine": plan.engine.name,
        "maxiters": plan.maxiters,
        "backend": jax.default_backend(),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "time": str(time_dtype_of(plan.state)),
        **digests,
    }


def _text(value: Any) -> bytes:
    """The same for the same, in every process."""
    leaves, structure = jtu.tree_flatten(value, is_leaf=lambda x: isinstance(x, Program))
    parts = [str(structure).encode()]
    for x in leaves:
        if isinstance(x, Program):
            parts += [str(x.out_tree).encode(), *_texts_of(x.jaxpr)]
        elif callable(x) and hasattr(x, "__code__"):
            parts += _texts_of_function(x)
        elif hasattr(x, "shape") and hasattr(x, "dtype"):
            parts.append(f"{x.shape} {x.dtype}".encode())
            parts.append(np.asarray(raw(x)).tobytes() if eqx.is_array_like(x) else b"")
        else:
            parts.append(repr(x).encode())
    # Functions and thunks have addresses, and code where it is written.
    where = rb'0x[0-9a-f]{6,}|file "[^"]*", line \d+'
    return b"\n".join(re.sub(where, b"", part) for part in parts)


def _texts_of(jaxpr: Any) -> Iterator[bytes]:
    """Of a jaxpr, and of the constants and functions in it, at any depth."""
    yield str(jaxpr).encode()
    for eqn in jaxpr.eqns:
        for x in params_of(eqn):
            if hasattr(x, "jaxpr") and hasattr(x, "consts"):
                for const in x.consts:
                    yield _text(const)
                yield from _texts_of(x.jaxpr)
            elif hasattr(x, "eqns"):
                yield from _texts_of(x)
            elif hasattr(x, "callback_func"):  # of a pure_callback
                yield from _texts_of_function(x.callback_func)


def _texts_of_function(fn: Any) -> Iterator[bytes]:
    """Of what a Python function does, and of what it closes over."""
    code = getattr(fn, "__code__", None)
    if code is None:
        yield repr(fn).encode()
        return
    yield code.co_code + repr((code.co_consts, code.co_names)).encode()
    for cell in fn.__closure__ or ():
        with contextlib.suppress(ValueError):  # not filled yet
            yield _text(cell.cell_contents)


def digest_of(parts: list) -> int:
    """Eight bytes that are never zero."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else np.ascontiguousarray(part).tobytes())
    return int.from_bytes(digest.digest(), "little") or 1
