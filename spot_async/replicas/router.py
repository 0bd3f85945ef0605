"""Which replica a request goes to. Pure: the replicas' loads are passed in, and the memory is of sessions alone.

* A session's requests go to its home, the replica that answered its first one and holds their common prefix.
* A new session's home is the replica that got the fewest of the last new sessions, for what it may have in flight. What
  is in flight at the moment only breaks ties: most of what a session will ask comes later, so choosing by that sends
  all new sessions to the same replica for a while, and then to another (measured on the load of a recorded run, three
  times over, two replicas: 1.4 times the throughput of one, against 1.97).
* A session moves to the least loaded replica, for good, when its home does not serve, or is overtaken: it has more than
  twice what the least loaded one has and `SLACK` requests more. Servers differ in speed, and sessions in length. Two to
  three requests in a hundred move where one replica is twice as fast as the other, and next to none between equal ones.
* One request goes elsewhere while its home is full and another is not; the session stays. So does one whose home failed
  it before. A replica that failed the request before is the last choice, but better than none.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Sequence
from typing import Protocol, TypeVar

SESSIONS = 1 << 14  # remembered; more than a run has prompts at a time, and 2 MiB
NEW_SESSIONS = 128  # the last ones, that are divided evenly
OVERTAKEN = 2.0  # times the load of the least loaded
SLACK = 8


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
        self._newest: deque[str] = deque()  # homes of the newest sessions, and how often each is among them
        self._new_at: Counter[str] = Counter()

    def choose(self, session: str | None, serving: Sequence[L], avoid: Collection[str] = ()) -> L | None:
        """The replica for a request, one of those that serve; None when all of them are full."""
        free = [each for each in serving if each.in_flight < each.most_in_flight]
        if not free:
            return None
        wanted = [each for each in free if each.name not in avoid] or free
        if session is None:
            return min(wanted, key=_load)
        home = self._home(session, serving)
        return home if home in wanted else min(wanted, key=_load)

    def _home(self, session: str, serving: Sequence[L]) -> L:
        """The home of a session among the replicas that serve."""
        least = min(serving, key=_load)
        name = self._homes.get(session)
        home = next((each for each in serving if each.name == name), None)
        if home is not None:
            if _is_overtaken(home, least):
                home = least
        elif name is not None:
            home = least
        else:
            candidates = [each for each in serving if not _is_overtaken(each, least)]
            home = min(candidates, key=lambda each: (self._new_at[each.name] / each.most_in_flight, _load(each)))
            self._count_new(home.name)
        self._homes[session] = home.name
        self._homes.move_to_end(session)
        if len(self._homes) > self._sessions:
            self._homes.popitem(last=False)
        return home

    def _count_new(self, name: str) -> None:
        self._newest.append(name)
        self._new_at[name] += 1
        if len(self._newest) > NEW_SESSIONS:
            self._new_at[self._newest.popleft()] -= 1


def _load(replica: Load) -> float:
    return replica.in_flight / replica.most_in_flight


def _is_overtaken(replica: Load, least: Load) -> bool:
    return _load(replica) > OVERTAKEN * _load(least) + SLACK / replica.most_in_flight
