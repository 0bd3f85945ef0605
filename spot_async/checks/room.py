"""Checks before a run begins that there is room for its first checkpoint, and for weights outside of its directory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from spot_async.base.processes.private_directory import remove_abandoned
from spot_async.base.processes.resources import available_bytes, is_in_memory
from spot_async.base.writers import refuse_foreign_writers
from spot_async.checks.plan import TrainPlan, merged_every
from spot_async.checks.staleness import training_under_staleness
from spot_async.config import Config, TrainingConfig
from spot_async.errors import ConfigError
from spot_async.run_directory.room import Parameters, bytes_of_first, shortage, shown_size

ADAPTER_BYTES = 4  # of each of an adapter's numbers
WHOLE_KEPT = 2  # published directories that are whole, where most have an adapter alone


def check_room(path: Path, config: Config, plan: TrainPlan) -> None:
    """Raise ConfigError if a run in directory `path` could not publish its weights, or save its first checkpoint.

    Raises DataError if others could change what it publishes.
    """
    training, student = config.training, plan.student.directory
    if training.checkpoint_every and (words := shortage(path, bytes_of_first(student, training.lora))) is not None:
        raise ConfigError(
            f"run.directory: {words}: make room, give a directory on another disk, or set training.checkpoint_every=0, "
            "without which a run that is killed cannot go on"
        )
    if training.weights_directory is None:
        return
    directory = Path(training.weights_directory)
    if not (directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)):
        raise ConfigError(f"training.weights_directory={directory}: is no directory in which this user can write")
    refuse_foreign_writers([directory / "spot-weights"])  # of the directories on the way: servers would find out later
    remove_abandoned(directory)
    if (words := weights_shortage(config, plan)) is not None:
        raise ConfigError(words)


def weights_shortage(config: Config, plan: TrainPlan) -> str | None:
    """Return in one line that `training.weights_directory` has too little room; None if it has enough."""
    if (parent := config.training.weights_directory) is None:
        return None
    parameters = Parameters.of(plan.student.directory, config.training.lora)
    needed = 0 if parameters is None else published_bytes(config, parameters, plan.schedule.iterations)
    free, where = shutil.disk_usage(parent).free, parent
    if is_in_memory(Path(parent)) and (left := available_bytes()) < free:
        free, where = left, "this machine's memory"
    if needed <= free:
        return None
    return (
        f"training.weights_directory={parent}: published weights take {shown_size(needed)} there, and {where} has "
        f"{shown_size(free)} left: make room, lower training.keep_weights, or set it to null, for a disk"
    )


def published_bytes(config: Config, parameters: Parameters, iterations: int) -> int:
    """Return the bytes of all published weights that are kept at once, with those that are being written."""
    kept = training_under_staleness(config.training, config.max_staleness).keep_weights
    whole = student_bytes(config.training, parameters)
    if merged_every(config) == 1:
        return whole * min(iterations, kept + 1)
    return whole * min(iterations, WHOLE_KEPT + 1) + ADAPTER_BYTES * parameters.adapter * min(iterations, kept)


def student_bytes(training: TrainingConfig, parameters: Parameters) -> int:
    """Return the bytes of a student that is published whole, with its adapter beside it."""
    width = 2 if training.dtype == "bfloat16" else 4
    return width * parameters.model + ADAPTER_BYTES * parameters.adapter
