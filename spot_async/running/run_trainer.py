"""Decides how often the trainer of a run is started again where it is lost, and with which settings.

Nothing here goes back to a checkpoint: `resuming.py` does, and `training.py` begins another part of the run.
"""

from __future__ import annotations

from pathlib import Path

from spot_async.base.tasks import leaves
from spot_async.base.text import counted
from spot_async.checks.device_shares import shares_with_trainer
from spot_async.checks.machine import gpu_need
from spot_async.checks.plan import TrainPlan
from spot_async.config import Config
from spot_async.errors import TrainerLostError
from spot_async.models.footprint import merged_every
from spot_async.models.hub import local_path
from spot_async.protocols import Reviser
from spot_async.run_directory.layout import RunDirectory
from spot_async.running.resuming import Beginning
from spot_async.trainer.settings import ResumePoint, TrainerSettings


class Restarts:
    """Counts the restarts of a run's trainer. Pure."""

    def __init__(self, most: int) -> None:
        self.count = 0
        self.most = most
        self._lost_at: int | None = None  # the step that the trainer was at when it was lost last

    def after(self, loss: TrainerLostError, step: int) -> None:
        """Count a restart after a trainer at `step` was lost. Raises the loss, with the reason, if there is none."""
        is_the_same, self._lost_at = step == self._lost_at, step
        if self.count < self.most and not is_the_same:
            self.count += 1
        elif self.count == 0:
            raise loss
        elif is_the_same:
            raise TrainerLostError(f"{loss}; so it was before its last restart, also after iteration {step}")
        else:
            raise TrainerLostError(f"{loss}; it was restarted {counted(self.count, 'time')} (training.restarts)")


def loss_of_trainer(failures: BaseException) -> TrainerLostError | None:
    """Return the loss of a trainer that is all that failed; None if anything else did."""
    found = leaves(failures)
    losses = [each for each in found if isinstance(each, TrainerLostError)]
    return losses[0] if len(losses) == len(found) else None


def trainer_settings(config: Config, plan: TrainPlan, directory: RunDirectory, beginning: Beginning) -> TrainerSettings:
    """Return the settings of the trainer of a part of a run that begins there."""
    resume, checkpoint = None, beginning.checkpoint
    if checkpoint is not None:
        resume = ResumePoint(directory=str(checkpoint.directory), step=checkpoint.manifest.step)
    training = config.training.under_staleness(config.max_staleness, is_revised=isinstance(plan.policy, Reviser))
    return TrainerSettings(
        resume=resume,
        merged_every=merged_every(config),
        follows={role: each for role, each in config.following.items() if role in plan.served},
        teachers_take_adapters=config.all_take_adapters,
        lineage=beginning.manifest.lineage,
        training=training,
        model_directory=str(Path(local_path(config.student.model)).resolve()),
        run_directory=str(directory.path),
        publishes_to=str(directory.weights.published),
        temperature=config.sampling.temperature,
        longest_sequence=config.sampling.longest_sequence,
        seed=config.run.seed,
        iterations=plan.schedule.iterations,
        end_token_ids=plan.stop_token_ids,
        # A strict run has no next step before the weights are served. Parts of weights are gathered by all ranks, whose
        # collectives must not mix with those of a step.
        publishes_beside=config.max_staleness > 0 and training.sharding == "none",
        shares_devices=shares_with_trainer(config),
        needs_gpu=gpu_need(training, plan.served),
    )
