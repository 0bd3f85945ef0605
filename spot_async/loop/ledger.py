"""The account of every prompt: where it stands, and how many stand there. Pure.

Each admitted prompt moves running -> queued -> trained, or ends in another terminal state.
Counters follow from the transitions made here and are kept nowhere else.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum


class PromptState(StrEnum):
    RUNNING = "running"  # its coroutine is at work
    QUEUED = "queued"  # supervision finished, not yet in published weights
    TRAINED = "trained"
    LEFT_OUT = "left_out"  # in a batch, but none of its samples could be trained on
    DEAD = "dead"  # a request of it failed for good
    LEFT_OVER = "left_over"  # finished, but its batch never filled
    UNPAID = "unpaid"  # it needed a request that the budget has no money for


_ALLOWED = {
    PromptState.RUNNING: {PromptState.QUEUED, PromptState.DEAD, PromptState.UNPAID},
    PromptState.QUEUED: {PromptState.TRAINED, PromptState.LEFT_OUT, PromptState.LEFT_OVER},
}


class Ledger:
    """State of each admitted prompt by its ordinal."""

    def __init__(self) -> None:
        self._states: dict[int, PromptState] = {}
        self._counts: Counter[PromptState] = Counter()

    def admit(self, ordinal: int) -> None:
        """Raises ValueError when the prompt was admitted before."""
        if ordinal in self._states:
            raise ValueError(f"prompt {ordinal} was admitted twice")
        self._states[ordinal] = PromptState.RUNNING
        self._counts[PromptState.RUNNING] += 1

    def move(self, ordinal: int, to: PromptState) -> None:
        """Raises ValueError for a transition that cannot happen: a prompt trained twice, say."""
        state = self._states.get(ordinal)
        if state is None or to not in _ALLOWED.get(state, ()):
            raise ValueError(f"prompt {ordinal} cannot go from {state} to {to}")
        self._states[ordinal] = to
        self._counts[state] -= 1
        self._counts[to] += 1

    def count(self, state: PromptState) -> int:
        return self._counts[state]

    @property
    def consumed(self) -> int:
        """Prompts in finished batches, trained on or left out."""
        return self.count(PromptState.TRAINED) + self.count(PromptState.LEFT_OUT)

    def ordinals(self, state: PromptState) -> list[int]:
        """Prompts in `state`, in admission order."""
        return [ordinal for ordinal, each in self._states.items() if each is state]
