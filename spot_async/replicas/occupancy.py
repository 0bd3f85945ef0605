"""Counts a replica's requests, in all and of each kind: for how long it had them, and what was answered. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple


class Moment(NamedTuple):
    """A replica's totals at one time. The mean in flight between two moments is the growth of `busy_s` per second."""

    s: float
    busy_s: float  # seconds in flight until then, summed over all requests
    kind_busy_s: float  # the same, summed over the requests of one `Errand.kind`
    kind_work: int = 0  # tokens that the answers to these amounted to


@dataclass(slots=True)
class _Count:
    requests: int = 0
    # The times at which requests ended, less the times at which all began: open ones need no list.
    offset_s: float = 0.0
    work: int = 0

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
        """Return the seconds that all requests took together, including those in flight.

        Its growth over some time, divided by that time, is the mean number in flight.
        """
        return self._all.busy_s(now_s)

    def began(self, kind: str, now_s: float) -> None:
        for count in (self._all, self._kinds[kind]):
            count.requests += 1
            count.offset_s -= now_s

    def ended(self, kind: str, now_s: float) -> None:
        for count in (self._all, self._kinds[kind]):
            count.requests -= 1
            count.offset_s += now_s

    def answered(self, kind: str, work: int) -> None:
        self._kinds[kind].work += max(1, work)

    def at(self, kind: str, now_s: float) -> Moment:
        of_kind = self._kinds[kind]
        return Moment(now_s, self._all.busy_s(now_s), of_kind.busy_s(now_s), of_kind.work)
