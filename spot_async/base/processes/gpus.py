"""Counts the GPUs of this machine without importing torch, which would take seconds."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

# Devices behind which GPUs cannot be counted so: of AMD, of Windows below Linux, of Jetson boards.
UNCOUNTED = ("kfd", "dxg", "nvgpu")


def gpu_count(devices: Path = Path("/dev")) -> int | None:
    """Return how many GPUs this machine has; None where files do not tell."""
    if any((devices / name).exists() for name in UNCOUNTED):
        return None
    return sum(re.fullmatch(r"nvidia\d+", each.name) is not None for each in devices.glob("nvidia*"))


def visible_gpus(environ: Mapping[str, str], machine: int) -> int:
    """Return how many of the machine's GPUs the environment leaves to a process."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    return machine if named is None else min(machine, sum(bool(each.strip()) for each in named.split(",")))


def torch_has_gpus() -> bool:
    """Return whether torch was built for CUDA or ROCm. Its files tell."""
    spec = importlib.util.find_spec("torch")
    version = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin is not None else None
    if version is None or not version.is_file():
        return True  # it is unknown, so let the process that needs it find out
    return re.search(r"^(cuda|hip)\b.*= '", version.read_text(encoding="utf-8"), re.MULTILINE) is not None
