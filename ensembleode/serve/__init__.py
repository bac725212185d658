"""The batching service: many small requests become one ensemble.

- `registry.py`: the problems that are served, and the limits of requests.
- `solving.py`: a problem as compiled functions of padded arrays.
- `batcher.py`: from requests to batches and back; `lines.py`: what waits, and what is next.
- `wire.py`: bodies to numbers and back; `queries.py`: what is asked for, within the limits, and
    answered; `calls.py`: requests and answers.
- `service.py`: what the endpoints share; `app.py`: the endpoints; `process.py`: the process.
- `jobs.py`: long ensembles, kept in a folder; `ensembles.py`: what they consist of;
    `through_batcher.py`: how they are solved; `metrics.py`, `tokens.py`.
- `client.py`: the clients; `client_requests.py`: what they ask; `client_jobs.py`: the handles of
    jobs; `exchange.py`: what they read; `remote.py`: their solves in JAX's transformations.
- `page/`: what is at `/`.

Names are imported when they are first asked for, and the packages of the extra `serve` where they
are used, so that a registry can be made without these packages.
"""

import importlib
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from .app import create_app as create_app
    from .process import run as run
    from .registry import Limits as Limits, Registry as Registry


_PLACES = {"Limits": "registry", "Registry": "registry", "create_app": "app", "run": "process"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PLACES[name]}", __name__), name)
