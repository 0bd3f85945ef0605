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
from operator import itemgetter

from spot_async.replicas.replica import B, Replica

SESSIONS = 1 << 14  # how many are remembered: more than a run has prompts at a time, in 2 MiB
NEW_SESSIONS = 128  # how many of the last new ones are divided evenly
OVERTAKEN = 2.0  # a home loses its session above so many times the load of the least loaded,
SLACK = 8  # and so many requests more


class Router:
    """Chooses replicas, and remembers the homes of the sessions that were used last."""

    def __init__(self, sessions: int = SESSIONS) -> None:
        self._homes: OrderedDict[str, str] = OrderedDict()
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
        # Counted once: with many replicas, looking at each is most of what a request costs.
        loads = [each.in_flight / each.most_in_flight for each in serving]
        if not loads or min(loads) >= 1.0:
            return None
        home = None if session is None else self._home(session, serving, loads)
        if home is not None and home.name not in avoid and home.in_flight < home.most_in_flight:
            return home
        free = [(load, each) for load, each in zip(loads, serving, strict=True) if load < 1.0]
        wanted = [(load, each) for load, each in free if each.name not in avoid] or free
        if any(each is home for _, each in wanted):
            return home
        return min(wanted, key=itemgetter(0))[1]

    def _home(self, session: str, serving: Sequence[Replica[B]], loads: Sequence[float]) -> Replica[B]:
        """Return the home of a session among the replicas that serve, which have these loads, and remember it."""
        least = min(loads)
        name = self._homes.get(session)
        home = next((each for each in serving if each.name == name), None) if name is not None else None
        if home is not None:
            if _is_overtaken(home.in_flight / home.most_in_flight, least, home):
                home = serving[loads.index(least)]
        elif name is not None:
            home = serving[loads.index(least)]
        else:
            pairs = zip(loads, serving, strict=True)
            candidates = [(load, each) for load, each in pairs if not _is_overtaken(load, least, each)]
            _, home = min(candidates, key=lambda pair: (self._new_at[pair[1].name] / pair[1].most_in_flight, pair[0]))
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


def _is_overtaken(load: float, least: float, replica: Replica[B]) -> bool:
    return load > OVERTAKEN * least + SLACK / replica.most_in_flight
