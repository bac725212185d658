"""What a service counts, for Prometheus."""

from collections.abc import Callable

import numpy as np
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    generate_latest,
    Histogram,
)

from ..solution import ReturnCode


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_SIZES = tuple(2**k for k in range(15))
_CODES = [code.name for code in ReturnCode]


class Metrics:
    """The metrics of one app, in a registry of their own.

    **Arguments:** `waiting`: how many trajectories are in the queue.
    """

    def __init__(self, problems: list[str], waiting: Callable[[], int]):
        self._registry = registry = CollectorRegistry()

        def histogram(name: str, what: str, buckets: tuple) -> dict[str, Histogram]:
            every = Histogram(
                f"ensembleode_{name}", what, ["problem"], buckets=buckets, registry=registry
            )
            # Looked up once, not with every request.
            return {problem: every.labels(problem) for problem in problems}

        Gauge(
            "ensembleode_queue_trajectories", "Trajectories that wait.", registry=registry
        ).set_function(waiting)
        self.sizes = histogram("batch_size", "Trajectories of a batch.", _SIZES)
        self.waits = histogram("wait_seconds", "From a request to its first batch.", _SECONDS)
        self.solves = histogram("solve_seconds", "Of a batch.", _SECONDS)
        self.requests = histogram("request_seconds", "From a request to its answer.", _SECONDS)
        self._codes = Counter(
            "ensembleode_retcodes", "Trajectories by return code.", ["problem", "retcode"],
            registry=registry,
        )  # fmt: skip
        self._statuses = Counter(
            "ensembleode_requests", "Requests by status.", ["problem", "status"], registry=registry
        )
        self._by_status: dict[tuple[str, int], Counter] = {}

    def batch(self, problem: str, count: int, seconds: float) -> None:
        self.sizes[problem].observe(count)
        self.solves[problem].observe(seconds)

    def codes(self, problem: str, codes: np.ndarray) -> None:
        for code, count in enumerate(np.bincount(codes, minlength=len(_CODES))):
            if count:
                self._codes.labels(problem, _CODES[code]).inc(int(count))

    def request(self, problem: str, status: int, seconds: float) -> None:
        """`problem` is empty where there is none of that name."""
        counter = self._by_status.get((problem, status))
        if counter is None:
            counter = self._statuses.labels(problem, str(status))
            self._by_status[problem, status] = counter
        counter.inc()
        if problem:
            self.requests[problem].observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)
