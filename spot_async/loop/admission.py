"""Keeps the book of a run's prompts: who may start, where each stands, and which ones are the next batch. Pure.

This is the supervision queue too. A prompt may start if the staleness bound allows it, and if a place in the queue can
be reserved for its worst case (`sample_bytes.py`). Whether there is money for it is the orchestrator's to know. Since
its place is reserved, a finished prompt never waits for room, so batches in admission order cannot deadlock behind a
full queue. Once it is finished, a prompt counts as what it really holds.

Short responses finish first, and taking them first would favour them. So a batch is the next prompts in admission
order, without those that were given up. If batches refill, prompts without supervision do not count towards a batch,
hold no place, and let others start.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from spot_async.types import Sample

Finished = tuple[int, Sequence[Sample]]  # a prompt's ordinal, and its samples


class PromptState(StrEnum):
    RUNNING = "running"  # its coroutine is at work
    QUEUED = "queued"  # supervision finished, in no batch yet
    BATCHED = "batched"  # in the batch that is being trained on
    TRAINED = "trained"
    LEFT_OUT = "left_out"  # in a batch, but none of its samples could be trained on
    IN_VAIN = "in_vain"  # likewise, and another prompt filled the batch for it
    DEAD = "dead"  # a request of it failed for good
    LEFT_OVER = "left_over"  # finished, but its batch never filled
    UNPAID = "unpaid"  # it needed a request that the budget has no money for


FED = (PromptState.TRAINED, PromptState.LEFT_OUT)  # those that filled a batch that was trained
WITH_SAMPLES = (PromptState.QUEUED, PromptState.BATCHED, *FED, PromptState.IN_VAIN)


def is_trained(samples: Sequence[Sample]) -> bool:
    """Return whether any sample of a prompt is trained on."""
    return any(sample.supervision is not None for sample in samples)


@dataclass(frozen=True, kw_only=True)
class QueueSettings:
    """How many prompts may be admitted, and how many of them a batch takes."""

    iterations: int
    batch_size: int
    max_staleness: int
    capacity_prompts: int  # of the supervision queue
    capacity_bytes: int  # of the queue too: worst cases of running prompts, and what finished ones hold
    refill_at_most: int | None = None  # batches that teach nothing, before the run ends; None: batches do not refill


class AdmissionBook:
    """Holds every admitted prompt by its ordinal, in exactly one state.

    Those that run, are queued or are in a batch have a place, but for those without supervision if batches refill.
    """

    def __init__(self, settings: QueueSettings) -> None:
        self._settings = settings
        self._refills = settings.refill_at_most is not None
        self._states: dict[int, PromptState] = {}
        self._counts: Counter[PromptState] = Counter()
        self._places: dict[int, int] = {}  # bytes: reserved while it runs, really held once it is finished
        self._vain_bytes: dict[int, int] = {}  # likewise of those that wait and fill no place
        self._held_bytes = 0
        self._waiting: dict[int, Sequence[Sample]] = {}  # finished and in no batch yet
        self._unsettled: deque[int] = deque()  # in admission order; the first one still runs
        self._ready: deque[int] = deque()  # those of `_waiting` that come before `_unsettled`, in admission order
        self._in_vain = 0  # the last ones in a row, of those that were ever ready
        self.most_in_vain = 0  # the longest such row

    # What it says

    def count(self, state: PromptState) -> int:
        return self._counts[state]

    @property
    def counts(self) -> dict[PromptState, int]:
        """How many prompts are in each state, states without any included."""
        return {state: self._counts[state] for state in PromptState}

    def ordinals(self, state: PromptState) -> list[int]:
        """Return the prompts in `state`, in admission order."""
        return [ordinal for ordinal, each in self._states.items() if each is state]

    @property
    def finished(self) -> int:
        """How many prompts have come to an end of their own: with samples, or dead."""
        return sum(self._counts[state] for state in (*WITH_SAMPLES, PromptState.DEAD))

    @property
    def waiting(self) -> int:
        """How many finished prompts wait to be taken. Any thread may ask."""
        return len(self._waiting)

    @property
    def held_prompts(self) -> int:
        return len(self._places)

    @property
    def held_bytes(self) -> int:
        """The bytes that finished prompts hold and that are reserved for running ones."""
        return self._held_bytes

    def fills(self, ordinal: int) -> bool:
        """Return whether a prompt that waits, or is in a batch, is one of those that make its batch full."""
        return ordinal in self._places

    def may_admit(self, worst_case_bytes: int, *, served: int) -> bool:
        """Return whether one more prompt has room and keeps every sample within `max_staleness` updates of its weights.

        `served` is the step of the weights that all student servers hold. With staleness 0 a batch is admitted only
        once the weights that all its samples must come from are served (Algorithm 1). No prompt is admitted that no
        iteration is left for, nor one so far ahead of a slow one that `refill_at_most` could be exceeded unseen.
        """
        settings = self._settings
        batches = min(settings.max_staleness + served + 1, settings.iterations)
        fed = sum(self._counts[state] for state in FED)
        is_early = len(self._places) + fed >= batches * settings.batch_size
        ahead = (settings.max_staleness + 1 + (settings.refill_at_most or 0)) * settings.batch_size
        is_far = self._refills and len(self._unsettled) >= ahead
        return not (is_early or is_far) and self._has_room(worst_case_bytes)

    # What happens to prompts. Each raises ValueError for what cannot happen, such as training on a prompt twice.

    def admit(self, ordinal: int, worst_case_bytes: int) -> None:
        """Note that a prompt starts, and reserve a place for it."""
        if not self._has_room(worst_case_bytes):
            raise ValueError(f"there is no room for prompt {ordinal} ({worst_case_bytes} bytes)")
        self._move(ordinal, None, PromptState.RUNNING)
        self._places[ordinal] = worst_case_bytes
        self._held_bytes += worst_case_bytes
        self._unsettled.append(ordinal)

    def finish(self, ordinal: int, samples: Sequence[Sample], held_bytes: int) -> None:
        """Note that a prompt's supervision waits for its batch. From now on the prompt counts as what it holds."""
        self._move(ordinal, PromptState.RUNNING, PromptState.QUEUED)
        self._held_bytes += held_bytes - self._places[ordinal]
        self._places[ordinal] = held_bytes
        self._waiting[ordinal] = samples
        if self._refills and not is_trained(samples):
            self._vain_bytes[ordinal] = self._places.pop(ordinal)
        self._settle()

    def give_up(self, ordinal: int, state: PromptState) -> None:
        """Note a prompt of which a request failed for good, or cannot be paid. Another one takes a dead one's place."""
        self._move(ordinal, PromptState.RUNNING, state)
        self._free_place(ordinal)
        self._settle()

    def settle(self, ordinal: int, state: PromptState) -> None:
        """Note a prompt that an earlier part of this run brought to an end: trained, left out or dead."""
        self._move(ordinal, None, state)

    def take_batch(self) -> list[Finished] | None:
        """Return the next prompts in admission order, with their samples; None while the batch is not complete."""
        lengths = [length for length, ordinal in enumerate(self._ready, start=1) if self.fills(ordinal)]
        if len(lengths) < self._settings.batch_size:
            return None
        ordinals = [self._ready.popleft() for _ in range(lengths[self._settings.batch_size - 1])]
        for ordinal in ordinals:
            self._move(ordinal, PromptState.QUEUED, PromptState.BATCHED)
        return [(ordinal, self._waiting.pop(ordinal)) for ordinal in ordinals]

    def trained(self, batch: Iterable[Finished]) -> None:
        """Note that a batch that was taken is trained, as far as it was not left out, and free its places."""
        for ordinal, samples in batch:
            left_out = PromptState.LEFT_OUT if self.fills(ordinal) else PromptState.IN_VAIN
            after = PromptState.TRAINED if is_trained(samples) else left_out
            self._move(ordinal, PromptState.BATCHED, after)
            self._free_place(ordinal)

    def leave_over(self) -> None:
        """Note that the run is over, so that what waits fills no batch any more."""
        for ordinal in self._waiting:
            self._move(ordinal, PromptState.QUEUED, PromptState.LEFT_OVER)
            self._free_place(ordinal)
        self._waiting.clear()
        self._ready.clear()

    def _has_room(self, worst_case_bytes: int) -> bool:
        """Return whether there is a place for one more prompt.

        Bytes never bar the prompts of one batch. Otherwise some that turned out larger than was reserved could keep
        their own batch from ever being full.
        """
        settings, held = self._settings, len(self._places)
        has_bytes = self._held_bytes + worst_case_bytes <= settings.capacity_bytes
        return held < settings.capacity_prompts and (has_bytes or held < settings.batch_size)

    def _move(self, ordinal: int, before: PromptState | None, after: PromptState) -> None:
        state = self._states.get(ordinal)
        if state is not before:
            raise ValueError(f"prompt {ordinal} is {state or 'not admitted'}: it cannot become {after}")
        self._states[ordinal] = after
        self._counts[after] += 1
        if before is not None:
            self._counts[before] -= 1

    def _free_place(self, ordinal: int) -> None:
        self._held_bytes -= self._places.pop(ordinal, 0) + self._vain_bytes.pop(ordinal, 0)

    def _settle(self) -> None:
        """Make finished prompts ready for a batch, up to the first prompt that still runs."""
        while self._unsettled and self._states[self._unsettled[0]] is not PromptState.RUNNING:
            ordinal = self._unsettled.popleft()
            if ordinal in self._waiting:
                self._ready.append(ordinal)
                self._in_vain = 0 if self.fills(ordinal) else self._in_vain + 1
                self.most_in_vain = max(self.most_in_vain, self._in_vain)
