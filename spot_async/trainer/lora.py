"""Adapters of low rank (LoRA) beside frozen linear layers: put into a student, merged, and written in PEFT's format.

A layer keeps its place and its name, so loss, sharding and checkpoints see one more pair of parameters and nothing
else. PEFT itself is not needed: its file format is the contract, and its reader is tried in the tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from spot_async.base.seeds import derive_seed
from spot_async.config import LoraConfig
from spot_async.models.adapter_files import (
    DOWN,
    PEFT_PREFIX,
    UP,
    WEIGHTS_FILE,
    Layers,
    check_names,
    gets_adapter,
    write_config,
)
from spot_async.trainer.parallel import whole


class AdaptedLinear(nn.Module):
    """A frozen linear layer W with an adapter: `W x + scale B A x`. A and B are float32."""

    def __init__(self, frozen: nn.Linear, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        self.weight, self.bias = frozen.weight, frozen.bias  # (out, in), (out,)
        outputs, inputs = frozen.weight.shape
        # As PEFT begins: A is uniform and B zero, so that the student begins as it was.
        bound = 1 / math.sqrt(inputs)
        self.lora_A = nn.Parameter(torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator))
        self.lora_B = nn.Parameter(torch.zeros(outputs, rank))
        self.scale = scale

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs (..., out) of inputs (..., in)."""
        added = functional.linear(functional.linear(inputs, self.lora_A), self.lora_B)
        return functional.linear(inputs, self.weight, self.bias) + self.scale * added


def add_adapters(model: PreTrainedModel, lora: LoraConfig, seed: int, types: Mapping[str, torch.dtype]) -> None:
    """Freeze a model, and put adapters into the layers that `lora.targets` names.

    Its matrices are held in the `types` in which they are published. Adapters are drawn from the run's seed, the same
    on every rank. Raises `ConfigError` if no layer has one of the names.
    """
    model.requires_grad_(False)
    linear = {name: each for name, each in model.base_model.named_modules() if isinstance(each, nn.Linear)}
    names = [name for name in linear if gets_adapter(name, lora)]
    adapted, there = ({name.rpartition(".")[2] for name in each} for each in (names, linear))
    check_names(type(model).__name__, adapted, there, lora)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.to(types[name])
    for name in names:
        generator = torch.Generator().manual_seed(derive_seed(seed, "lora", name))
        model.base_model.set_submodule(name, AdaptedLinear(linear[name], lora.rank, lora.scale, generator))


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, AdaptedLinear]]:
    """Yield the layers that have an adapter, with their names."""
    return ((name, each) for name, each in model.named_modules() if isinstance(each, AdaptedLinear))


def own_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's live weights and persistent buffers by name, without adapters, tied ones once.

    What FSDP has gathered for its use is sharded again.
    """
    names: dict[Tensor, str] = {}
    for name, each in model.state_dict(keep_vars=True).items():
        if name.rpartition(".")[2] not in (DOWN, UP):
            names.setdefault(each, name)
    return {name: each for each, name in names.items()}


def whole_adapters(model: nn.Module, written: Callable[[Tensor], Tensor] = lambda live: live) -> dict[str, Tensor]:
    """Return the whole adapters, or what is `written` in place of them, by their parameters' names.

    All ranks must call it.
    """
    live = model.state_dict(keep_vars=True)
    names = (f"{name}.{part}" for name, _ in adapted_layers(model) for part in (DOWN, UP))
    return {name: whole(written(live[name])) for name in names}


def layer_shapes(model: nn.Module) -> Layers:
    """Return the shapes (out, in) of the layers that have an adapter, by name."""
    return {name: (each.weight.shape[0], each.weight.shape[1]) for name, each in adapted_layers(model)}


def write_adapter(directory: Path, model: nn.Module, adapters: dict[str, Tensor], lora: LoraConfig, base: str) -> None:
    """Write whole adapters into a new directory, in PEFT's format and float32. `base` is the model they are for."""
    directory.mkdir()
    tensors = {f"{PEFT_PREFIX}{name}.weight": each.contiguous() for name, each in adapters.items()}
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    write_config(directory, layer_shapes(model), lora, base)
