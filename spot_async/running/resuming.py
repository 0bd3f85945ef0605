"""Opens a run that ended early, to continue it: its configuration, its newest whole checkpoint, its plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from spot_async.checks.plan import TrainPlan, plan_training
from spot_async.checks.resuming import check_same_numbers, check_same_prompts, digest_of_keys, digest_of_prompts
from spot_async.config import Config
from spot_async.config.loading import load_config
from spot_async.errors import ConfigError, DataError
from spot_async.models.hub import ROLES, Say, with_downloads
from spot_async.run_directory import manifest
from spot_async.run_directory.layout import RunDirectory
from spot_async.run_directory.manifest import Checkpoint, Manifest
from spot_async.trainer.settings import TrainerSettings, seam_words


@dataclass(frozen=True)
class ResumedRun:
    """A run that can continue. Nothing of its directory is changed yet."""

    config: Config
    plan: TrainPlan
    directory: RunDirectory
    checkpoint: Checkpoint


def open_run(
    path: Path, overrides: Sequence[str] = (), say: Say | None = None, *, weights: Collection[str] = ROLES
) -> ResumedRun:
    """Return a run that ended early. Raises ConfigError or DataError, in one line, and changes nothing.

    Models of the hub that are no longer in its cache are downloaded: `say` and `weights` are as in `with_downloads`.
    `say` also gets what happens to the learning rate, if the run continues for another number of iterations.
    """
    directory = RunDirectory.open_own(path)
    if directory.purpose == "eval":
        raise DataError(f"{path} holds an evaluation: spot-async eval --resume {path}")
    if directory.is_in_use():
        raise DataError(f"{path} is in use: wait for the end of its run, or stop it first")
    before = load_config(path / "config.yaml", ())
    config = load_config(path / "config.yaml", overrides)
    check_same_numbers(before, config)
    checkpoint = manifest.newest(path)
    if checkpoint.manifest.keys != digest_of_keys(config):
        raise ConfigError(f"{path / 'config.yaml'}: was changed since the run began, in a key that decides numbers")
    config = with_downloads(config, say, weights=weights)
    plan = plan_training(config)
    check_same_prompts(checkpoint.manifest.data, plan)
    step, iterations = checkpoint.manifest.step, plan.schedule.iterations
    # One that was stopped during its last evaluations has no summary yet.
    if step > iterations or (step == iterations and directory.has_summary):
        raise DataError(
            f"{path}: all {iterations} iterations are trained: nothing is left to do; to train further give "
            "training.iterations=N"
        )
    if say is not None and (words := _seam(path, before, config, plan, step)):
        say(words)
    return ResumedRun(config, plan, directory, checkpoint)


def _seam(path: Path, before: Config, config: Config, plan: TrainPlan, step: int) -> str:
    """Return what happens to the learning rate where the run continues; empty if that is as the last part planned."""
    try:
        last = TrainerSettings.load(str(path / "trainer.json"))
        training, iterations = last.training, last.iterations
    except (OSError, ValueError):  # lost, or of another version
        training = before.training
        epochs = (training.epochs or 1) * (plan.schedule.per_epoch // training.batch_size)
        iterations = training.iterations or epochs
    return seam_words(training, iterations, config.training, plan.schedule.iterations, step)


def beginning_of(config: Config, plan: TrainPlan, checkpoint: Checkpoint | None) -> Manifest:
    """Return the manifest of the part of a run that begins now."""
    return manifest.beginning(checkpoint, keys=digest_of_keys(config), data=digest_of_prompts(plan))
