"""Quantiles of a stream of samples in bounded memory."""

from typing import NamedTuple

import numpy as np


class Digest(NamedTuple):
    """A t-digest of each column of samples that arrive in batches.

    The sorted samples of a column are cut into `bins`, which are narrow in the tails and wide in
    the middle. For each bin, its mean and its weight are kept. The rank of a quantile in the middle
    is off by less than 2/bins, and that of one in the tails by far less. As long as there are fewer
    samples than a third of the bins, quantiles are exact.
    Source: Dunning and Ertl, "Computing extremely accurate quantiles using t-digests",
    arXiv:1902.04023, the merging variant with the scale function k1.
    """

    mean: np.ndarray  # [bin, column], sorted; there are no bins whose weight is zero everywhere
    weight: np.ndarray  # [bin, column]
    low: np.ndarray  # [column], the least sample
    high: np.ndarray  # [column], the largest

    @classmethod
    def empty(cls, columns: int, bins: int) -> "Digest":
        zeros, nan = np.zeros((bins, columns)), np.full(columns, np.nan)
        return cls(zeros, zeros, nan, nan)

    def add(self, samples: np.ndarray) -> "Digest":
        """The digest with a batch `[sample, column]` added; NaN doesn't count as a sample."""
        if not len(samples):
            return self
        # Sorting values alone is several times faster than sorting them with their weights, so
        # the batch is cut into bins first, and then merged.
        ordered = np.sort(samples.astype(np.float64), axis=0)  # NaN last
        weights = (~np.isnan(ordered)).astype(np.float64)
        means, weights = _binned(np.nan_to_num(ordered, nan=0.0), weights, len(self.mean))
        mean = np.concatenate([self.mean, means])
        weight = np.concatenate([self.weight, weights])
        order = np.argsort(np.where(weight > 0, mean, np.inf), axis=0, kind="stable")
        mean, weight = (np.take_along_axis(x, order, axis=0) for x in (mean, weight))
        low = np.fmin(self.low, ordered[0])
        high = np.fmax(self.high, np.fmax.reduce(ordered, axis=0))
        return Digest(*_binned(mean, weight, len(self.mean)), low, high)

    def quantile(self, q: float) -> np.ndarray:
        """The quantile `q` of each column, NaN where there were no samples: `[column]`."""
        order = np.argsort(self.weight == 0, axis=0, kind="stable")
        mean, weight = (np.take_along_axis(x, order, axis=0) for x in self[:2])
        before = np.cumsum(weight, axis=0) - weight
        rank = before + (weight - 1) / 2  # of the middle of a bin; for a single sample, its own
        columns = zip(mean.T, weight.T, rank.T, self.low, self.high, strict=True)
        return np.array([_quantile(*column, q) for column in columns])


def _quantile(
    mean: np.ndarray, weight: np.ndarray, rank: np.ndarray, low: float, high: float, q: float
) -> float:
    used = np.count_nonzero(weight)
    if not used:
        return np.nan
    last = weight.sum() - 1
    ranks = np.concatenate([[0], rank[:used], [last]])
    return float(np.interp(q * last, ranks, np.concatenate([[low], mean[:used], [high]])))


def _binned(values: np.ndarray, weights: np.ndarray, bins: int) -> tuple:
    """Sorted weighted values `[value, column]` cut into bins: their means and weights."""
    columns = values.shape[1]
    middle = (np.cumsum(weights, axis=0) - weights / 2) / np.maximum(weights.sum(axis=0), 1)
    scale = np.arcsin(np.clip(2 * middle - 1, -1, 1)) / np.pi + 0.5
    which = np.minimum((bins * scale).astype(np.intp), bins - 1)
    index = (which * columns + np.arange(columns)).ravel()

    def over_bins(x):
        return np.bincount(index, x.ravel(), minlength=bins * columns).reshape(bins, columns)

    weight = over_bins(weights)
    return over_bins(weights * values) / np.maximum(weight, 1), weight
