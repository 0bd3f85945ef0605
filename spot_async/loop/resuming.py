"""What an orchestrator keeps so that its run can continue after a kill, and what it is given to continue from.

The real parts are `run_directory/ledger.py` and `running/checkpoints.py`. Here is what the loop asks of them, and how
the trainer's state is saved beside the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from spot_async.loop.admission import PromptState
from spot_async.protocols import Trainer
from spot_async.types import Sample, WeightVersion

INITIAL = WeightVersion(lineage=0, step=0)


class PromptLedger(Protocol):
    """Notes on disk what becomes of each prompt. Every method raises StorageError."""

    def admit(self, ordinal: int, problem_id: str) -> None: ...

    def finish(self, ordinal: int, samples: Sequence[Sample], accuracy: Mapping[str, float]) -> None: ...

    def give_up(self, ordinal: int, state: str, reason: str) -> None: ...

    def cut(self, batch: int, lineage: int, prompts: Mapping[int, bool | None]) -> None:
        """Note a batch, durably: it is about to be trained on. None: others filled it for this prompt."""


class Checkpoints(Protocol):
    """Decides when the trainer's state is saved, and makes it count."""

    def is_due(self, iteration: int) -> bool:
        """Whether the trainer saves its state after this iteration (the first one is 1)."""

    def directory(self, iteration: int) -> str:
        """Return where the trainer saves its state after this iteration. It begins to now, and so does the policy."""

    async def commit(self, iteration: int) -> None:
        """Make what was saved after this iteration the state to resume from. Everything else of it is on disk."""


class NoLedger(PromptLedger):
    """Keeps nothing: the ledger of runs that are not resumed, as in tests and programs."""


@dataclass(frozen=True)
class Resumption:
    """Where a run continues. By default it is at its beginning."""

    version: WeightVersion = INITIAL  # the weights that are trained and served
    settled: Mapping[int, PromptState] = field(default_factory=dict)  # prompts at their end, by ordinal
    # Returns the samples that were kept of a prompt that is not at its end. None: it is supervised once more.
    samples_of: Callable[[int], Sequence[Sample] | None] = lambda ordinal: None
    accuracy_of: Callable[[int], Mapping[str, float]] = lambda ordinal: {}  # what was kept beside these


@dataclass(frozen=True)
class Records:
    """What a run keeps of itself, and where an earlier part of it ended. By default it keeps nothing."""

    ledger: PromptLedger = field(default_factory=NoLedger)
    checkpoints: Checkpoints | None = None
    resumption: Resumption = Resumption()


class StateSaver:
    """Saves when asked to. `begin` is always followed by `finish`, which may run beside what comes next."""

    def __init__(self, trainer: Trainer, checkpoints: Checkpoints | None, step: int) -> None:
        """`step` is that of the newest checkpoint. Without `checkpoints` nothing is ever saved."""
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._saved_step = step
        self._idle = asyncio.Event()
        self._idle.set()

    def is_due(self, step: int) -> bool:
        return self._checkpoints is not None and self._checkpoints.is_due(step)

    @property
    def is_busy(self) -> bool:
        return not self._idle.is_set()

    async def begin(self, step: int) -> None:
        """Let the trainer begin to save its state, which is that after `step` steps. It may train on at once."""
        assert self._checkpoints is not None
        await self._idle.wait()
        self._idle.clear()
        await self._trainer.save(step, self._checkpoints.directory(step))

    async def finish(self, step: int) -> None:
        """Wait until it is saved, and make it count. All else that a run continuing from there needs is on disk."""
        assert self._checkpoints is not None
        seconds = await self._trainer.saved(step)
        await self._checkpoints.commit(step)
        structlog.get_logger().info("checkpoint", step=step, saved_s=seconds)
        self._saved_step = step
        self._idle.set()

    def lacks(self, step: int) -> bool:
        """Return whether the state after `step` steps would have to be saved. It may be on its way."""
        return self._checkpoints is not None and step > self._saved_step

    async def bring_up_to(self, step: int) -> None:
        """Save what the trainer stands at, unless that is saved."""
        await self._idle.wait()
        if self.lacks(step):
            await self.begin(step)
            await self.finish(step)


class StopRequest:
    """The wish that a run end with a checkpoint: a signal handler has it. It is heard only while somebody listens."""

    def __init__(self) -> None:
        self._listener: Callable[[], None] | None = None

    @contextmanager
    def heard_by(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener` when the wish is said while inside. It must return at once."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    @property
    def is_heard(self) -> bool:
        return self._listener is not None

    def say(self) -> None:
        if self._listener is not None:
            self._listener()
