"""What an orchestrator keeps so that its run can go on after a kill, and what it is given to go on from.

The real parts are `run_directory/ledger.py` and `running/checkpoints.py`. Here is what the loop asks of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from spot_async.loop.admission import PromptState
from spot_async.types import Sample, WeightVersion

INITIAL = WeightVersion(lineage=0, step=0)


class PromptLedger(Protocol):
    """Notes on disk what becomes of each prompt. Every method raises StorageError."""

    def admit(self, ordinal: int, problem_id: str) -> None: ...

    def finish(self, ordinal: int, samples: Sequence[Sample]) -> None: ...

    def give_up(self, ordinal: int, state: str, reason: str) -> None: ...

    def cut(self, batch: int, lineage: int, prompts: Mapping[int, bool]) -> None:
        """Note a batch, durably: it is about to be trained on."""
        ...


class Checkpoints(Protocol):
    """Decides when the trainer's state is saved, and makes it count."""

    def is_due(self, iteration: int) -> bool:
        """Whether the trainer saves its state after this iteration (the first one is 1)."""
        ...

    def directory(self, iteration: int) -> str:
        """Return where the trainer saves its state after this iteration."""
        ...

    async def commit(self, iteration: int) -> None:
        """Make what was saved after this iteration the state to resume from. Everything else of it is on disk."""
        ...


class NoLedger:
    """Keeps nothing: the `PromptLedger` of runs that are not resumed, as in tests and programs."""

    def admit(self, ordinal: int, problem_id: str) -> None:
        pass

    def finish(self, ordinal: int, samples: Sequence[Sample]) -> None:
        pass

    def give_up(self, ordinal: int, state: str, reason: str) -> None:
        pass

    def cut(self, batch: int, lineage: int, prompts: Mapping[int, bool]) -> None:
        pass


@dataclass(frozen=True)
class Resumption:
    """Where a run goes on. By default it is at its beginning."""

    version: WeightVersion = INITIAL  # the weights that are trained and served
    settled: Mapping[int, PromptState] = field(default_factory=dict)  # prompts at their end, by ordinal
    # Returns the samples that were kept of a prompt that is not at its end. None: it is supervised once more.
    samples_of: Callable[[int], Sequence[Sample] | None] = lambda ordinal: None
