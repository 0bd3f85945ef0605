"""Keeps what teachers that follow the student have of its weights, and publishes it.

A live teacher has the student's own weights, and needs nothing here. A lagged one has a copy that is renewed every so
many steps, and an averaged one an exponential average. Both are of what is trained alone, so with LoRA of the adapters.
They lie beside the optimiser's averages of gradients, and so are spread, offloaded and saved as those are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spot_async.trainer.optimizer import state_of
from spot_async.trainer.parallel import local
from spot_async.trainer.publishing import WeightWriter
from spot_async.trainer.settings import TrainerSettings
from spot_async.types import WeightSnapshot, WeightVersion


@dataclass(eq=False)
class FollowingTeachers:
    """All teachers of a run that follow the student, by role. All ranks call it alike."""

    settings: TrainerSettings
    model: PreTrainedModel  # the student as they begin
    optimizer: torch.optim.Optimizer
    writer: Callable[..., WeightWriter]  # makes one, given its directory and what is `written`

    def __post_init__(self) -> None:
        self._parameters = [each for each in self.model.parameters() if each.requires_grad]
        self._writers = {
            role: self.writer(self.settings.weights_directory / role, written=partial(self._copy_of, role))
            for role, follows in self.settings.follows.items()
            if not follows.is_live
        }
        for parameter in self._parameters:
            state = state_of(self.optimizer, parameter)
            state |= {role: parameter.detach().clone().to(state["exp_avg"].device) for role in self._writers}

    def _copy_of(self, role: str, live: Tensor) -> Tensor:
        """Return what a teacher has in place of a tensor of the student; itself if that is not trained."""
        return cast(Tensor, self.optimizer.state[live][role]) if live.requires_grad else live

    @torch.no_grad()
    def advance(self, step: int) -> None:
        """Take in the student's weights after `step` steps. What was published before may not be being written."""
        for role in self._writers:
            follows = self.settings.follows[role]
            for parameter in self._parameters if follows.step_at(step) == step else ():
                copy = local(self._copy_of(role, parameter))
                new = local(parameter).to(copy.device)
                if follows.decay is None:
                    copy.copy_(new)
                else:
                    copy.lerp_(new, 1 - follows.decay)

    def publish(self, step: int, is_due: Callable[[Path, int], bool]) -> None:
        """Write what they have at `step`, where it `is_due`, given its directory and the step that it is of.

        Raises `TrainerError` as `WeightWriter.publish` does.
        """
        for role, writer in self._writers.items():
            had = self.settings.follows[role].step_at(step)
            if had and is_due(writer.path(had), had):
                writer.publish(self.model, had, is_whole=not self.settings.teachers_take_adapters)

    def snapshots(self, student: WeightSnapshot) -> dict[str, WeightSnapshot]:
        """Return what each of them has beside these weights of the student. Those with initial weights are left out."""
        version, found = student.version, {}
        for role, follows in self.settings.follows.items():
            if follows.is_live:
                found[role] = student
            elif had := follows.step_at(version.step):
                directory = str(self._writers[role].path(had))
                found[role] = WeightSnapshot(directory=directory, version=WeightVersion(version.lineage, had))
        return found
