"""Remembers a run's last commits, and tells whether the silence since is too long. A pure state machine.

A commit is work that will not be done again: a prompt's supervision is in the queue, a batch is trained, all servers
confirmed the weights, a held-out response is judged, or a step of start or end is done.

Signs of life are no commits. A ping, a retry, an admitted prompt, a reply that is thrown away and a prompt that is
given up can go on for ever in a run that trains nothing. Replies that a policy uses are no commits either: their prompt
commits once, when it is done.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum


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
    """Commits so far, and the silence since the last one. All times are of one clock, which the caller reads."""

    def __init__(self, now_s: float) -> None:
        self._counts: Counter[Commit] = Counter()
        self._last: dict[Commit, LastCommit] = {}
        self._since_s = now_s

    @property
    def since_s(self) -> float:
        """When the silence began: at the last commit, or at the start."""
        return self._since_s

    def commit(self, kind: Commit, detail: str, now_s: float) -> None:
        self._counts[kind] += 1
        self._last[kind] = LastCommit(kind, detail, now_s, self._counts[kind])
        self._since_s = now_s

    def forgive(self, gap_s: float, now_s: float) -> None:
        """Do not count `gap_s` of silence, in which this process did not run (Ctrl-Z, a debugger)."""
        self._since_s = min(self._since_s + gap_s, now_s)

    def silence_s(self, now_s: float) -> float:
        return now_s - self._since_s

    def is_stalled(self, now_s: float, limit_s: float) -> bool:
        """Whether the silence reached `limit_s`."""
        return self.silence_s(now_s) >= limit_s

    def last(self) -> list[LastCommit]:
        """Return the newest commit of each kind, newest first."""
        return sorted(self._last.values(), key=lambda commit: -commit.at_s)
