"""Finds the knee: the number of requests in flight beyond which a server's throughput hardly grows. Pure.

The knee is the smallest measured concurrency that gives 95 % of the best throughput. This takes latency into account:
by Little's law, a server with n requests in flight at throughput x answers each after n / x. So past the knee, every
further request in flight makes all answers later, and hardly any more of them.

Levels are compared as they were measured, not through a fitted curve, for two reasons:

* Gunther's Universal Scalability Law (x(n) = a n / (1 + s (n - 1) + k n (n - 1)); "Guerrilla Capacity Planning", 2007)
  is smooth. Inference servers are not: they scale up to their slots or their cache memory, and stay flat from there.
  The law would put the knee at several times the slots.
* Kleinrock's power, throughput over latency (ICC 1979), has its peak where half of the capacity is used (M/M/1). That
  is right for a network that others wait behind, but wasteful for a server that only this run uses.

Noise is taken out by Tukey's running medians of three ("Exploratory Data Analysis", 1977). They leave rising and
falling runs as they are, and remove any single level inside the ramp that something else disturbed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

ENOUGH = 0.95  # share of the best throughput that the knee gives
STEP = 1.3  # levels with at most this ratio are close enough: nothing is measured between them


def running_medians(values: Sequence[float]) -> list[float]:
    """Return each value's median with its two neighbours. The ends stay as they are."""
    inner = [sorted(values[i - 1 : i + 2])[1] for i in range(1, len(values) - 1)]
    return [*values[:1], *inner, *values[-1:]] if len(values) > 2 else list(values)


def knee(throughputs: Sequence[float]) -> int:
    """Return the index of the knee among the levels' throughputs, by rising concurrency.

    Raises ValueError without levels.
    """
    smooth = running_medians(throughputs)
    enough = ENOUGH * max(smooth)
    return next(i for i, throughput in enumerate(smooth) if throughput >= enough)


def is_flat(throughputs: Sequence[float]) -> bool:
    """Whether the last two levels gained nearly nothing over those before. One alone may have been disturbed."""
    return len(throughputs) > 2 and max(running_medians(throughputs)[:-2]) >= ENOUGH * max(throughputs[-2:])


def is_passed(levels: Sequence[tuple[int, float]], most: int) -> bool:
    """Whether the levels reach beyond the knee: throughput was flat, or the run has no more than `most` in flight.

    `levels` are (concurrency, throughput) by rising concurrency. Before that, the knee of the levels is only the best
    of those that were measured.
    """
    way_up = [throughput for concurrency, throughput in levels if concurrency == most or _is_power_of_two(concurrency)]
    return bool(levels) and (levels[-1][0] >= most or is_flat(way_up))


def next_concurrency(levels: Sequence[tuple[int, float]], most: int) -> int | None:
    """Return the concurrency to measure next, `most` at most; None when the knee is found.

    `levels` are (concurrency, throughput) by rising concurrency. Concurrency doubles until throughput is flat. Then
    geometric means of neighbouring levels are measured: around the best level until its neighbours confirm it, and
    below the knee.
    """
    if not levels:
        return 1
    concurrencies = [concurrency for concurrency, _ in levels]
    throughputs = [throughput for _, throughput in levels]
    if not is_passed(levels, most):
        return min(2 * concurrencies[-1], most)
    gaps = [knee(throughputs) - 1]  # by the index of the level below
    best = max(range(len(levels)), key=lambda i: throughputs[i])
    if running_medians(throughputs)[best] < ENOUGH * throughputs[best]:
        gaps = [best, best - 1, *gaps]
    for gap in gaps:
        if 0 <= gap < len(levels) - 1 and concurrencies[gap + 1] > STEP * concurrencies[gap]:
            between = round(math.sqrt(concurrencies[gap] * concurrencies[gap + 1]))
            if between not in concurrencies:
                return between
    return None


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
