"""Where a server's throughput stops paying for more requests in flight, and what to measure to find it. Pure.

The knee is the smallest measured concurrency that gives 95 % of the best throughput. Latency is part of that choice:
by Little's law a server with n requests in flight at throughput x answers each after n / x, so past the knee every
further request in flight makes all of them later and hardly any more.

Levels are compared as they were measured, not through a fitted curve. Gunther's Universal Scalability Law
(x(n) = a n / (1 + s (n - 1) + k n (n - 1)); "Guerrilla Capacity Planning", 2007) is smooth, and inference servers are
not: they scale up to their slots or their cache memory and stay flat from there, which that law takes for a knee at
several times the slots. Kleinrock's power, throughput over latency (ICC 1979), has its peak where half of the capacity
is used (M/M/1): right for a network that others wait behind, wasteful for a server that only this run uses. Against
noise there are Tukey's running medians of three ("Exploratory Data Analysis", 1977), which leave rising and falling
runs as they are and take out any one level, inside the ramp, that something else disturbed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

ENOUGH = 0.95  # of the best throughput
STEP = 1.3  # largest ratio between the knee and the level below it, once refined


def running_medians(values: Sequence[float]) -> list[float]:
    """Each value's median with its two neighbours; the ends stay."""
    inner = [sorted(values[i - 1 : i + 2])[1] for i in range(1, len(values) - 1)]
    return [*values[:1], *inner, *values[-1:]] if len(values) > 2 else list(values)


def knee(throughputs: Sequence[float]) -> int:
    """Index of the knee; one throughput per level, by rising concurrency. Raises ValueError without levels."""
    smooth = running_medians(throughputs)
    enough = ENOUGH * max(smooth)
    return next(i for i, throughput in enumerate(smooth) if throughput >= enough)


def is_flat(throughputs: Sequence[float]) -> bool:
    """Whether the last two levels gave nearly nothing over those before: one alone may have been disturbed."""
    if len(throughputs) < 3:
        return False
    smooth = running_medians(throughputs)
    return max(smooth[:-2]) >= ENOUGH * max(smooth[-2:])


def next_concurrency(levels: Sequence[tuple[int, float]], most: int) -> int | None:
    """What to measure next, of a server that may have `most` requests in flight; None when the knee is found.

    `levels` are (concurrency, throughput) by rising concurrency. Concurrency doubles until throughput is flat; then
    the geometric mean of the knee and the level below it is measured until they lie close together.
    """
    if not levels:
        return 1
    concurrencies = [concurrency for concurrency, _ in levels]
    throughputs = [throughput for _, throughput in levels]
    doublings = [level for level in levels if _is_doubling(level[0], most)]
    highest = concurrencies[-1]
    if highest < most and not is_flat([throughput for _, throughput in doublings]):
        return min(2 * highest, most)
    at = knee(throughputs)
    if at == 0 or concurrencies[at] <= STEP * concurrencies[at - 1]:
        return None
    between = round(math.sqrt(concurrencies[at - 1] * concurrencies[at]))
    return None if between in concurrencies else between


def _is_doubling(concurrency: int, most: int) -> bool:
    """Whether a level belongs to the way up, not to the refinement."""
    return concurrency == most or concurrency & (concurrency - 1) == 0
