"""Progress as a pure state machine: what was committed when, and whether the silence since is too long.

A commit is work that will not be done again: a prompt's supervision is in the queue, a batch is trained, all
servers confirmed the weights, a held-out response is judged, a step of start or end is done. No heartbeat is: a
ping, a retry, an admitted prompt, a reply that is thrown away and a prompt that is given up can all go on for ever
in a run that trains nothing. Replies that a policy uses are no commits either: they become one with the last of
their prompt.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum


class Commit(StrEnum):
    """What counts as progress."""

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
    count: int  # of this kind so far


class Progress:
    """Commits so far, and the silence since the last one. All times are on one clock that the caller reads."""

    def __init__(self, now_s: float) -> None:
        self._counts: Counter[Commit] = Counter()
        self._last: dict[Commit, LastCommit] = {}
        self._since_s = now_s

    @property
    def since_s(self) -> float:
        """When the silence began: the last commit, or the start."""
        return self._since_s

    def commit(self, kind: Commit, detail: str, now_s: float) -> None:
        self._counts[kind] += 1
        self._last[kind] = LastCommit(kind, detail, now_s, self._counts[kind])
        self._since_s = now_s

    def forgive(self, gap_s: float, now_s: float) -> None:
        """Nobody could commit for `gap_s`, since this process did not run (Ctrl-Z, a debugger): do not count it."""
        self._since_s = min(self._since_s + gap_s, now_s)

    def silence_s(self, now_s: float) -> float:
        return now_s - self._since_s

    def is_stalled(self, now_s: float, limit_s: float) -> bool:
        """Whether the silence reached `limit_s`."""
        return self.silence_s(now_s) >= limit_s

    def last(self) -> list[LastCommit]:
        """The newest commit of each kind, newest first."""
        return sorted(self._last.values(), key=lambda commit: -commit.at_s)
