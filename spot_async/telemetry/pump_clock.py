"""Measures how long a pump was in each phase, including the one that goes on. It is a listener."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from spot_async.base.events import Event
from spot_async.loop.events import Phase, PhaseBegan, PhaseEnded, Pump


class PumpClock:
    """The seconds of one pump by phase, since they were last taken."""

    def __init__(self, pump: Pump, phase: Phase | None = None, since_s: float = float("-inf")) -> None:
        """Begin to measure: in this phase since then, or with the first phase that begins."""
        self._pump = pump
        self._phase = phase
        self._since_s = since_s  # everything before is counted
        self._seconds: dict[Phase, float] = defaultdict(float)

    def on(self, event: Event) -> None:
        match event:
            case PhaseBegan() if event.pump == self._pump:
                self._phase, self._since_s = event.name, max(self._since_s, event.at_s)
            case PhaseEnded() if event.pump == self._pump:
                self._count(event.name, max(event.started_s, self._since_s), event.ended_s)
                self._phase = None

    def take(self, now_s: float) -> Mapping[Phase, float]:
        """Return the seconds since the last call. The phase that goes on is counted up to now."""
        if self._phase is not None:
            self._count(self._phase, self._since_s, now_s)
        seconds, self._seconds = self._seconds, defaultdict(float)
        return seconds

    def _count(self, phase: Phase, started_s: float, ended_s: float) -> None:
        self._seconds[phase] += max(0.0, ended_s - started_s)
        self._since_s = max(self._since_s, ended_s)
