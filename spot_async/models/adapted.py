"""Which weights of a model directory get an adapter, by the names and shapes in its files. It reads no tensor."""

from __future__ import annotations

from pathlib import Path

from spot_async.config import LoraConfig
from spot_async.config.lora import TARGETS
from spot_async.errors import ConfigError, DataError
from spot_async.models.weight_files import weight_shapes

Shapes = dict[str, tuple[int, ...]]


def adapted_weights(shapes: Shapes, lora: LoraConfig) -> Shapes:
    """Return those of the weights that get an adapter."""
    return {name: shape for name, shape in _linear(shapes).items() if _layer(name) in TARGETS[lora.targets]}


def check_targets(directory: Path, lora: LoraConfig) -> None:
    """Raise ConfigError if no layer of the model gets an adapter. Files that are no safetensors are not looked into."""
    try:
        shapes = weight_shapes(directory)
    except DataError:
        return
    if not adapted_weights(shapes, lora):
        there = ", ".join(sorted({_layer(name) for name in _linear(shapes)})) or "none"
        raise ConfigError(
            f"training.lora.targets={lora.targets}: {directory} has no layer {', '.join(TARGETS[lora.targets])}; "
            f"matrices of its layers: {there}"
        )


def _linear(shapes: Shapes) -> Shapes:
    """Return the matrices of numbered layers, and so neither the embedding nor the output layer."""
    return {
        name: shape
        for name, shape in shapes.items()
        if len(shape) == 2 and name.endswith(".weight") and any(part.isdigit() for part in name.split("."))
    }


def _layer(name: str) -> str:
    return name.split(".")[-2]
