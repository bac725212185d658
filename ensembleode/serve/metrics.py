"""The metrics of a service, for Prometheus."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from ..ground.retcode import ReturnCode


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_SIZES = tuple(2**k for k in range(15))
_CODES = [code.name for code in ReturnCode]


class Histogram:
    """Counts values up to each bound, in a single thread. (That of prometheus-client takes a lock
    for each count.)"""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Metrics(Collector):
    """The metrics of one app, in a registry of their own."""

    def __init__(self, problems: list[str], waiting: Callable[[], int]):
        self._waiting = waiting
        self.sizes = {name: Histogram(_SIZES) for name in problems}
        self.waits, self.solves, self.requests = (
            {name: Histogram(_SECONDS) for name in problems} for _ in range(3)
        )
        self._codes = prometheus_client.Counter(
            "ensembleode_retcodes", "Trajectories by return code.", ["problem", "retcode"],
            registry=None,
        )  # fmt: skip
        self._statuses: Counter[tuple[str, int]] = Counter()
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(self)

    def batch(self, problem: str, count: int, seconds: float) -> None:
        self.sizes[problem].observe(count)
        self.solves[problem].observe(seconds)

    def codes(self, problem: str, codes: np.ndarray) -> None:
        for code, count in enumerate(np.bincount(codes, minlength=len(_CODES))):
            if count:
                self._codes.labels(problem, _CODES[code]).inc(int(count))

    def request(self, problem: str, status: int, seconds: float) -> None:
        """Count a request; `problem` is empty where there is no problem of the requested name."""
        self._statuses[problem, status] += 1
        if problem:
            self.requests[problem].observe(seconds)

    def collect(self) -> Iterator[Any]:
        what = "Trajectories that wait."
        yield GaugeMetricFamily("ensembleode_queue_trajectories", what, self._waiting())
        for name, what, histograms in (
            ("batch_size", "Trajectories of a batch.", self.sizes),
            ("wait_seconds", "From a request to its first batch.", self.waits),
            ("solve_seconds", "Of a batch.", self.solves),
            ("request_seconds", "From a request to its answer.", self.requests),
        ):
            family = HistogramMetricFamily(f"ensembleode_{name}", what, labels=["problem"])
            for problem, histogram in histograms.items():
                names = [*map(str, map(float, histogram.bounds)), "+Inf"]
                buckets = list(zip(names, accumulate(histogram.counts), strict=True))
                family.add_metric([problem], buckets, histogram.total)
            yield family
        yield from self._codes.collect()
        labels = ["problem", "status"]
        family = CounterMetricFamily("ensembleode_requests", "Requests by status.", labels=labels)
        for (problem, status), count in self._statuses.items():
            family.add_metric([problem, str(status)], count)
        yield family

    def text(self) -> bytes:
        return prometheus_client.generate_latest(self._registry)
