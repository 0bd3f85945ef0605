"""Compares the room on a run's disk with what its next checkpoint takes, before that is begun."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from spot_async.config import LoraConfig
from spot_async.errors import DataError
from spot_async.models.adapted import adapted_weights
from spot_async.models.weight_files import weight_shapes
from spot_async.run_directory.manifest import CheckpointFile

# A parameter and its two moments, in float32.
BYTES_OF_PARAMETER = 12


def bytes_of_first(student: Path, lora: LoraConfig | None) -> int:
    """Return what the first checkpoint of a student takes; 0 if its weights are in files that are no safetensors."""
    try:
        shapes = weight_shapes(student)
    except DataError:
        return 0
    if lora is None:
        return BYTES_OF_PARAMETER * sum(map(math.prod, shapes.values()))
    return BYTES_OF_PARAMETER * lora.rank * sum(map(sum, adapted_weights(shapes, lora).values()))


def bytes_of(files: tuple[CheckpointFile, ...]) -> int:
    return sum(file.bytes for file in files)


def shortage(path: Path, needed_bytes: int) -> str | None:
    """Return in words that a checkpoint does not fit on the disk of a path, which may be new; None if it does."""
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    free_bytes = shutil.disk_usage(there).free
    if free_bytes >= needed_bytes:
        return None
    return f"a checkpoint takes {_size(needed_bytes)}, and the disk of {path} has {_size(free_bytes)} left"


def _size(number: int) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"
