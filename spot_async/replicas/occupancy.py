"""How many requests a replica has, of all stages and of each, and for how long it had them. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple


class Moment(NamedTuple):
    """A time, as a request of one stage sees it. Differences of two moments, over their time, are means in flight."""

    s: float
    busy_s: float  # times in flight until then, summed over all requests
    stage_busy_s: float  # likewise, over those of the stage


@dataclass(slots=True)
class _Count:
    requests: int = 0
    offset_s: float = 0.0  # ends of the requests that have ended, less the beginnings of all

    def busy_s(self, now_s: float) -> float:
        return self.requests * now_s + self.offset_s


class Occupancy:
    """Of one replica."""

    def __init__(self) -> None:
        self._all = _Count()
        self._stages: defaultdict[str, _Count] = defaultdict(_Count)

    @property
    def requests(self) -> int:
        """In flight now."""
        return self._all.requests

    def busy_s(self, now_s: float) -> float:
        """Of all requests, those in flight included; mean in flight = its growth / elapsed."""
        return self._all.busy_s(now_s)

    def began(self, stage: str, now_s: float) -> None:
        for count in (self._all, self._stages[stage]):
            count.requests += 1
            count.offset_s -= now_s

    def ended(self, stage: str, now_s: float) -> None:
        for count in (self._all, self._stages[stage]):
            count.requests -= 1
            count.offset_s += now_s

    def at(self, stage: str, now_s: float) -> Moment:
        return Moment(now_s, self._all.busy_s(now_s), self._stages[stage].busy_s(now_s))
