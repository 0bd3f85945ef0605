"""Computes confidence intervals by resampling problems. It knows no files and no tables.

Problems are resampled because a benchmark is a sample of problems. Figures are means over the problems of each
benchmark (a stratum), and the unweighted mean of those over benchmarks (macro).

* One resampling serves all figures: every run and difference sees the same problems drawn. That makes differences
  paired.
* Of n problems, n - 1 are drawn, with replacement. This gives the unbiased variance of a mean, s^2 / n. Drawing n would
  give (n - 1) / n of it (Rao and Wu, JASA 83, 1988), which shows with 30 problems.
* Intervals are percentiles. Unlike BCa intervals, their ends need no jackknife, cannot leave [0, 1], and are defined
  even where all problems agree.

benchmarks/bootstrap_coverage.py measures the coverage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spot_async.types import Float64Array

BLOCK = 1 << 20  # so many counts are in memory at a time


class Interval(NamedTuple):
    """The ends of intervals, as two arrays of the same shape."""

    low: Float64Array
    high: Float64Array


def resampled_means(tables: Sequence[npt.ArrayLike], *, draws: int, seed: int) -> list[Float64Array]:
    """Return for each benchmark's values (problems, *rest) the means over its drawn problems, (draws, *rest).

    All columns of a table see the same problems drawn. Equal seeds give equal draws, however many tables follow.
    """
    random = np.random.default_rng(seed)
    return [_means(random, np.asarray(table, dtype=np.float64), draws) for table in tables]


def macro(per_benchmark: Sequence[Float64Array]) -> Float64Array:
    """Return the unweighted mean over benchmarks, of draws or of the figures themselves."""
    mean: Float64Array = np.mean(np.stack(per_benchmark), axis=0)
    return mean


def percentile_interval(draws: Float64Array, confidence: float) -> Interval:
    """Return the ends (*rest) of the central share `confidence` of draws (draws, *rest)."""
    tail = (1.0 - confidence) / 2
    low, high = np.quantile(draws, [tail, 1.0 - tail], axis=0)
    return Interval(low, high)


def _means(random: np.random.Generator, table: Float64Array, draws: int) -> Float64Array:
    """Return the means (draws, *rest) of a table (problems, *rest).

    It works in blocks, since all draws of 12,000 problems would fill memory.
    """
    block = max(1, BLOCK // len(table))
    sizes = [min(block, draws - start) for start in range(0, draws, block)]
    drawn = max(1, len(table) - 1)  # a single problem has no spread, so it is always drawn
    chances = np.full(len(table), 1.0 / len(table))
    counts = (random.multinomial(drawn, chances, size=size) for size in sizes)
    # Whole counts are summed, and divided last. Shares would not sum to 1 exactly, and a mean of ones could exceed 1.
    return np.concatenate([np.tensordot(each.astype(np.float64), table, axes=1) for each in counts]) / drawn
