"""The states of a replica: a state machine with a circuit breaker in it. Pure: times are passed in.

STARTING -> SERVING <-> UPDATING           weights are sent
SERVING  -> SUSPECT -> SERVING, HALF_OPEN  it answered nothing for long, or connections failed, so it is pinged
SUSPECT  -> OPEN                           the ping failed, or the process ended; its requests are taken back
OPEN     -> RECOVERING                     it is left and entered again, or answers again and is sent weights
DRAINING -> RECOVERING                     it answers, but must be entered again once its requests have ended
RECOVERING -> SERVING, HALF_OPEN           at the pool's version; half open: one request at a time, on trial
RECOVERING -> DEAD                         it was started again too often
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from spot_async.types import WeightVersion

FAILURES_TO_SUSPECT = 3  # failed connections in a row, with no answer in between


class State(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    UPDATING = "updating"
    SUSPECT = "suspect"
    HALF_OPEN = "half_open"
    DRAINING = "draining"
    OPEN = "open"
    RECOVERING = "recovering"
    DEAD = "dead"


MOVES: dict[State, frozenset[State]] = {
    State.STARTING: frozenset({State.SERVING}),
    State.SERVING: frozenset({State.UPDATING, State.SUSPECT, State.DRAINING, State.OPEN}),
    State.UPDATING: frozenset({State.SERVING, State.DRAINING, State.OPEN}),
    State.SUSPECT: frozenset({State.SERVING, State.HALF_OPEN, State.UPDATING, State.DRAINING, State.OPEN}),
    State.HALF_OPEN: frozenset({State.SERVING, State.UPDATING, State.SUSPECT, State.DRAINING, State.OPEN}),
    State.DRAINING: frozenset({State.RECOVERING, State.OPEN}),
    State.OPEN: frozenset({State.RECOVERING}),
    State.RECOVERING: frozenset({State.SERVING, State.HALF_OPEN, State.OPEN, State.DEAD}),
    State.DEAD: frozenset(),
}
# States in which a replica answers, now or in a moment. A role with such a replica is not without a server.
ALIVE = frozenset({State.STARTING, State.SERVING, State.UPDATING, State.SUSPECT, State.HALF_OPEN})
IN_ROTATION = frozenset({State.SERVING, State.UPDATING, State.SUSPECT, State.HALF_OPEN})


class LifeCycle:
    """The state of one replica. `moved` is called after every change of state."""

    def __init__(self, now_s: float, moved: Callable[[], None] = lambda: None) -> None:
        self.state = State.STARTING
        self.since_s = now_s
        self._away_s = 0.0  # seconds away before the present state
        self._moved = moved
        self.version: WeightVersion | None = None  # the last one that it confirmed; None where that is not known
        self.failed_trial = False  # whether it is suspect because its request on trial failed
        self._failures = 0  # failed connections in a row

    def move(self, state: State, now_s: float) -> None:
        """Change the state. Raises ValueError for a move that the table above does not have, which is a bug."""
        if state not in MOVES[self.state]:
            raise ValueError(f"a replica cannot go from {self.state} to {state}")
        self._away_s = self.away_s(now_s)
        self.state = state
        self.since_s = now_s
        self._failures = 0
        self._moved()

    def away_s(self, now_s: float) -> float:
        """Return the seconds so far in which the replica could not be asked. Trials do not count as such."""
        return self._away_s + (0.0 if self.state in ALIVE else now_s - self.since_s)

    def takes(self, version: WeightVersion | None, in_flight: int) -> bool:
        """Whether it may have one more request, which needs the weights `version`."""
        if self.version != version:
            return False
        return self.state is State.SERVING or (self.state is State.HALF_OPEN and in_flight == 0)

    def answered(self, now_s: float) -> None:
        """Note a reply, which shows that the server lives even if the reply is an error."""
        self._failures = 0
        if self.state is State.HALF_OPEN:
            self.move(State.SERVING, now_s)

    def failed(self, sent_s: float, now_s: float) -> bool:
        """Note that the connection of a request sent at `sent_s` failed; return whether to ping the replica now.

        Requests sent before a trial do not count against it, since the last resets of a burst may come in late.
        """
        if self.state not in (State.SERVING, State.HALF_OPEN):
            return False
        if self.state is State.HALF_OPEN and sent_s < self.since_s:
            return False
        self._failures += 1
        if self.state is State.SERVING and self._failures < FAILURES_TO_SUSPECT:
            return False
        self.failed_trial = self.state is State.HALF_OPEN
        self.move(State.SUSPECT, now_s)
        return True
