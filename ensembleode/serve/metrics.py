"""The metrics of a service, for Prometheus."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import accumulate

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from ..ground.retcode import ReturnCode


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_SIZES = tuple(2**k for k in range(15))
_CODES = [code.name for code in ReturnCode]


class Histogram:
    """Counts values up to each bound, in a single thread. The histogram of prometheus-client takes
    a lock for each count, and several microseconds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class _Histograms(Collector):
    """The histograms of all problems."""

    def __init__(self, name: str, what: str, bounds: tuple[float, ...], problems: list[str]):
        self.name, self.what = name, what
        self.of = {problem: Histogram(bounds) for problem in problems}

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self.name, self.what, labels=["problem"])
        for problem, histogram in self.of.items():
            names = [*map(str, map(float, histogram.bounds)), "+Inf"]
            buckets = list(zip(names, accumulate(histogram.counts), strict=True))
            family.add_metric([problem], buckets, histogram.total)
        yield family


class _Statuses(Collector):
    """Counts requests by problem and status, also in a single thread."""

    def __init__(self):
        self.counts: dict[tuple[str, int], int] = defaultdict(int)

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(
            "ensembleode_requests", "Requests by status.", labels=["problem", "status"]
        )
        for (problem, status), count in self.counts.items():
            family.add_metric([problem, str(status)], count)
        yield family


class Metrics:
    """The metrics of one app, in a registry of their own."""

    def __init__(self, problems: list[str], waiting: Callable[[], int]):
        self._registry = registry = CollectorRegistry()

        def histograms(name: str, what: str, buckets: tuple) -> dict[str, Histogram]:
            every = _Histograms(f"ensembleode_{name}", what, buckets, problems)
            registry.register(every)
            return every.of

        Gauge(
            "ensembleode_queue_trajectories", "Trajectories that wait.", registry=registry
        ).set_function(waiting)
        self.sizes = histograms("batch_size", "Trajectories of a batch.", _SIZES)
        self.waits = histograms("wait_seconds", "From a request to its first batch.", _SECONDS)
        self.solves = histograms("solve_seconds", "Of a batch.", _SECONDS)
        self.requests = histograms("request_seconds", "From a request to its answer.", _SECONDS)
        self._codes = Counter(
            "ensembleode_retcodes", "Trajectories by return code.", ["problem", "retcode"],
            registry=registry,
        )  # fmt: skip
        self._statuses = _Statuses()
        registry.register(self._statuses)

    def batch(self, problem: str, count: int, seconds: float) -> None:
        self.sizes[problem].observe(count)
        self.solves[problem].observe(seconds)

    def codes(self, problem: str, codes: np.ndarray) -> None:
        for code, count in enumerate(np.bincount(codes, minlength=len(_CODES))):
            if count:
                self._codes.labels(problem, _CODES[code]).inc(int(count))

    def request(self, problem: str, status: int, seconds: float) -> None:
        """Count a request; `problem` is empty where there is no problem of the requested name."""
        self._statuses.counts[problem, status] += 1
        if problem:
            self.requests[problem].observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)
