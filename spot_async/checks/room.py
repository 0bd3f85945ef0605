"""Checks before a run begins that its disk has room for the first checkpoint."""

from __future__ import annotations

from pathlib import Path

from spot_async.config import TrainingConfig
from spot_async.errors import ConfigError
from spot_async.run_directory.room import bytes_of_first, shortage


def check_room(path: Path, training: TrainingConfig, student: Path) -> None:
    """Raise ConfigError if a run in directory `path` could not save its first checkpoint. `student` is the model's."""
    if not training.checkpoint_every:
        return
    if (words := shortage(path, bytes_of_first(student, training.lora))) is not None:
        raise ConfigError(
            f"run.directory: {words}: make room, give a directory on another disk, or set training.checkpoint_every=0, "
            "without which a run that is killed cannot go on"
        )
