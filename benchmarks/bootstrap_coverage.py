"""Measures how often the intervals of `spot-async compare` hold the truth, on simulated evaluations.

    python benchmarks/bootstrap_coverage.py                # 1,000 evaluations of two methods on six benchmarks

Problems are drawn from a population. A problem's chance to be solved by one response is Beta-distributed. The other
method's chance is either the same or a fresh draw, so that the two are correlated, like two students on the same
problems. The truth is the population's mean. Each evaluation draws new problems and new responses. Sizes and means are
those of the paper's six benchmarks for the 1.7B student, rounded.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from spot_async.evaluation.metrics import pass_at_k_of_counts
from spot_async.tools.compare.statistics import macro, percentile_interval, resampled_means
from spot_async.types import Float64Array

CONFIDENCE = 0.95
BLOCK = 100  # evaluations that are computed at a time
ROUNDING = 1e-12


@dataclass(frozen=True)
class Population:
    """The problems of one benchmark. The first method's chances are Beta(mean * concentration, ...)."""

    name: str
    problems: int
    mean: float
    concentration: float = 1.0
    shared: float = 0.8  # chance that a problem is as hard for the other method as for the first

    @property
    def beta(self) -> tuple[float, float]:
        return self.mean * self.concentration, (1.0 - self.mean) * self.concentration

    def truth(self, k: int) -> float:
        """Return E[1 - (1 - p)^k]. It is the same for both methods, whose chances have the same distribution."""
        a, b = self.beta
        missed = math.prod((b + i) / (a + b + i) for i in range(k))  # E[(1 - p)^k]
        return 1.0 - missed


PAPER = (
    Population("MATH500", 500, 0.67),
    Population("AMC23", 40, 0.40),
    Population("Minerva", 272, 0.28),
    Population("HMMT", 60, 0.02),
    Population("AIME24", 30, 0.12),
    Population("AIME25", 30, 0.07),
)


def coverage(
    populations: Sequence[Population], *, evaluations: int, samples: int, draws: int, seed: int
) -> dict[str, dict[str, float]]:
    """Return the share of evaluations whose interval holds the truth, by benchmark (and macro) and by figure."""
    # A seed for each block, since evaluations that share draws share their noise.
    seeds = range(seed, seed + -(-evaluations // BLOCK))
    blocks = [_held(populations, min(BLOCK, evaluations - i * BLOCK), samples, draws, s) for i, s in enumerate(seeds)]
    names = f"Avg@{samples}", f"Pass@{samples}", f"Avg@{samples} difference", f"Pass@{samples} difference"
    shares = np.concatenate(blocks, axis=-1).mean(axis=-1)  # (benchmarks and macro, figures)
    rows = [*(each.name for each in populations), "macro"]
    return {row: dict(zip(names, each.tolist(), strict=True)) for row, each in zip(rows, shares, strict=True)}


def _held(populations: Sequence[Population], evaluations: int, samples: int, draws: int, seed: int) -> npt.NDArray[Any]:
    """Return whether each interval holds the truth, (benchmarks and macro, figures, evaluations)."""
    random = np.random.default_rng(seed)
    tables = [_values(random, each, evaluations, samples) for each in populations]
    means = resampled_means(tables, draws=draws, seed=seed)
    truths = [np.array([each.truth(1), each.truth(samples), 0.0, 0.0]) for each in populations]
    held = []
    for drawn, truth in zip([*means, macro(means)], [*truths, macro(truths)], strict=True):
        low, high = percentile_interval(drawn, CONFIDENCE)
        held.append((low <= truth[:, None] + ROUNDING) & (truth[:, None] - ROUNDING <= high))
    return np.stack(held)


def _values(random: np.random.Generator, each: Population, evaluations: int, samples: int) -> Float64Array:
    """Return Avg@n, Pass@n, and how much the other method's differ from them, (problems, figures, evaluations)."""
    shape = each.problems, evaluations
    first = random.beta(*each.beta, size=shape)
    other = np.where(random.random(shape) < each.shared, first, random.beta(*each.beta, size=shape))
    counts = [random.binomial(samples, chances) for chances in (first, other)]
    figures = [np.stack([pass_at_k_of_counts(c, samples, k) for k in (1, samples)], axis=1) for c in counts]
    return np.concatenate([figures[0], figures[1] - figures[0]], axis=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluations", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console = Console()
    started = time.process_time()
    found = coverage(PAPER, **vars(options))
    console.print(f"{time.strftime('%Y-%m-%d')}, {platform.processor() or platform.machine()}, numpy {np.__version__}")
    console.print(f"python {' '.join(sys.argv)}: {time.process_time() - started:.1f} CPU seconds")
    columns = list(found["macro"])
    table = Table("problems", "n", *columns, title=f"Coverage of {CONFIDENCE:.0%} intervals, ± its binomial error")
    sizes = {each.name: str(each.problems) for each in PAPER}
    for name, row in found.items():
        cells = [f"{share:.3f} ±{math.sqrt(share * (1 - share) / options.evaluations):.3f}" for share in row.values()]
        table.add_row(name, sizes.get(name, ""), *cells)
    console.print(table)


if __name__ == "__main__":
    main()
