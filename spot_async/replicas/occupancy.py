"""How many requests a replica has, of all kinds and of each, and for how long it had them. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple


class Moment(NamedTuple):
    """A time, as a request of one `Errand.kind` sees it. Differences of two moments, over their time, are means in
    flight."""

    s: float
    busy_s: float  # times in flight until then, summed over all requests
    kind_busy_s: float  # likewise, over those of the kind


@dataclass(slots=True)
class _Count:
    requests: int = 0
    offset_s: float = 0.0  # ends of the requests that have ended, less the beginnings of all

    def busy_s(self, now_s: float) -> float:
        return self.requests * now_s + self.offset_s


class Occupancy:
    """How many requests one replica has."""

    def __init__(self) -> None:
        self._all = _Count()
        self._kinds: defaultdict[str, _Count] = defaultdict(_Count)

    @property
    def requests(self) -> int:
        """Requests in flight now."""
        return self._all.requests

    def busy_s(self, now_s: float) -> float:
        """Seconds that all requests took together, those in flight included; mean in flight = its growth / elapsed."""
        return self._all.busy_s(now_s)

    def began(self, kind: str, now_s: float) -> None:
        for count in (self._all, self._kinds[kind]):
            count.requests += 1
            count.offset_s -= now_s

    def ended(self, kind: str, now_s: float) -> None:
        for count in (self._all, self._kinds[kind]):
            count.requests -= 1
            count.offset_s += now_s

    def at(self, kind: str, now_s: float) -> Moment:
        return Moment(now_s, self._all.busy_s(now_s), self._kinds[kind].busy_s(now_s))
