"""Intervals by resampling problems, the unit that benchmarks are samples of.

Figures are means over the problems of each benchmark (a stratum), and their unweighted mean over benchmarks (macro).
One resampling serves all of them: every run, metric and difference sees the same problems drawn, which is what makes
differences paired. Of n problems n - 1 are drawn, with replacement: then the variance of a mean is the unbiased one,
s^2 / n, where n of n would give (n - 1) / n of it (Rao and Wu, JASA 83, 1988), which shows with 30 problems. Intervals
are percentiles: unlike BCa's their ends need no jackknife, cannot leave [0, 1], and stay defined where all problems
agree. What coverage that gives is measured by benchmarks/bootstrap_coverage.py. Nothing here knows files or tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spot_async.types import Float64Array

BLOCK = 1 << 20  # counts in memory at a time


class Interval(NamedTuple):
    """Both ends, element by element."""

    low: Float64Array
    high: Float64Array


def resampled_means(tables: Sequence[npt.ArrayLike], *, draws: int, seed: int) -> list[Float64Array]:
    """For each benchmark's values (problems, *rest), the means over its drawn problems, (draws, *rest).

    All columns of a table see the same problems drawn. Equal seeds give equal draws, however many tables follow.
    """
    random = np.random.default_rng(seed)
    return [_means(random, np.asarray(table, dtype=np.float64), draws) for table in tables]


def macro(per_benchmark: Sequence[Float64Array]) -> Float64Array:
    """The unweighted mean over benchmarks, of draws or of figures themselves."""
    mean: Float64Array = np.mean(np.stack(per_benchmark), axis=0)
    return mean


def percentile_interval(draws: Float64Array, confidence: float) -> Interval:
    """Both ends (*rest) of the central share `confidence` of draws (draws, *rest)."""
    tail = (1.0 - confidence) / 2
    low, high = np.quantile(draws, [tail, 1.0 - tail], axis=0)
    return Interval(low, high)


def _means(random: np.random.Generator, table: Float64Array, draws: int) -> Float64Array:
    """(draws, *rest) of a table (problems, *rest). In blocks, or the draws of 12,000 problems would fill memory."""
    block = max(1, BLOCK // len(table))
    sizes = [min(block, draws - start) for start in range(0, draws, block)]
    drawn = max(1, len(table) - 1)  # a single problem has no spread, and stays itself
    chances = np.full(len(table), 1.0 / len(table))
    counts = (random.multinomial(drawn, chances, size=size) for size in sizes)
    # Whole numbers of draws, divided last: shares of them need not sum to 1 exactly, and means of 1 would leave [0, 1].
    return np.concatenate([np.tensordot(each.astype(np.float64), table, axes=1) for each in counts]) / drawn
