"""Compares the room on a run's disk with what its next checkpoint takes, before that is begun."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import msgspec

from spot_async.config import LoraConfig
from spot_async.errors import DataError
from spot_async.models.adapter_files import adapted_weights
from spot_async.models.weight_files import weight_shapes
from spot_async.run_directory.manifest import CheckpointFile

# A parameter and its two moments, in float32.
BYTES_OF_PARAMETER = 12
BYTES_OF_COPY = 4


class Parameters(msgspec.Struct, frozen=True):
    """How many numbers a student has, and how many of them its adapters."""

    model: int
    adapter: int  # 0 without LoRA

    @property
    def trained(self) -> int:
        return self.adapter or self.model

    @classmethod
    def of(cls, student: Path, lora: LoraConfig | None) -> Parameters | None:
        """Count them by the headers of a student's weights; return None if these are no safetensors."""
        try:
            shapes = weight_shapes(student)
        except DataError:
            return None
        adapter = 0 if lora is None else lora.rank * sum(map(sum, adapted_weights(shapes, lora).values()))
        return cls(sum(map(math.prod, shapes.values())), adapter)


def bytes_of_first(student: Path, lora: LoraConfig | None, copies: int = 0) -> int:
    """Return what the first checkpoint of a student takes; 0 if its weights are in files that are no safetensors.

    `copies` is how many more of what is trained it has, for teachers that follow the student.
    """
    found = Parameters.of(student, lora)
    return 0 if found is None else (BYTES_OF_PARAMETER + BYTES_OF_COPY * copies) * found.trained


def bytes_of(files: tuple[CheckpointFile, ...]) -> int:
    return sum(file.bytes for file in files)


def shortage(path: Path, needed_bytes: int) -> str | None:
    """Return in words that a checkpoint does not fit on the disk of a path, which may be new; None if it does."""
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    free_bytes = shutil.disk_usage(there).free
    if free_bytes >= needed_bytes:
        return None
    return f"a checkpoint takes {shown_size(needed_bytes)}, and the disk of {path} has {shown_size(free_bytes)} left"


def shown_size(number: int) -> str:
    size, unit = next((each for each in ((1e9, "GB"), (1e6, "MB")) if number >= each[0]), (1e3, "kB"))
    return f"{number / size:,.1f} {unit}"
