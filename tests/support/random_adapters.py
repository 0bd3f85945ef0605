"""Writes adapters far from zero, and the merged model that serves the same."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from spot_async.config import LoraConfig
from spot_async.models.adapter_files import PEFT_PREFIX, WEIGHTS_FILE, write_zero_adapter


def random_adapter(directory: Path, base: Path, lora: LoraConfig, *, seed: int, size: float = 0.1) -> Path:
    """Write an adapter into a new directory; return the directory. `size` is the spread of its numbers."""
    directory.mkdir(parents=True)
    write_zero_adapter(directory, base, lora)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(tensor.shape, generator=generator) * size
        for name, tensor in load_file(directory / WEIGHTS_FILE).items()
    }
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    return directory


def merged_model(directory: Path, base: Path, adapter: Path, lora: LoraConfig) -> Path:
    """Write a model with the adapter merged in, in float64; return its directory."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    tensors = {
        name.removeprefix(PEFT_PREFIX): each.double() for name, each in load_file(adapter / WEIGHTS_FILE).items()
    }
    with torch.no_grad():
        for name, layer in model.named_modules():
            if f"{name}.lora_A.weight" in tensors:
                layer.weight += lora.scale * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
    model.save_pretrained(directory)
    return directory
