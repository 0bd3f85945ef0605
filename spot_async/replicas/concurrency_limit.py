"""How many requests a replica may have at a time. Pure: additive increase, multiplicative decrease.

It starts at the most that is allowed, where stages' own limits decide, and comes down when the server says, or shows,
that it has too much:

* It refuses (429, 503), or a request is not answered in time.
* Latency grows. Requests differ in length, so what is compared is seconds per unit of work (a token, for what
  generates or scores), stage by stage, over windows of many requests, with a baseline that follows slowly. A server
  that batches takes longer for each request the more it has, up to in proportion to what it has, and that alone is no
  reason: what goes in proportion is a queue that costs nothing, and finding the best place on that curve is `tune`'s
  business. What grows beyond that does cost: memory that no longer holds what is in flight, somebody else's load.

Like TCP's, it reacts once per round trip: what was sent before the last decrease says nothing of the load since.
"""

from __future__ import annotations

from dataclasses import dataclass

DECREASE = 0.7  # factor
WINDOW_REQUESTS = 16  # of one stage, at least: fewer say more of themselves than of the server
GROWTH = 2.0  # of latency beyond what the load explains
BASELINE_SHARE = 0.1  # of the newest window in the baseline: about ten windows are remembered


@dataclass(slots=True)
class _Window:
    """Requests of one stage, sent since the window was opened."""

    opened_s: float
    requests: int = 0
    seconds: float = 0.0
    work: float = 0.0
    load: float = 0.0  # summed in flight


@dataclass(slots=True)
class _Baseline:
    seconds_per_work: float
    load: float  # mean in flight


class ConcurrencyLimit:
    """The limit of one replica."""

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._limit = float(maximum)
        self._decreased_s = float("-inf")
        self._windows: dict[str, _Window] = {}
        self._baselines: dict[str, _Baseline] = {}
        self.decreases = 0

    @property
    def value(self) -> int:
        """At least 1."""
        return int(self._limit)

    def succeeded(self, stage: str, *, sent_s: float, now_s: float, work: int, in_flight: int) -> None:
        """A request of `stage` was answered; `in_flight` counts it."""
        if sent_s < self._decreased_s:
            return
        if self._limit < self._maximum and in_flight >= self.value:  # else it was not the limit that went well
            self._limit = min(self._maximum, self._limit + 1.0 / self._limit)
        self._measure(stage, sent_s=sent_s, now_s=now_s, work=work, in_flight=in_flight)

    def overloaded(self, *, sent_s: float, now_s: float, in_flight: int) -> None:
        """A request was refused for now, or not answered in time; `in_flight` counts it."""
        if sent_s >= self._decreased_s:
            self._decrease(now_s, in_flight)

    def _decrease(self, now_s: float, in_flight: int) -> None:
        """From what was too much: the limit itself may be far above."""
        self._limit = max(1.0, min(self._limit, in_flight) * DECREASE)
        self._decreased_s = now_s
        self._windows.clear()
        self.decreases += 1

    def _measure(self, stage: str, *, sent_s: float, now_s: float, work: int, in_flight: int) -> None:
        window = self._windows.get(stage)
        if window is None:
            window = self._windows[stage] = _Window(sent_s)
        if sent_s < window.opened_s:
            return
        window.requests += 1
        window.seconds += now_s - sent_s
        window.work += max(1, work)
        window.load += in_flight
        if window.requests >= max(WINDOW_REQUESTS, in_flight):  # a round trip of all that is in flight
            self._close(stage, window, now_s)

    def _close(self, stage: str, window: _Window, now_s: float) -> None:
        seconds_per_work, load = window.seconds / window.work, window.load / window.requests
        self._windows[stage] = _Window(now_s)
        baseline = self._baselines.get(stage)
        if baseline is None:
            self._baselines[stage] = _Baseline(seconds_per_work, load)
            return
        explained = baseline.seconds_per_work * max(1.0, load / baseline.load)
        baseline.seconds_per_work += BASELINE_SHARE * (seconds_per_work - baseline.seconds_per_work)
        baseline.load += BASELINE_SHARE * (load - baseline.load)
        if seconds_per_work > GROWTH * explained:
            self._decrease(now_s, round(load))
