"""Simulates a trainer whose weights say what they were trained on, and in which order.

The weights of a step are a digest of those before it and of the batch. So two runs trained on the same if their last
weights are equal. They lie in real directories, which are written and pruned as the real trainer does it.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from faults.invariants import require, teachers_weights, weights_after
from spot_async.base.files import all_numbered, numbered
from spot_async.config import FollowsConfig
from spot_async.errors import TrainerError
from spot_async.models.weight_files import SINGLE_FILE, complete_directory, delete_weights
from spot_async.testing.services import simulated_live
from spot_async.types import Live, Supervision, TrainReport, WeightFile, WeightSnapshot, WeightVersion

INITIAL_WEIGHTS = ""
FILE = SINGLE_FILE
# What may befall one step: the disk is full when its weights are published, a rank is killed, or it takes long.
TrainerFault = Literal["disk full", "killed", "slow"]
MEMORY = Path("/dev/shm")
SLOW_STEP = 20.0  # times as long


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Make a directory, in memory where the system has such a place, and delete it at the end."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as directory:
        yield Path(directory)


def read_weights(directory: str | Path) -> str:
    """Return the weights in a directory. Raises FileNotFoundError where it was deleted."""
    return (Path(directory) / FILE).read_text()


@dataclass
class Line:
    """The weights of a run by step, and the batches that made them. A resumed run cuts it, and continues it."""

    lineage: int = 0
    weights: list[str] = field(default_factory=lambda: [INITIAL_WEIGHTS])
    batches: list[list[Supervision]] = field(default_factory=list)

    def cut(self, step: int, lineage: int) -> None:
        self.lineage = lineage
        del self.weights[step + 1 :], self.batches[step:]


class StatefulTrainer:
    """A simulated trainer. It raises `InvariantError` where it is fed what it must not train on."""

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        step_s: Callable[[], float] = lambda: 1.0,
        check: Callable[[int, Sequence[Supervision]], None] = lambda step, batch: None,
        line: Line | None = None,
        write_s: float | None = None,
        follows: FollowsConfig | None = None,
    ) -> None:
        """`keep` is how many directories are kept, and `check` is told of each batch before it is trained on.

        `follows`: how the run's teacher follows the student.

        With a `line` it continues behind its last weights. Weights are written in `write_s` beside the next step, or at
        once with None.
        """
        self._line = line or Line()
        self._follows = follows
        self.faults: deque[TrainerFault] = deque()  # of its next steps
        self._directory = directory
        self._keep = keep
        self._write_s = write_s
        self._wrote = asyncio.Event()
        self._disk_is_full = False
        self.written = self.step  # the newest weights on disk
        self._step_s = step_s
        self._check = check
        try:
            directory.mkdir(exist_ok=True)
            for leftover in all_numbered(directory, ".step"):
                shutil.rmtree(leftover)
        except OSError as error:
            raise self._cannot_publish(str(error.strerror)) from error
        if not self.path(self.step).exists():
            self._publish(self.step)
        for step in {0, self.step} if follows is not None else ():
            self._publish_teacher(step)

    @property
    def weights(self) -> Sequence[str]:
        return self._line.weights

    @property
    def batches(self) -> Sequence[Sequence[Supervision]]:
        return self._line.batches

    @property
    def step(self) -> int:
        return len(self.batches)

    def snapshot(self, step: int) -> WeightSnapshot:
        return WeightSnapshot(directory=str(self.path(step)), version=WeightVersion(self._line.lineage, step))

    def path(self, step: int) -> Path:
        return numbered(self._directory, "step", step)

    def teachers(self, step: int) -> dict[str, WeightSnapshot]:
        """Return what the teacher that follows has with the student's weights of a step, if there is one."""
        if self._follows is None:
            return {}
        had = self._follows.step_at(step)
        return {
            "teacher": WeightSnapshot(
                directory=str(self._teachers(had)), version=WeightVersion(self._line.lineage, had)
            )
        }

    def _teachers(self, step: int) -> Path:
        return numbered(self._directory / "teacher", "step", step)

    def _publish_teacher(self, step: int) -> None:
        assert self._follows is not None
        path = self._teachers(self._follows.step_at(step))
        try:
            if self._line.lineage or not path.exists():
                path.parent.mkdir(exist_ok=True)
                shutil.rmtree(path, ignore_errors=True)
                with complete_directory(path, is_durable=False) as partial:
                    (partial / FILE).write_text(teachers_weights(self._follows, self.weights, step))
        except OSError as error:
            raise self._cannot_publish(str(error.strerror)) from error
        for old in all_numbered(path.parent, "step", above=0)[: -self._keep]:
            delete_weights(old)

    async def look(self, iteration: int, batch: Sequence[Supervision]) -> Sequence[Live]:
        require(iteration == self.step, "I4", f"iteration {iteration} is looked at after {self.step} steps")
        return list(map(simulated_live, batch))

    async def train(self, iteration: int, batch: Sequence[Supervision]) -> TrainReport:
        require(iteration == self.step, "I4", f"iteration {iteration} is trained after {self.step} steps")
        self._check(iteration, batch)
        fault = self.faults.popleft() if self.faults else None
        await asyncio.sleep(self._step_s() * (SLOW_STEP if fault == "slow" else 1.0))
        while self.written < self.step:
            self._wrote.clear()
            await self._wrote.wait()
        require(iteration == self.step, "I4", f"iteration {iteration} is trained twice")
        if fault == "killed":
            raise TrainerError("trainer was killed by SIGKILL")
        self._disk_is_full = fault == "disk full"
        if self._write_s is None and self._disk_is_full:
            raise self._cannot_publish("No space left on device")
        weights = weights_after(self.weights[-1], batch)
        self._line.batches.append(list(batch))
        self._line.weights.append(weights)
        if self._write_s is None:
            self._publish(self.step)
        metrics = {"loss": 0.0} if batch else {}
        return TrainReport(snapshot=self.snapshot(self.step), metrics=metrics, teachers=self.teachers(self.step))

    async def published(self, step: int) -> tuple[WeightFile, ...]:
        if self._write_s is None:
            return ()
        require(step == self.step == self.written + 1, "I7", f"weights {step} are asked for after {self.written}")
        await asyncio.sleep(self._write_s)
        if self._disk_is_full:
            raise self._cannot_publish("No space left on device")
        self._publish(step)
        self._wrote.set()
        return ()

    async def save(self, step: int, directory: str) -> None:
        require(step == self.step, "I4", f"step {step} is saved after {self.step} steps")

    async def saved(self, step: int) -> float:
        return 0.0

    def _publish(self, step: int) -> None:
        try:
            if self._follows is not None and self._follows.step_at(step) == step:
                self._publish_teacher(step)
            with complete_directory(self.path(step), is_durable=False) as partial:
                (partial / FILE).write_text(self.weights[step])
        except OSError as error:
            raise self._cannot_publish(str(error.strerror)) from error
        self.written = step
        for old in all_numbered(self._directory, "step")[: -self._keep]:
            delete_weights(old)

    def _cannot_publish(self, reason: str) -> TrainerError:
        return TrainerError(
            f"cannot publish weights to {self.path(self.written + 1)}: {reason}; complete weights up to "
            f"{self.path(self.written)} are untouched"
        )
