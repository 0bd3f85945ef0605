"""Which replica a request goes to. Pure: the replicas' loads are passed in, and the memory is of sessions alone.

* A session's requests go to the replica that answered its first one, which holds their common prefix. One of them goes
  elsewhere only when that replica is full and another is not: a prefix that is read again costs less than waiting for
  a place. The session stays at home all the same, since that is where the rest of its prefix is.
* A session without a home, or whose home does not serve now, goes where least is in flight for what a replica may
  have, the first of equals; that is its home from then on.
* A replica that failed the request before is the last choice, but better than none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Protocol, TypeVar

SESSIONS = 1 << 14  # remembered; more than a run has prompts at a time, and 2 MiB


class Load(Protocol):
    """One replica that serves, as far as it matters here."""

    @property
    def name(self) -> str: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def most_in_flight(self) -> int:
        """How much it may have now; at least 1 for one that serves."""
        ...


L = TypeVar("L", bound=Load)


class Router:
    """Remembers where the last sessions went, the longest unused one forgotten first."""

    def __init__(self, sessions: int = SESSIONS) -> None:
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._sessions = sessions

    def choose(self, session: str | None, serving: Sequence[L], avoid: Collection[str] = ()) -> L | None:
        """One of those that serve; None when all of them are full."""
        free = [each for each in serving if each.in_flight < each.most_in_flight]
        if not free:
            return None
        wanted = [each for each in free if each.name not in avoid] if avoid else free
        home = self._home(session)
        for each in wanted:
            if each.name == home:
                return each
        chosen = min(wanted or free, key=_load)
        if session is not None and all(each.name != home for each in serving):
            self._homes[session] = chosen.name
            if len(self._homes) > self._sessions:
                self._homes.popitem(last=False)
        return chosen

    def _home(self, session: str | None) -> str | None:
        if session is None or session not in self._homes:
            return None
        self._homes.move_to_end(session)
        return self._homes[session]


def _load(replica: Load) -> float:
    return replica.in_flight / replica.most_in_flight
