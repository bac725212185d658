"""Functions that contain solves, as files: traced once, and called in other processes."""

import dataclasses
import json
import os
import zipfile
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.tree_util as jtu
from jax import Array
from jaxtyping import PyTree

from ..engines.compiled.llvm.compiler import CompileError
from ..engines.compiled.llvm.machine import Machine
from ..engines.compiled.xla.call import NativeKernel, register
from ..engines.compiled.xla.exporting import exported_with_kernels, UnexportableError
from ..ground.files import written_whole
from ..ground.version import __version__


_PROGRAM, _KERNELS, _ABOUT = "program", "kernels.json", "about.json"


class ExportedFunction:
    """A function that was traced for arguments of certain shapes and dtypes; see
    [`export`][ensembleode.export]. It can be called, also inside of `jit`, and differentiated as
    often as was said when it was made.

    - `serialised`: the program, as `jax.export` writes it.
    - `program`: the `jax.export.Exported`, with the shapes in `in_avals` and `out_avals`.
    - `kernels`: the code that the program calls, besides what XLA makes. Without any, the file's
        member `program` can be read by `jax.export.deserialize` where this library isn't there.
    """

    def __init__(self, serialised: bytes, kernels: tuple[NativeKernel, ...]):
        self.serialised, self.kernels = serialised, kernels
        self._kept = register(kernels)  # as long as programs may be compiled that call them
        self.program = jax.export.deserialize(bytearray(serialised))

    def __call__(self, *args: Any) -> Array:
        return self.program.call(*args)

    def __repr__(self) -> str:
        inputs, outputs = (
            ", ".join(a.str_short() for a in avals)
            for avals in (self.program.in_avals, self.program.out_avals)
        )
        return f"ExportedFunction(({inputs}) -> ({outputs}), {len(self.kernels)} kernels)"

    def save(self, path: str | os.PathLike) -> None:
        """Write a file at `path` for [`load_exported`][ensembleode.load_exported].

        **Raises:** `OSError` that names the file, which then keeps its former content.
        """
        about = {"ensembleode": __version__, "jax": jax.__version__}
        kernels = [dataclasses.asdict(kernel) for kernel in self.kernels]
        with written_whole(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as there:
            there.writestr(_ABOUT, json.dumps(about))
            there.writestr(_KERNELS, json.dumps(kernels))
            there.writestr(_PROGRAM, self.serialised)


def export(fn: Callable, *args: Any, derivatives: int = 0) -> ExportedFunction:
    """Trace `fn(*args)`, and whatever it solves, into a function that can be saved, and called
    where `fn` isn't known.

    `eo.export(simulate, u0s).save("model.zip")` writes a file; in any process,
    `eo.load_exported("model.zip")` is the function again.

    What `fn` closes over, such as a trained network, is a part of the program. The compiled engine
    goes with its kernels, for CPUs: the file is read where this library is installed, on any CPU
    that is as good as this one. Where `fn` solves by `engine="diffrax"`, the program is JAX's
    alone.

    **Arguments:**

    - `fn`: a function of pytrees of arrays, which returns such a pytree.
    - `args`: arguments, of which the shapes and dtypes count; `jax.ShapeDtypeStruct`s will do.
        Containers of other libraries, such as Equinox's modules, can't be arguments or results.
    - `derivatives`: how often the result can be differentiated in reverse mode (`jax.grad`).

    **Raises:** `TypeError` for arguments or results that can't be those of a file; `ValueError` for
    a program that calls functions of this process (`jax.pure_callback`, Julia), or that is spread
    over several devices.
    """
    for name, found in (
        ("the arguments", args),
        ("the results", jax.eval_shape(jax.jit(fn), *args)),
    ):
        _check_containers(name, found)
    try:
        serialised, kernels = exported_with_kernels(fn, args, derivatives=derivatives)
    except UnexportableError as e:
        raise ValueError(
            "export: the function calls what exists only in this process (a pure_callback, Julia, "
            'or kernels for a GPU), and no file holds that: give its solves engine="diffrax", or '
            f"leave the call out. JAX says: {str(e).splitlines()[0]}"
        ) from e
    made = ExportedFunction(serialised, kernels)
    if made.program.nr_devices > 1:
        raise ValueError(
            f"export: solves are spread over {made.program.nr_devices} devices of this process, "
            "and the file could be used only where there are as many: solve by EnsembleSerial()."
        )
    return made


def load_exported(path: str | os.PathLike) -> ExportedFunction:
    """The function that [`ExportedFunction.save`][ensembleode.ExportedFunction] wrote at `path`.
    Nothing in the file is Python code, but its programs are run: read files of people that you
    trust.

    **Raises:** `OSError` where it can't be read; `ValueError` for a file of another kind, or of a
    version of JAX with another format; `CompileError` where this CPU lacks what its kernels need.
    """
    try:
        with zipfile.ZipFile(path) as file:
            about, kernels = (json.loads(file.read(name)) for name in (_ABOUT, _KERNELS))
            serialised = file.read(_PROGRAM)
    except (zipfile.BadZipFile, KeyError, json.JSONDecodeError) as e:
        raise ValueError(
            f"{os.fspath(path)} wasn't written by ExportedFunction.save, or is damaged: {e}"
        ) from e
    try:
        return ExportedFunction(serialised, tuple(map(_kernel, kernels)))
    except CompileError:
        raise
    except Exception as e:  # JAX checks nothing, so whatever the reader of its format raises
        raise ValueError(
            f"{os.fspath(path)} was written with ensembleode {about['ensembleode']} and JAX "
            f"{about['jax']}, and can't be read by ensembleode {__version__} and JAX "
            f"{jax.__version__}: export it again. ({e})"
        ) from e


def _kernel(fields: dict[str, Any]) -> NativeKernel:
    machine = fields.pop("machine")
    return NativeKernel(**fields, machine=None if machine is None else Machine(**machine))


def _check_containers(name: str, tree: PyTree) -> None:
    """Only containers of Python's own are serialised."""
    if isinstance(tree, (dict, list, tuple)) and not hasattr(tree, "_fields"):
        for x in tree.values() if isinstance(tree, dict) else tree:
            _check_containers(name, x)
    elif not jtu.all_leaves([tree]) and tree is not None:
        kind = type(tree)
        raise TypeError(
            f"export: {name} contain a {kind.__module__}.{kind.__qualname__}, which isn't a plain "
            "container (dict, list, tuple). Close over a network, or give its arrays "
            "(jax.tree.leaves(equinox.filter(network, equinox.is_array))); return arrays such as "
            "sim.u."
        )
