"""Measures how long a pump was in each phase, including the one that goes on. It is a listener."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from spot_async.base.events import Event
from spot_async.loop.events import Phase, PhaseBegan, PhaseEnded, Pump


class PumpClock:
    """The seconds of one pump, by phase. They end with `take`, which may be in the middle of a phase."""

    def __init__(self, pump: Pump, first: Phase, now_s: float) -> None:
        """Begin to measure. `first` is the phase that the pump is in until it says otherwise."""
        self._pump = pump
        self._phase = first
        self._since_s = now_s  # everything before is counted
        self._seconds: dict[Phase, float] = defaultdict(float)

    def on(self, event: Event) -> None:
        match event:
            case PhaseBegan() if event.pump == self._pump:
                self._phase, self._since_s = event.name, max(self._since_s, event.at_s)
            case PhaseEnded() if event.pump == self._pump:
                self.count(event.name, max(event.started_s, self._since_s), event.ended_s)

    def take(self, now_s: float) -> Mapping[Phase, float]:
        """Return the seconds since the last call."""
        self.count(self._phase, self._since_s, now_s)
        seconds, self._seconds = self._seconds, defaultdict(float)
        self._since_s = now_s
        return seconds

    def count(self, phase: Phase, started_s: float, ended_s: float) -> None:
        if ended_s > started_s:  # otherwise `take` has counted it already
            self._seconds[phase] += ended_s - started_s
            self._since_s = ended_s
