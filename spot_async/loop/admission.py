"""The book of a run's prompts: who may start, where each stands, and which ones are the next batch. Pure.

This is the supervision queue too. Two things must allow a prompt to start here: the staleness bound, and a place in the
queue that is reserved for its worst case (`sample_bytes.py`). The third is money, which the orchestrator looks after.
Since the place is reserved at admission, a finished prompt never waits for room. So batches in admission order cannot
deadlock behind a full queue. Once it is finished, a prompt counts as what it really holds.

Short responses finish first, and taking them first would favour them. So a batch is the next prompts in admission
order, those that were given up left out.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from enum import StrEnum

from spot_async.types import Sample

Finished = tuple[int, Sequence[Sample]]  # a prompt's ordinal, and its samples


class PromptState(StrEnum):
    RUNNING = "running"  # its coroutine is at work
    QUEUED = "queued"  # supervision finished, not yet in published weights
    TRAINED = "trained"
    LEFT_OUT = "left_out"  # in a batch, but none of its samples could be trained on
    DEAD = "dead"  # a request of it failed for good
    LEFT_OVER = "left_over"  # finished, but its batch never filled
    UNPAID = "unpaid"  # it needed a request that the budget has no money for


class AdmissionBook:
    """Every admitted prompt by its ordinal, in exactly one state. One that runs or is queued holds a place."""

    def __init__(self, *, batch_size: int, max_staleness: int, capacity_prompts: int, capacity_bytes: int) -> None:
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._capacity_prompts = capacity_prompts
        self._capacity_bytes = capacity_bytes
        self._states: dict[int, PromptState] = {}
        self._counts: Counter[PromptState] = Counter()
        self._places: dict[int, int] = {}  # bytes of those that hold one: reserved, or really held
        self._held_bytes = 0
        self._waiting: dict[int, Sequence[Sample]] = {}  # finished and in no batch yet
        self._unsettled: deque[int] = deque()  # in admission order, from the first that runs on
        self._ready: deque[int] = deque()  # those of `_waiting` before that one, in admission order

    # What it says

    def count(self, state: PromptState) -> int:
        return self._counts[state]

    @property
    def counts(self) -> dict[PromptState, int]:
        """How many prompts are in each state, those in which there are none included."""
        return {state: self._counts[state] for state in PromptState}

    def ordinals(self, state: PromptState) -> list[int]:
        """Prompts in `state`, in admission order."""
        return [ordinal for ordinal, each in self._states.items() if each is state]

    @property
    def finished(self) -> int:
        """Prompts that have come to an end of their own: with samples, or dead."""
        return self._with_samples + self._counts[PromptState.DEAD]

    @property
    def waiting(self) -> int:
        """Prompts whose supervision waits to be taken. Any thread may ask."""
        return len(self._waiting)

    @property
    def held_prompts(self) -> int:
        return len(self._places)

    @property
    def held_bytes(self) -> int:
        """What finished prompts hold, and what is reserved for running ones."""
        return self._held_bytes

    def may_admit(self, worst_case_bytes: int, *, version: int) -> bool:
        """Whether one more prompt keeps every sample within `max_staleness` updates of its weights, and has room.

        `version` counts published updates. With staleness 0 a batch is admitted only when the weights that all its
        samples must come from are live (Algorithm 1).
        """
        most = (self._max_staleness + version + 1) * self._batch_size
        return self._counts[PromptState.RUNNING] + self._with_samples < most and self._has_room(worst_case_bytes)

    # What happens to a prompt. Each raises ValueError where that cannot be, such as a prompt that is trained twice.

    def admit(self, ordinal: int, worst_case_bytes: int) -> None:
        """It starts, and a place is reserved for it."""
        if not self._has_room(worst_case_bytes):
            raise ValueError(f"there is no room for prompt {ordinal} ({worst_case_bytes} bytes)")
        self._move(ordinal, None, PromptState.RUNNING)
        self._places[ordinal] = worst_case_bytes
        self._held_bytes += worst_case_bytes
        self._unsettled.append(ordinal)

    def finish(self, ordinal: int, samples: Sequence[Sample], held_bytes: int) -> None:
        """Its supervision is complete, and waits for its batch. From now on it counts as what it holds."""
        self._move(ordinal, PromptState.RUNNING, PromptState.QUEUED)
        self._held_bytes += held_bytes - self._places[ordinal]
        self._places[ordinal] = held_bytes
        self._waiting[ordinal] = samples
        self._settle()

    def give_up(self, ordinal: int) -> None:
        """A request of it failed for good: another prompt takes its place."""
        self._move(ordinal, PromptState.RUNNING, PromptState.DEAD)
        self._free_place(ordinal)
        self._settle()

    def leave_unpaid(self, ordinal: int) -> None:
        """There is no money for a request of it."""
        self._move(ordinal, PromptState.RUNNING, PromptState.UNPAID)
        self._free_place(ordinal)
        self._settle()

    def take_batch(self) -> list[Finished] | None:
        """The next prompts in admission order with their samples; None while they are not all there."""
        if len(self._ready) < self._batch_size:
            return None
        ordinals = [self._ready.popleft() for _ in range(self._batch_size)]
        return [(ordinal, self._waiting.pop(ordinal)) for ordinal in ordinals]

    def trained(self, batch: Iterable[Finished]) -> None:
        """A batch that was taken is in published weights, or was left out of training: its places are free."""
        for ordinal, samples in batch:
            if ordinal in self._waiting:
                raise ValueError(f"prompt {ordinal} is in no batch")
            has_trained = any(sample.supervision is not None for sample in samples)
            self._move(ordinal, PromptState.QUEUED, PromptState.TRAINED if has_trained else PromptState.LEFT_OUT)
            self._free_place(ordinal)

    def leave_over(self) -> None:
        """The run is over: what waits fills no batch any more."""
        for ordinal in self._waiting:
            self._move(ordinal, PromptState.QUEUED, PromptState.LEFT_OVER)
            self._free_place(ordinal)
        self._waiting.clear()
        self._ready.clear()

    @property
    def _with_samples(self) -> int:
        """Prompts that were not given up: in the queue, in the batch that is trained on, or in a finished one."""
        counts = self._counts
        return counts[PromptState.QUEUED] + counts[PromptState.TRAINED] + counts[PromptState.LEFT_OUT]

    def _has_room(self, worst_case_bytes: int) -> bool:
        """Whether there is a place for one more prompt.

        As many prompts as a batch has always have one: those that turned out larger than was reserved must not keep the
        batch that they belong to from ever being full.
        """
        has_bytes = self._held_bytes + worst_case_bytes <= self._capacity_bytes
        return len(self._places) < self._capacity_prompts and (has_bytes or len(self._places) < self._batch_size)

    def _move(self, ordinal: int, before: PromptState | None, after: PromptState) -> None:
        state = self._states.get(ordinal)
        if state is not before:
            raise ValueError(f"prompt {ordinal} is {state or 'not admitted'}: it cannot become {after}")
        self._states[ordinal] = after
        self._counts[after] += 1
        if before is not None:
            self._counts[before] -= 1

    def _free_place(self, ordinal: int) -> None:
        self._held_bytes -= self._places.pop(ordinal)

    def _settle(self) -> None:
        """Pass on those that run no more, up to the first that does."""
        while self._unsettled and self._states[self._unsettled[0]] is not PromptState.RUNNING:
            ordinal = self._unsettled.popleft()
            if ordinal in self._waiting:
                self._ready.append(ordinal)
