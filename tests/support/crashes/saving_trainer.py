"""A simulated trainer that saves checkpoints, in real files and in the order of the real one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faults.invariants import require
from faults.stateful_trainer import StatefulTrainer

from spot_async.base.files import flush_to_disk
from spot_async.errors import TrainerError

RANKS = 2  # whose files make a checkpoint
SAVING_S = 0.3  # a rank's file


class SavingTrainer(StatefulTrainer):
    def __init__(self, directory: Path, **settings: Any) -> None:
        super().__init__(directory, **settings)
        self._saving = 0, directory

    async def save(self, step: int, directory: str) -> None:
        """Begin a checkpoint. Files are written in the order of `trainer/checkpoint.py`, which imports torch."""
        require(step == self.step, "I4", f"step {step} is saved after {self.step} steps")
        self._saving = step, Path(directory)
        with _saving_to(Path(directory)):
            _make(Path(directory))

    async def saved(self, step: int) -> float:
        saving, directory = self._saving
        require(saving == step, "I4", f"step {saving} is saved, not {step}")
        with _saving_to(directory):
            for rank in range(RANKS):
                await asyncio.sleep(SAVING_S)
                _write(directory / _rank_file(rank), self.weights[step])
        return SAVING_S * RANKS


def read_checkpoint(directory: Path) -> str:
    """Return the weights in a checkpoint. Raises `InvariantError` unless all ranks' files have the same."""
    found = {(directory / _rank_file(rank)).read_text() for rank in range(RANKS)}
    require(len(found) == 1, "I7", f"the ranks' files in {directory} have {sorted(found)}")
    return found.pop()


@contextlib.contextmanager
def _saving_to(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TrainerError(f"cannot save a checkpoint to {directory}: {error.strerror}") from error


def _make(directory: Path) -> None:
    new = [each for each in (directory, *directory.parents) if not each.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for each in new:
        flush_to_disk(each.parent)
    for leftover in directory.glob("rank-*"):
        leftover.unlink()


def _write(path: Path, weights: str) -> None:
    path.write_text(weights)
    flush_to_disk(path)
    flush_to_disk(path.parent)


def _rank_file(rank: int) -> str:
    return f"rank-{rank + 1:05d}-of-{RANKS:05d}.safetensors"
