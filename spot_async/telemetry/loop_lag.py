"""Measures how late the event loop is. Every request, timer and reply of a run waits for it.

A timer that should fire every `INTERVAL_S` is compared with the clock. While the loop is blocked, only one timer is
late, however long that takes. So all the timers that would have fired meanwhile are counted too. The metrics are thus
those of an event that comes at any moment.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL_S = 0.05
RESOLUTION_S = 1e-5  # a shorter lag counts as none
GROWTH = 1.1  # ratio of a bucket's bound to the one below, so that percentiles are within 5 %


class LagHistogram:
    """Counts lags in buckets that grow by a tenth. Pure."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.max_s = 0.0

    def add(self, lag_s: float, interval_s: float) -> None:
        """Count a late timer, and those that would have been due every `interval_s` while it was late."""
        self.max_s = max(self.max_s, lag_s)
        while lag_s > 0:
            self._counts[max(0, math.ceil(math.log(max(lag_s, RESOLUTION_S) / RESOLUTION_S, GROWTH)))] += 1
            lag_s -= interval_s

    def quantile_s(self, share: float) -> float:
        """Return the lag that a `share` of all events did not exceed; 0 without events."""
        wanted, seen = share * self._counts.total(), 0
        for bucket, count in sorted(self._counts.items()):
            seen += count
            if seen >= wanted:
                return min(self.max_s, RESOLUTION_S * GROWTH**bucket)
        return 0.0


class LoopLag:
    """Measures the running loop while inside `measuring`."""

    def __init__(self) -> None:
        self._histogram = LagHistogram()

    def take(self) -> dict[str, float]:
        """Return the metrics `loop/...` of the time since the last call."""
        taken, self._histogram = self._histogram, LagHistogram()
        return {
            "loop/lag_p50_s": taken.quantile_s(0.5),
            "loop/lag_p99_s": taken.quantile_s(0.99),
            "loop/lag_max_s": taken.max_s,
        }

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure while inside. Enter it on the loop that is to be measured."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def fire(due_s: float) -> None:
            nonlocal timer
            now_s = loop.time()
            self._histogram.add(max(now_s - due_s, RESOLUTION_S), INTERVAL_S)
            timer = loop.call_at(now_s + INTERVAL_S, fire, now_s + INTERVAL_S)

        first_s = loop.time() + INTERVAL_S
        timer = loop.call_at(first_s, fire, first_s)
        try:
            yield
        finally:
            timer.cancel()
