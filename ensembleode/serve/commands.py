"""The command `ensembleode serve`, after its options are parsed."""

import ast
import os
from typing import Any

from ..cli import failed
from ..ground.devices.cpu_devices import cores, share
from ..tools.scripts import in_users_code, object_named, ScriptError, split
from .registry import Registry


def run_serve(registry: str, *, ensemblealg: str | None, tokens: str | None, **options: Any) -> int:
    """Serve until the process is told to end; returns its exit code."""
    from . import tokens as tokens_of

    # A batch that never returns occupies as many threads of XLA's pool as there are cores. A larger
    # pool leaves some for other problems. (XLA reads this variable when its backend starts.)
    os.environ.setdefault("NPROC", str(4 * cores()))
    share()
    try:
        from .process import run

        run(
            _registry(registry),
            ensemblealg=None if ensemblealg is None else _ensemblealg(ensemblealg),
            tokens=tokens_of.read(tokens),
            **options,
        )
    except (ScriptError, ValueError, TypeError, ImportError, OSError) as e:
        if in_users_code(e):
            raise  # shows the traceback
        return failed(e)
    return 0


def _registry(name: str) -> Registry:
    found = object_named(*split(name))
    if callable(found):
        found = found()
    if not isinstance(found, Registry):
        raise ScriptError(
            f"{name} must be an eo.serve.Registry, or a function that makes one; it is "
            f"{'missing' if found is None else type(found).__name__}."
        )
    return found


def _ensemblealg(text: str) -> Any:
    """The ensemble algorithm from text such as `EnsembleThreads` or `EnsembleThreads(n=4)`."""
    from ..problem import ensemble

    try:
        node = ast.parse(text, mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        assert isinstance(call.func, ast.Name)
        kind = getattr(ensemble, call.func.id)
        assert issubclass(kind, ensemble.EnsembleAlgorithm)
        args = [ast.literal_eval(x) for x in call.args]
        options = {str(x.arg): ast.literal_eval(x.value) for x in call.keywords}
    except (SyntaxError, AssertionError, AttributeError, TypeError, ValueError) as e:
        raise ScriptError(
            f"ensemblealg must be an ensemble algorithm, such as EnsembleThreads, or "
            f"'EnsembleThreads(4)'; got {text!r}."
        ) from e
    return kind(*args, **options)
