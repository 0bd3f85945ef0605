"""What is checked of an adapter's files before any server hears of them.

Servers take many broken ones with a 200. They then answer with wrong numbers, or end at the first request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from spot_async.config.lora import TARGETS
from spot_async.errors import DataError
from spot_async.trainer.lora import CONFIG_FILE, DOWN, PEFT_PREFIX, UP, WEIGHTS_FILE


def check_adapter(directory: Path, layers: Mapping[str, tuple[int, int]], largest_rank: int) -> None:
    """Raise DataError unless a directory has a whole adapter for exactly these layers, given as name: (out, in)."""
    try:
        config = json.loads((directory / CONFIG_FILE).read_text())
        tensors = load_file(directory / WEIGHTS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"adapter {directory}: cannot be read ({error})") from error
    fault = adapter_fault(config, tensors, layers, largest_rank)
    if fault:
        raise DataError(f"adapter {directory}: {fault}")


def adapter_fault(
    config: Any, tensors: Mapping[str, Tensor], layers: Mapping[str, tuple[int, int]], largest_rank: int
) -> str | None:
    """Return what is wrong with an adapter, or None."""
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        return "its configuration is not LoRA's"
    for key in ("use_dora", "use_rslora", "modules_to_save"):
        if config.get(key):
            return f"servers do not serve {key}"
    rank = config.get("r")
    if not isinstance(rank, int) or not 1 <= rank <= largest_rank:
        return f"its rank is {rank}; servers take 1 to {largest_rank}"
    targets = {name.rpartition(".")[2] for name in layers}
    if set(config.get("target_modules") or ()) != targets or not targets <= set(TARGETS["all"]):
        return f"its target modules are {config.get('target_modules')}, and not {sorted(targets)}"
    shapes = {
        f"{PEFT_PREFIX}{name}.{part}.weight": shape
        for name, (outputs, inputs) in layers.items()
        for part, shape in ((DOWN, (rank, inputs)), (UP, (outputs, rank)))
    }
    for name in sorted(shapes.keys() ^ tensors.keys()):
        return f"it has no {name}" if name in shapes else f"no layer takes its {name}"
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            return f"{name} has shape {tuple(tensors[name].shape)}, and not {shape}"
        if not torch.isfinite(tensors[name]).all():
            return f"{name} has numbers that are not finite"
    return None
