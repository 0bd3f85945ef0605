"""Keeps what teachers that follow the student have of its weights, and publishes it.

A live teacher has the student's own weights, and needs nothing here. A lagged one has a copy that is renewed every so
many steps, and an averaged one an exponential average. Both are of what is trained alone, so with LoRA of the adapters,
and each rank holds the same parts of them as of the student.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spot_async.config import FollowsConfig
from spot_async.trainer.lora import Copies
from spot_async.trainer.parallel import local
from spot_async.trainer.publishing import WeightWriter
from spot_async.trainer.settings import TrainerSettings
from spot_async.types import WeightSnapshot, WeightVersion


class FollowingTeacher:
    """The copies of one teacher. Its writer writes them like the student's own weights."""

    def __init__(self, follows: FollowsConfig, model: nn.Module, writer: WeightWriter) -> None:
        """`model` is the student as the teacher begins."""
        self.follows = follows
        self.writer = writer
        self._copies = {name: each.detach().clone() for name, each in _trained(model)}

    def advance(self, model: nn.Module, step: int) -> None:
        """Take in the student's weights after `step` steps, if it is time."""
        decay = self.follows.decay
        for name, each in _trained(model) if self.changes_at(step) else ():
            copy, new = local(self._copies[name]), local(each.detach())
            if decay is None:
                copy.copy_(new)
            else:
                copy.lerp_(new, 1 - decay)

    def changes_at(self, step: int) -> bool:
        return self.follows.step_at(step) == step

    def of(self, model: nn.Module) -> Copies:
        """Return the copies by the live parameters in whose place they stand."""
        return {each: self._copies[name] for name, each in _trained(model)}

    def state(self, role: str) -> dict[str, Tensor]:
        """Return the live copies under the names that they have in checkpoints."""
        return {f"{role}.{name}": copy for name, copy in self._copies.items()}


class FollowingTeachers:
    """All teachers of a run that follow the student, by role. All ranks call it alike."""

    def __init__(
        self, settings: TrainerSettings, model: PreTrainedModel, writer: Callable[[Path], WeightWriter]
    ) -> None:
        """`writer` makes one that publishes into a directory of its own."""
        self._settings = settings
        self._model = model
        self._teachers = {
            role: FollowingTeacher(follows, model, writer(settings.weights_directory / role))
            for role, follows in settings.follows.items()
            if not follows.is_live
        }

    @torch.no_grad()
    def advance(self, step: int) -> None:
        """Take in the student's weights after `step` steps. What was published before may not be being written."""
        for teacher in self._teachers.values():
            teacher.advance(self._model, step)

    def publish(self, step: int) -> None:
        """Write what has changed with `step`. Raises `TrainerError` as `WeightWriter.publish` does."""
        for teacher in self._teachers.values():
            if teacher.changes_at(step):
                self._write(teacher, step)

    def publish_again(self, step: int, is_gone: Callable[[Path], bool]) -> None:
        """Write what they have at `step`, which a checkpoint has, where it is gone."""
        for teacher in self._teachers.values():
            had = teacher.follows.step_at(step)
            if had and is_gone(teacher.writer.path(had)):
                self._write(teacher, had)

    def snapshots(self, student: WeightSnapshot) -> dict[str, WeightSnapshot]:
        """Return what each of them has beside these weights of the student. Those with initial weights are left out."""
        version, found = student.version, {}
        for role, follows in self._settings.follows.items():
            if follows.is_live:
                found[role] = student
            elif had := follows.step_at(version.step):
                directory = str(self._teachers[role].writer.path(had))
                found[role] = WeightSnapshot(directory=directory, version=WeightVersion(version.lineage, had))
        return found

    @property
    def state(self) -> dict[str, Tensor]:
        """Their live tensors, by the names that they have in checkpoints."""
        return {name: each for role, teacher in self._teachers.items() for name, each in teacher.state(role).items()}

    def _write(self, teacher: FollowingTeacher, step: int) -> None:
        is_whole = not self._settings.teachers_take_adapters
        teacher.writer.publish(self._model, step, is_whole=is_whole, copies=teacher.of(self._model))


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, each) for name, each in model.named_parameters() if each.requires_grad)
