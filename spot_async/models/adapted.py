"""Which weights of a model directory get an adapter, by the names and shapes in its files. It reads no tensor."""

from __future__ import annotations

from pathlib import Path

from spot_async.config import LoraConfig
from spot_async.config.lora import TARGETS
from spot_async.errors import ConfigError, DataError
from spot_async.models.weight_files import Shapes, weight_shapes

EXPERTS = "experts"


def gets_adapter(layer: str, lora: LoraConfig) -> bool:
    """Say whether a linear layer of this name gets an adapter.

    Experts of mixtures get none: their files hold one matrix each, but transformers makes one tensor of all of them.
    """
    *within, last = layer.split(".")
    return last in TARGETS[lora.targets] and EXPERTS not in within


def adapted_weights(shapes: Shapes, lora: LoraConfig) -> Shapes:
    """Return those of the weights that get an adapter."""
    return {name: each for name, each in _linear(shapes).items() if gets_adapter(name.removesuffix(".weight"), lora)}


def check_lora(directory: Path, lora: LoraConfig) -> None:
    """Raise ConfigError unless the model has layers of all names among the targets, as large as the rank or larger.

    Files that are no safetensors are not looked into.
    """
    try:
        shapes = weight_shapes(directory)
    except DataError:
        return
    adapted = adapted_weights(shapes, lora)
    check_names(str(directory), {_layer(name) for name in adapted}, {_layer(name) for name in _linear(shapes)}, lora)
    name, shape = min(adapted.items(), key=lambda each: min(each[1]))
    if lora.rank > min(shape):
        raise ConfigError(
            f"training.lora.rank={lora.rank}: {directory}: {name} has {shape[0]} x {shape[1]} numbers: lower it to "
            f"{min(shape)} or less"
        )


def check_names(model: str, adapted: set[str], linear: set[str], lora: LoraConfig) -> None:
    """Raise ConfigError if a name among the targets is none of the layers that get an adapter.

    `linear` are the names of all linear layers, for the message.
    """
    missing = [name for name in TARGETS[lora.targets] if name not in adapted]
    if missing:
        raise ConfigError(
            f"training.lora.targets={lora.targets}: {model} has no layer {', '.join(missing)} that takes an adapter "
            f"(experts of mixtures take none); its linear layers: {', '.join(sorted(linear)) or 'none'}"
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
