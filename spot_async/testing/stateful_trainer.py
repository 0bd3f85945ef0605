"""Simulates a trainer whose weights say what they were trained on, and in which order.

The weights of a step are a digest of those before it and of the batch. So two runs trained on the same if their last
weights are equal. They lie in real directories, which are pruned as the real trainer prunes them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from spot_async.errors import TrainerError
from spot_async.models.weight_files import delete_weights
from spot_async.testing.invariants import require, weights_after
from spot_async.types import Supervision, TrainReport, WeightSnapshot, WeightVersion

INITIAL_WEIGHTS = ""
FILE = "weights"

# What may befall one step: the disk is full when its weights are published, a rank is killed, or it takes long.
TrainerFault = Literal["disk full", "killed", "slow"]
SLOW_STEP = 20.0  # times as long


def read_weights(directory: str) -> str:
    """Return the weights in a directory. Raises FileNotFoundError where it was deleted."""
    return (Path(directory) / FILE).read_text()


class StatefulTrainer:
    """A simulated trainer. It raises `InvariantError` where it is fed what it must not train on."""

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        step_s: Callable[[], float] = lambda: 1.0,
        check: Callable[[int, Sequence[Supervision]], None] = lambda step, batch: None,
    ) -> None:
        """`keep` is how many directories are kept, and `check` is told of each batch before it is trained on."""
        self.weights = [INITIAL_WEIGHTS]  # by step
        self.batches: list[list[Supervision]] = []
        self.faults: deque[TrainerFault] = deque()  # of its next steps
        self._directory = directory
        self._keep = keep
        self._step_s = step_s
        self._check = check
        self._publish(INITIAL_WEIGHTS)

    @property
    def step(self) -> int:
        return len(self.batches)

    def snapshot(self, step: int) -> WeightSnapshot:
        return WeightSnapshot(directory=str(self.path(step)), version=WeightVersion(0, step))

    def path(self, step: int) -> Path:
        return self._directory / f"step-{step:06d}"

    async def train(self, iteration: int, batch: Sequence[Supervision]) -> TrainReport:
        require(iteration == self.step, "I4", f"iteration {iteration} is trained after {self.step} steps")
        self._check(iteration, batch)
        fault = self.faults.popleft() if self.faults else None
        await asyncio.sleep(self._step_s() * (SLOW_STEP if fault == "slow" else 1.0))
        require(iteration == self.step, "I4", f"iteration {iteration} is trained twice")
        if fault == "killed":
            raise TrainerError("trainer was killed by SIGKILL")
        if fault == "disk full":
            raise TrainerError(
                f"cannot publish weights to {self.path(self.step + 1)}: No space left on device; complete weights up "
                f"to {self.path(self.step)} are untouched"
            )
        weights = weights_after(self.weights[-1], batch)
        self.batches.append(list(batch))
        self.weights.append(weights)
        self._publish(weights)
        return TrainReport(snapshot=self.snapshot(self.step), metrics={"loss": 0.0} if batch else {})

    async def save(self, step: int, directory: str) -> None:
        raise NotImplementedError("runs that are not killed need no checkpoint")

    async def saved(self, step: int) -> float:
        raise NotImplementedError("runs that are not killed need no checkpoint")

    def _publish(self, weights: str) -> None:
        path = self.path(self.step)
        path.mkdir()
        (path / FILE).write_text(weights)
        for old in sorted(self._directory.iterdir())[: -self._keep]:
            delete_weights(old)
