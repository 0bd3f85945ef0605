"""Broken adapters, which servers would take and answer wrongly with, are named before any server hears of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from spot_async.config import LoraConfig
from spot_async.errors import DataError
from spot_async.models.adapter_files import check_adapter, layers_of, write_zero_adapter

LAYERS = {"model.layers.0.self_attn.q_proj": (6, 4), "model.layers.0.mlp.up_proj": (8, 4)}
Q = "base_model.model.model.layers.0.self_attn.q_proj"
LORA = LoraConfig(rank=2, alpha=4.0, targets="all")
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4.0, "target_modules": ["q_proj", "up_proj"]}


def write(directory: Path, config: dict[str, Any], changed: dict[str, torch.Tensor | None]) -> None:
    tensors: dict[str, torch.Tensor | None] = {}
    for name, (outputs, inputs) in LAYERS.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.ones(2, inputs)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.zeros(outputs, 2)
    tensors |= changed
    save_file({n: t for n, t in tensors.items() if t is not None}, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(CONFIG | config))


A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"


@pytest.mark.parametrize(
    ("config", "changed", "named"),
    [
        pytest.param({}, {A: None, B: None}, "it has no", id="missing layer"),
        pytest.param({}, {B: None}, "it has no", id="A without B"),
        pytest.param({}, {A: torch.ones(2, 5)}, "has shape", id="A of a wrong width"),
        pytest.param({}, {B: torch.ones(7, 2)}, "has shape", id="B of a wrong shape"),
        pytest.param({}, {A: torch.ones(1, 4), B: torch.zeros(6, 1)}, "has shape", id="r unlike the tensors"),
        pytest.param({"r": 32}, {}, "its rank is 32", id="another rank"),
        pytest.param({"lora_alpha": 8.0}, {}, "its lora_alpha is 8", id="another factor"),
        pytest.param({"target_modules": 3}, {}, "target modules", id="targets that are no list"),
        pytest.param({}, {B: torch.zeros(6, 2).bfloat16()}, "is BF16", id="another type"),
        pytest.param({"target_modules": ["q_proj", "lm_head"]}, {}, "target modules", id="targets outside"),
        pytest.param({}, {A.replace("s.0", "s.9"): torch.ones(2, 4)}, "no layer takes", id="no such layer"),
        pytest.param({}, {"base_model.model.x.lora_A.weight": torch.ones(2, 4)}, "no layer takes", id="unknown module"),
        pytest.param({"use_dora": True}, {}, "use_dora", id="DoRA"),
        pytest.param({"use_rslora": True}, {}, "use_rslora", id="rsLoRA"),
        pytest.param({"modules_to_save": ["norm"]}, {}, "modules_to_save", id="modules to save"),
        pytest.param({}, {B: torch.full((6, 2), float("nan"))}, "not finite", id="NaN"),
    ],
)
def test_a_broken_adapter_is_named(
    tmp_path: Path, config: dict[str, Any], changed: dict[str, torch.Tensor | None], named: str
) -> None:
    write(tmp_path, config, changed)
    with pytest.raises(DataError, match=named):
        check_adapter(tmp_path, LAYERS, LORA)


@pytest.mark.parametrize("left", [0, 60], ids=["garbage", "truncated"])
def test_a_file_that_is_cut_or_garbage_is_named(tmp_path: Path, left: int) -> None:
    write(tmp_path, {}, {})
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:left] or b"no tensors at all")
    with pytest.raises(DataError, match="cannot be read"):
        check_adapter(tmp_path, LAYERS, LORA)


def test_a_zero_adapter_is_whole(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    save_file({f"{name}.weight": torch.ones(shape) for name, shape in LAYERS.items()}, base / "model.safetensors")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    write_zero_adapter(adapter, base, LORA)
    assert layers_of(base, LORA) == LAYERS
    check_adapter(adapter, LAYERS, LORA)
