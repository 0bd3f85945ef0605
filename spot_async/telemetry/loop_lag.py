"""How late the event loop is: what every request, timer and reply of a run waits for besides servers.

A timer that should fire every `INTERVAL_S` is measured against the clock. A blocked loop would be one late timer
however long it was blocked; all the timers that would have fired meanwhile are counted too, so the figures are those of
an event that comes at any moment.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL_S = 0.05
RESOLUTION_S = 1e-5  # less is no lag
GROWTH = 1.1  # of a bucket's bound over the one below: percentiles are within 5 %


class LagHistogram:
    """Counts of lags in buckets that grow by a tenth. Pure."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.max_s = 0.0

    def add(self, lag_s: float, interval_s: float) -> None:
        """A timer was late; so would have been those due every `interval_s` after it."""
        self.max_s = max(self.max_s, lag_s)
        while lag_s > 0:
            self._counts[max(0, math.ceil(math.log(max(lag_s, RESOLUTION_S) / RESOLUTION_S, GROWTH)))] += 1
            lag_s -= interval_s

    def quantile_s(self, share: float) -> float:
        """The seconds that at most `share` of all events exceeded; 0 without events."""
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
        """The metrics `loop/...` since this was last asked."""
        taken, self._histogram = self._histogram, LagHistogram()
        return {
            "loop/lag_p50_s": taken.quantile_s(0.5),
            "loop/lag_p99_s": taken.quantile_s(0.99),
            "loop/lag_max_s": taken.max_s,
        }

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Enter it on the loop that is measured."""
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
