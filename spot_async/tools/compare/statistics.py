"""Computes a comparison: each method's figures, and their paired differences from the baseline, with intervals.

Columns are metric by metric (Avg@n, then Pass@k). Within a metric they are benchmark by benchmark, with the unweighted
mean over benchmarks last.

Intervals come from resampling problems, because a benchmark is a sample of problems. They are percentiles: unlike those
of BCa intervals, their ends need no jackknife, cannot leave [0, 1], and are defined even where all problems agree.
benchmarks/bootstrap_coverage.py measures the coverage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spot_async.config.evaluation import MEAN_COLUMN
from spot_async.errors import DataError
from spot_async.evaluation.metrics import pass_at_k_of_counts, standard_error
from spot_async.tools.compare.reading import PairedBenchmark
from spot_async.types import Float64Array


class Column(NamedTuple):
    """Which figure a column holds."""

    metric: str
    benchmark: str


@dataclass(frozen=True)
class Comparison:
    """Figures of all methods. All are shares in [0, 1], in arrays (methods, columns) where nothing else is said."""

    methods: Sequence[str]
    baseline: int
    columns: Sequence[Column]
    samples: int
    values: Float64Array
    intervals: Float64Array  # (2, methods, columns): their ends, low and high
    differences: Float64Array  # from the baseline; 0 in its own row
    difference_intervals: Float64Array  # likewise
    p_values: Float64Array  # (methods, benchmarks) of `exact_p`, with all problems together for their mean
    detectable: Float64Array  # (methods, benchmarks): differences of Avg@n that show in `POWER` of all tries
    confidence: float
    draws: int
    seed: int

    @property
    def metrics(self) -> list[str]:
        return list(dict.fromkeys(column.metric for column in self.columns))

    @property
    def benchmarks(self) -> list[str]:
        return list(dict.fromkeys(column.benchmark for column in self.columns))


def compare(
    methods: Sequence[str],
    benchmarks: Sequence[PairedBenchmark],
    *,
    baseline: int = 0,
    k: int | None = None,
    draws: int = 10_000,
    seed: int = 0,
    confidence: float = 0.95,
) -> Comparison:
    """Compare methods. `k` is that of Pass@k, by default the number of responses; DataError if they are fewer."""
    samples = benchmarks[0].samples
    k = samples if k is None else k
    if not 1 <= k <= samples:
        raise DataError(f"--pass-k {k}: there are {samples} responses a problem, so k is from 1 to {samples}")
    tables = [  # (problems, 2 metrics, methods)
        np.stack([pass_at_k_of_counts(each.correct, samples, j) for j in (1, k)], axis=1) for each in benchmarks
    ]
    values = [table.mean(axis=0) for table in tables]
    drawn = resampled_means(tables, draws=draws, seed=seed)
    names = [each.name for each in benchmarks]
    if len(benchmarks) > 1:
        values.append(macro(values))
        drawn.append(macro(drawn))
        names.append(MEAN_COLUMN)
    figures, draws_of = np.stack(values, axis=1), np.stack(drawn, axis=2)  # (2, columns, methods), (draws, 2, ...)
    leads = [np.sign(each.correct - each.correct[:, [baseline]]) for each in benchmarks]  # (problems, methods)
    leads += [np.concatenate(leads)] if len(leads) > 1 else []
    changes = [table[:, 0] - table[:, 0, [baseline]] for table in tables]  # (problems, methods)
    errors = [np.apply_along_axis(standard_error, 0, each) for each in changes]  # (methods,)
    errors += [np.linalg.norm(errors, axis=0) / len(errors)] if len(errors) > 1 else []
    change, change_of = figures - figures[..., [baseline]], draws_of - draws_of[..., [baseline]]

    def table(values: Float64Array) -> Float64Array:
        return values.reshape(-1, len(methods)).T

    def interval(draws_of: Float64Array) -> Float64Array:
        return np.stack([table(end) for end in percentile_interval(draws_of, confidence)])

    return Comparison(
        methods=methods,
        baseline=baseline,
        columns=[Column(metric, name) for metric in metric_names(samples, k) for name in names],
        samples=samples,
        values=table(figures),
        intervals=interval(draws_of),
        differences=table(change),
        difference_intervals=interval(change_of),
        p_values=np.array([[exact_p(column) for column in each.T] for each in leads]).T,
        detectable=sum(map(NormalDist().inv_cdf, (0.5 + confidence / 2, POWER))) * np.stack(errors, axis=1),
        confidence=confidence,
        draws=draws,
        seed=seed,
    )


def exact_p(leads: npt.ArrayLike) -> float:
    """Return the two-sided p of the exact sign test, of leads (problems,): 1, 0 or -1 for who has more right responses.

    With one response a problem this is McNemar's exact test.
    """
    signs = np.asarray(leads)
    better, worse = int((signs > 0).sum()), int((signs < 0).sum())
    pairs, ways, tail = better + worse, 1, 0
    for i in range(min(better, worse) + 1):
        tail += ways
        ways = ways * (pairs - i) // (i + 1)
    return float(min(1.0, 2 * tail / 2**pairs))


def metric_names(samples: int, k: int) -> tuple[str, str]:
    """Return the names of both metrics.

    Pass@k from more than k responses says so, since the paper generates k new responses for each k.
    """
    return f"Avg@{samples}", f"Pass@{k}" if k == samples else f"Pass@{k} (unbiased, from {samples})"


@dataclass(frozen=True)
class PassCurves:
    """Unbiased Pass@k for every k up to the number of responses."""

    benchmark: str
    samples: int
    values: Float64Array  # (samples, methods); row k - 1 is Pass@k


def pass_curves(benchmarks: Sequence[PairedBenchmark]) -> list[PassCurves]:
    """Return the Pass@k curves of each benchmark, and of their mean if there are several."""
    samples = benchmarks[0].samples
    curves = [
        np.stack([pass_at_k_of_counts(each.correct, samples, k).mean(axis=0) for k in range(1, samples + 1)])
        for each in benchmarks
    ]
    named = [PassCurves(each.name, samples, curve) for each, curve in zip(benchmarks, curves, strict=True)]
    return [*named, PassCurves(MEAN_COLUMN, samples, macro(curves))] if len(benchmarks) > 1 else named


BLOCK = 1 << 20  # so many counts are in memory at a time
POWER = 0.8  # the usual one


def resampled_means(tables: Sequence[npt.ArrayLike], *, draws: int, seed: int) -> list[Float64Array]:
    """Return for each benchmark's values (problems, *rest) the means over its drawn problems, (draws, *rest).

    All columns of a table see the same problems drawn, so that differences are paired. Equal seeds give equal draws,
    however many tables follow. Of n problems, n - 1 are drawn, with replacement. This gives the unbiased variance of a
    mean, s^2 / n. Drawing n would give (n - 1) / n of it (Rao and Wu, JASA 83, 1988), which shows with 30 problems.
    """
    random = np.random.default_rng(seed)
    return [_means(random, np.asarray(table, dtype=np.float64), draws) for table in tables]


def macro(per_benchmark: Sequence[Float64Array]) -> Float64Array:
    """Return the unweighted mean over benchmarks, of draws or of the figures themselves."""
    mean: Float64Array = np.mean(np.stack(per_benchmark), axis=0)
    return mean


def percentile_interval(draws: Float64Array, confidence: float) -> Float64Array:
    """Return the ends, low and high (2, *rest), of the central share `confidence` of draws (draws, *rest)."""
    tail = (1.0 - confidence) / 2
    return np.asarray(np.quantile(draws, [tail, 1.0 - tail], axis=0))


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
