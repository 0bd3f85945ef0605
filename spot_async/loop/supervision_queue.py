"""Finished supervision on its way to the trainer, handed out in admission order.

Short responses finish first; taking them first would favour them. So a batch is the next prompts in
admission order, those that died left out. Room is granted at admission (`admission.Credits`), so
putting never waits.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import msgspec
import numpy as np

from spot_async.types import PolicyNeeds, Sample

# int32 ids, float32 behaviour, teacher and reference log-probabilities or advantages, and a mask, per response token
BYTES_PER_RESPONSE_TOKEN = 4 * 4 + 1
# float32 entropy and score, and where a mask hides some the teacher's log-probabilities once more; the record shares
# its other arrays with the supervision
BYTES_PER_RECORD_TOKEN = 3 * 4
BYTES_PER_TEXT_TOKEN = 8  # of plain text; a text with characters outside of Latin-1 may take several times that
BYTES_PER_SAMPLE = 8192  # the problem's text, names, versions, array headers, metrics, the record's plain values


def worst_case_bytes(prompt_tokens: int, max_response_tokens: int, needs: PolicyNeeds) -> int:
    """What to reserve for one prompt: its trajectories' supervision and their records, at their longest.

    Only texts can be larger, since nothing bounds the characters of a token: `held_bytes` is counted once they are
    there.
    """
    per_token = BYTES_PER_RESPONSE_TOKEN + BYTES_PER_RECORD_TOKEN + needs.soft_target_bytes_per_token
    texts = (1 + needs.probes_per_prompt) * BYTES_PER_TEXT_TOKEN * max_response_tokens
    trajectory = 4 * prompt_tokens + per_token * max_response_tokens + needs.soft_target_bytes + needs.record_bytes
    return needs.samples_per_prompt * (trajectory + texts + BYTES_PER_SAMPLE)


def held_bytes(samples: Sequence[Sample]) -> int:
    """The memory that samples take, what they share with each other once.

    A view counts as all of the memory that it keeps alive. Keys of dictionaries are not counted: each is there once,
    for all samples.
    """
    total, seen = 0, set[int]()
    left: list[object] = [samples]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        total += sys.getsizeof(value)
        match value:
            case str() | float() | int():  # most of them
                pass
            case dict():
                left += value.values()
            case list() | tuple():
                left += value
            case np.ndarray(base=of) | memoryview(obj=of):
                left.append(of)
            case msgspec.Struct():
                left += [getattr(value, name) for name in value.__struct_fields__]
    return total


class AdmissionOrder:
    """Pure buffer: samples come in as they finish and leave in admission order."""

    def __init__(self) -> None:
        self._next = 0
        self._finished: dict[int, Sequence[Sample] | None] = {}  # None: the prompt died
        self._living = 0  # how many of `_finished` have samples; kept, since a console thread asks at any moment
        self._unfinished = 0  # the first prompt that is not in `_finished`
        self._ready = 0  # living prompts before that one

    def __len__(self) -> int:
        return self._living

    def put(self, ordinal: int, samples: Sequence[Sample] | None) -> None:
        """A prompt finished with its samples, or died (None). Raises ValueError the second time."""
        if ordinal < self._next or ordinal in self._finished:
            raise ValueError(f"prompt {ordinal} finished twice")
        self._finished[ordinal] = samples
        self._living += samples is not None
        while self._unfinished in self._finished:
            self._ready += self._finished[self._unfinished] is not None
            self._unfinished += 1

    def take(self, count: int) -> list[tuple[int, Sequence[Sample]]] | None:
        """The next `count` living prompts with their samples, or None while they are not all there."""
        if self._ready < count:
            return None
        batch: list[tuple[int, Sequence[Sample]]] = []
        while len(batch) < count:
            samples = self._finished.pop(self._next)
            if samples is not None:
                batch.append((self._next, samples))
            self._next += 1
        self._living -= count
        self._ready -= count
        return batch

    def drain(self) -> list[int]:
        """Drop all living prompts that wait, for the end of a run; returns their ordinals."""
        left = sorted(ordinal for ordinal, samples in self._finished.items() if samples is not None)
        self._finished.clear()
        self._living = self._ready = 0
        return left


class SupervisionQueue:
    """The buffer with a consumer that can wait for a whole batch."""

    def __init__(self) -> None:
        self._buffer = AdmissionOrder()
        self._changed = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._buffer)

    def put(self, ordinal: int, samples: Sequence[Sample] | None) -> None:
        """See `AdmissionOrder.put`."""
        self._buffer.put(ordinal, samples)
        self._changed.set()

    def close(self) -> None:
        """No prompt will come any more: a batch that cannot be filled is not waited for."""
        self._closed = True
        self._changed.set()

    async def take_batch(self, count: int) -> list[tuple[int, Sequence[Sample]]] | None:
        """The next batch in admission order; None once the queue is closed and cannot fill one."""
        while True:
            batch = self._buffer.take(count)
            if batch is not None or self._closed:
                return batch
            self._changed.clear()
            await self._changed.wait()

    def drain(self) -> list[int]:
        """See `AdmissionOrder.drain`."""
        return self._buffer.drain()
