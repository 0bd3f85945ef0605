"""Remembers a run's last commits, and since when each pump is silent. A pure state machine.

A commit is work that will not be done again: a prompt's supervision is in the queue, a batch is trained, all servers
confirmed the weights, a held-out response is judged, or a step of start or end is done.

Signs of life are no commits. A ping, a retry, an admitted prompt, a reply that is thrown away and a prompt that is
given up can go on for ever in a run that trains nothing. Replies that a policy uses are no commits either: their prompt
commits once, when it is done.

Each pump has a silence of its own. In a strict run all commits count for both, since one always waits for the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import get_args

from spot_async.loop.events import Pump

PUMPS: tuple[Pump, ...] = get_args(Pump)


class Commit(StrEnum):
    """The kinds of work that count as progress."""

    STEP = "steps of the run done"
    PROMPT_QUEUED = "prompts queued"
    BATCH_TRAINED = "batches trained"
    WEIGHTS_CONFIRMED = "weights confirmed"
    RESPONSE_JUDGED = "held-out responses judged"


@dataclass(frozen=True)
class LastCommit:
    """The newest commit of a kind."""

    kind: Commit
    detail: str
    at_s: float
    count: int  # commits of this kind so far


class Progress:
    """Commits so far, and each pump's silence. All times are of one clock, which the caller reads."""

    def __init__(self, now_s: float) -> None:
        self._counts: Counter[Commit] = Counter()
        self._last: dict[Commit, LastCommit] = {}
        self._since_s: dict[Pump, float] = dict.fromkeys(PUMPS, now_s)  # since its last commit, or the start

    def commit(self, kind: Commit, detail: str, now_s: float, pumps: Collection[Pump] = PUMPS) -> None:
        """Note a commit, which ends the silence of these pumps."""
        self._counts[kind] += 1
        self._last[kind] = LastCommit(kind, detail, now_s, self._counts[kind])
        self.begin(pumps, now_s)

    def begin(self, pumps: Collection[Pump], now_s: float) -> None:
        """Begin the silence of these pumps anew: what they waited for has come."""
        self._since_s.update(dict.fromkeys(pumps, now_s))

    def forgive(self, gap_s: float, now_s: float) -> None:
        """Do not count `gap_s` of silence, in which this process did not run (Ctrl-Z, a debugger)."""
        self._since_s = {pump: min(since_s + gap_s, now_s) for pump, since_s in self._since_s.items()}

    def silence_s(self, now_s: float, pump: Pump = "train") -> float:
        return now_s - self._since_s[pump]

    def last(self) -> list[LastCommit]:
        """Return the newest commit of each kind, newest first."""
        return sorted(self._last.values(), key=lambda commit: -commit.at_s)
