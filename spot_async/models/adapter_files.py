"""Adapters' files, in PEFT's format: which weights get one, one that changes nothing, what is checked before use.

Servers take many broken ones with a 200. They then answer with wrong numbers, or end at the first request. It imports
no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from spot_async.base.files import as_json
from spot_async.base.writers import refuse_foreign_writers
from spot_async.config import LoraConfig
from spot_async.config.training import TARGETS
from spot_async.errors import ConfigError, DataError
from spot_async.models.small_files import read_json
from spot_async.models.weight_files import ADAPTER_CONFIG, Header, Shapes, file_headers, weight_shapes

WEIGHTS_FILE = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
DOWN, UP = "lora_A", "lora_B"  # PEFT's names

EXPERTS = "experts"
Layers = Mapping[str, tuple[int, int]]  # by name: (out, in)


def layers_of(base: Path, lora: LoraConfig) -> Layers:
    """Return the layers of a model directory that get an adapter. Raises `DataError` for files that cannot be read."""
    found = adapted_weights(weight_shapes(base), lora)
    return {name.removesuffix(".weight"): (shape[0], shape[1]) for name, shape in found.items()}


def tensor_shapes(layers: Layers, rank: int) -> dict[str, tuple[int, int]]:
    """Return the shapes of an adapter's tensors, by their names in its file."""
    return {
        f"{PEFT_PREFIX}{name}.{part}.weight": shape
        for name, (outputs, inputs) in layers.items()
        for part, shape in ((DOWN, (rank, inputs)), (UP, (outputs, rank)))
    }


def write_config(directory: Path, layers: Layers, lora: LoraConfig, base: str) -> None:
    """Write an adapter's configuration. `base` is its model.

    `alpha` is written such that alpha / rank is the factor, however it was given: SGLang reads no other.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": _modules(layers),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "inference_mode": True,
    }
    (directory / ADAPTER_CONFIG).write_bytes(as_json(config))


def write_zero_adapter(directory: Path, base: Path, lora: LoraConfig) -> None:
    """Write an adapter with which a model is as it is without one, into a directory that may be missing."""
    directory.mkdir(parents=True, exist_ok=True)
    layers = layers_of(base, lora)
    zeros = {name: np.zeros(shape, np.float32) for name, shape in tensor_shapes(layers, lora.rank).items()}
    save_file(zeros, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    write_config(directory, layers, lora, str(base.absolute()))


def check_adapter(directory: Path, layers: Layers, lora: LoraConfig, *, numbers: bool = True, name: str = "") -> None:
    """Raise DataError unless a directory has a whole adapter of this rank and factor for exactly these layers.

    Nobody else may be able to change it. With `numbers` all of them must be finite too; else only the file's header is
    read. `name` is the directory in the message, if it is not there for good.
    """
    refuse_foreign_writers([directory, directory / ADAPTER_CONFIG, directory / WEIGHTS_FILE])
    config = read_json(directory / ADAPTER_CONFIG)
    try:
        headers = file_headers(directory / WEIGHTS_FILE)
        fault = _fault(config, headers, layers, lora)
        if fault is None and numbers:
            with safe_open(directory / WEIGHTS_FILE, framework="numpy") as file:
                broken = (key for key in headers if not np.isfinite(file.get_tensor(key)).all())
                fault = next((f"{key} has numbers that are not finite" for key in broken), None)
    except (DataError, OSError, ValueError, SafetensorError) as error:
        raise DataError(f"adapter {name or directory}: cannot be read ({error})") from error
    if fault:
        raise DataError(f"adapter {name or directory}: {fault}")


def _fault(config: Any, headers: Mapping[str, Header], layers: Layers, lora: LoraConfig) -> str | None:
    """Return what is wrong with an adapter, or None."""
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        return "its configuration is not LoRA's"
    for key in ("use_dora", "use_rslora", "modules_to_save"):
        if config.get(key):
            return f"servers do not serve {key}"
    if config.get("r") != lora.rank:
        return f"its rank is {config.get('r')}, and not {lora.rank}"
    if config.get("lora_alpha") != lora.alpha:
        return f"its lora_alpha is {config.get('lora_alpha')}, and not {lora.alpha:g}"
    modules = config.get("target_modules")
    if not isinstance(modules, list) or sorted(map(str, modules)) != _modules(layers):
        return f"its target modules are {modules}, and not {_modules(layers)}"
    wanted = tensor_shapes(layers, lora.rank)
    for key in sorted(wanted.keys() ^ headers.keys()):
        return f"it has no {key}" if key in wanted else f"no layer takes its {key}"
    for key, shape in wanted.items():
        if headers[key].shape != shape:
            return f"{key} has shape {headers[key].shape}, and not {shape}"
        if headers[key].dtype != "F32":
            return f"{key} is {headers[key].dtype}, and not F32"
    return None


def _modules(layers: Layers) -> list[str]:
    """Return the last parts of the layers' names, which servers and PEFT find them by."""
    return sorted({name.rpartition(".")[2] for name in layers})


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
