"""Chooses the replica that a request goes to. Pure: loads are passed in, and it remembers nothing but sessions.

* A session's requests go to its home: the replica that got its first one and holds their common prefix.
* A new session gets the home that had the fewest of the last new sessions, relative to its limit. What is in flight
  now only breaks ties, because most of a session's requests come later. Choosing by it sends all new sessions to one
  replica for a while, and then to another. (Measured on a recorded run's load, two replicas, three repetitions: 1.4
  times the throughput of one, against 1.97.)
* A session moves for good, to the least loaded replica, when its home does not serve or is overloaded: it has more than
  twice the load of the least loaded one and `SLACK` requests more. Servers differ in speed, and sessions in length. Two
  to three requests in a hundred move where one replica is twice as fast as the other, and next to none between equals.
* A single request goes elsewhere, while the session stays, if the home is full and another replica is not, or if the
  home failed this request before. A replica that failed a request is the last choice for it, but better than none.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Sequence
from typing import Any

from spot_async.replicas.replica import B, Replica

SESSIONS = 1 << 14  # how many are remembered: more than a run has prompts at a time, in 2 MiB
NEW_SESSIONS = 128  # how many of the last new ones are divided evenly
OVERTAKEN = 2.0  # a home loses its session above so many times the load of the least loaded,
SLACK = 8  # and so many requests more


class Router:
    """Chooses replicas, and remembers the homes of the sessions that were used last."""

    def __init__(self, sessions: int = SESSIONS) -> None:
        self._homes: OrderedDict[str, Replica[Any]] = OrderedDict()
        self._sessions = sessions
        # The homes of the newest sessions, and how often each is among them.
        self._newest: deque[str] = deque()
        self._new_at: Counter[str] = Counter()

    def choose(
        self, session: str | None, serving: Sequence[Replica[B]], avoid: Collection[str] = ()
    ) -> Replica[B] | None:
        """Return the replica for a request, one of those that serve; None when all of them are full.

        `avoid` names the replicas that failed the request before.
        """
        loads = [each.load for each in serving]  # with many replicas, looking at each is most of what a request costs
        least = min(loads, default=1.0)
        if least >= 1.0:
            return None
        emptiest = serving[loads.index(least)]
        home = emptiest if session is None else self._home(session, serving, emptiest)
        if home.name not in avoid and home.load < 1.0:
            return home
        wanted = [each for each in serving if each.load < 1.0 and each.name not in avoid]
        if wanted:
            return min(wanted, key=lambda each: each.load)
        return home if home.load < 1.0 else emptiest

    def _home(self, session: str, serving: Sequence[Replica[B]], emptiest: Replica[B]) -> Replica[B]:
        """Return the home of a session among the replicas that serve, and remember it."""
        home: Replica[B] | None = self._homes.get(session)
        if home is None:
            candidates = [each for each in serving if not _is_overtaken(each, emptiest)]
            home = min(candidates, key=lambda each: (self._new_at[each.name] / each.most_in_flight, each.load))
            self._count_new(home.name)
        elif home not in serving or _is_overtaken(home, emptiest):
            home = emptiest
        self._homes[session] = home
        self._homes.move_to_end(session)
        if len(self._homes) > self._sessions:
            self._homes.popitem(last=False)
        return home

    def _count_new(self, name: str) -> None:
        self._newest.append(name)
        self._new_at[name] += 1
        if len(self._newest) > NEW_SESSIONS:
            self._new_at[self._newest.popleft()] -= 1


def _is_overtaken(replica: Replica[B], emptiest: Replica[B]) -> bool:
    return replica.load > OVERTAKEN * emptiest.load + SLACK / replica.most_in_flight
