"""The batching service: many small requests become one ensemble.

- `registry.py`: the problems that are served, and the limits of requests.
- `solving.py`: a problem as compiled functions of padded arrays.
- `batcher.py`: from requests to batches and back; `lines.py`: the items that wait, and the next
    batch.
- `bodies.py`: from the bodies of requests to arrays and back; `requests.py`: requests, checked
    against limits, and their answers; `calls.py`: requests and answers of HTTP.
- `service.py`: the state that the endpoints share; `app.py`: the endpoints; `process.py`,
    `http11.py`: the process, and HTTP.
- `jobs.py`: long ensembles, kept in a folder; `ensembles.py`: their specification;
    `through_batcher.py`: how they are solved.
- `metrics.py`: metrics for Prometheus; `tokens.py`: who may send requests.
- `client/`: the clients, the handles of jobs, and solves inside of JAX's transformations;
    `exchange.py`: requests and answers, for both sides.
- `page/`: the page at `/`.

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
