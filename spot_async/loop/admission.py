"""When the next prompt may start. Pure functions of counters and credits; no clock, no tasks.

Two things must allow it: the staleness bound, and a place in the supervision queue reserved for the
worst case. Reserving at admission means that a finished prompt never waits for room, so batches in
admission order cannot deadlock behind a full queue. Once it is finished it counts as what it really holds.
"""

from __future__ import annotations

from spot_async.loop.ledger import Ledger, PromptState


def may_admit(*, running: int, queued: int, trained: int, version: int, batch_size: int, max_staleness: int) -> bool:
    """Whether one more prompt keeps every sample within `max_staleness` updates of its weights.

    `version` counts published updates, `trained` the prompts in them. With staleness 0 a batch is
    admitted only when the weights that all its samples must come from are live (Algorithm 1).
    """
    return running + queued + trained < (max_staleness + version + 1) * batch_size


class Credits:
    """Places in the supervision queue, in prompts and in bytes."""

    def __init__(self, *, capacity_prompts: int, capacity_bytes: int, batch_size: int = 0) -> None:
        """As many prompts as a batch has always fit: those that turned out larger than was reserved must not keep the
        batch that they belong to from ever being full."""
        self._capacity_prompts = capacity_prompts
        self._capacity_bytes = capacity_bytes
        self._batch_size = batch_size
        self._held: dict[int, int] = {}
        self._held_bytes = 0

    @property
    def held_prompts(self) -> int:
        return len(self._held)

    @property
    def held_bytes(self) -> int:
        """What finished prompts hold, and what is reserved for the others."""
        return self._held_bytes

    def fits(self, worst_case_bytes: int) -> bool:
        """Whether a reservation would be granted now."""
        prompts = len(self._held)
        has_bytes = self._held_bytes + worst_case_bytes <= self._capacity_bytes
        return prompts < self._capacity_prompts and (has_bytes or prompts < self._batch_size)

    def reserve(self, ordinal: int, worst_case_bytes: int) -> None:
        """Raises ValueError when it does not fit or the prompt holds a place already."""
        if ordinal in self._held or not self.fits(worst_case_bytes):
            raise ValueError(f"no credit for prompt {ordinal} ({worst_case_bytes} bytes)")
        self._held[ordinal] = worst_case_bytes
        self._held_bytes += worst_case_bytes

    def finish(self, ordinal: int, held_bytes: int) -> None:
        """The prompt is finished: from now on it counts as what it holds, be that less or more than was reserved."""
        self._held_bytes += held_bytes - self._held[ordinal]
        self._held[ordinal] = held_bytes

    def release(self, ordinal: int) -> None:
        """Give the place back, once: when the prompt was trained or died."""
        self._held_bytes -= self._held.pop(ordinal)


class AdmissionGate:
    """Joins the staleness bound and the credits over one ledger."""

    def __init__(self, ledger: Ledger, credits_: Credits, *, batch_size: int, max_staleness: int) -> None:
        self._ledger = ledger
        self._credits = credits_
        self._batch_size = batch_size
        self._max_staleness = max_staleness

    def is_open(self, *, version: int, worst_case_bytes: int) -> bool:
        """Whether a prompt of that size may be admitted while `version` updates are published."""
        count = self._ledger.count
        return self._credits.fits(worst_case_bytes) and may_admit(
            running=count(PromptState.RUNNING),
            queued=count(PromptState.QUEUED),
            trained=self._ledger.consumed,
            version=version,
            batch_size=self._batch_size,
            max_staleness=self._max_staleness,
        )
