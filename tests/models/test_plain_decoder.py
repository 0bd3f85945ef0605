"""Plain decoders are those that transformers makes of the same config.json, and nothing else is one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spot_async.errors import DataError
from spot_async.models.causal_model import check_files, empty_model
from spot_async.models.model_size import SIZED, size_of
from spot_async.models.plain_decoder import is_plainly_whole, plain_shapes, plain_size

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 160}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 80}  # fmt: skip
UP = "model.layers.1.mlp.up_proj.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("kind", SIZED)
def test_names_and_shapes_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    keys = ("tie_word_embeddings", "attention_bias", "mlp_bias")
    for *flags, width in itertools.product((False, True), (False, True), (False, True), (8, 12)):
        config = {"model_type": kind, **SIZES, "head_dim": width, **dict(zip(keys, flags, strict=True))}
        if width == 8 and kind != "qwen3":
            del config["head_dim"]
        model = empty_model(write_config(tmp_path, config))
        own = {name: tuple(each.shape) for name, each in model.named_parameters()}  # a tied one once
        size = plain_size(config)
        assert size == size_of(config)
        assert (size is None) == (config["mlp_bias"] or (config["attention_bias"] and kind != "qwen2"))
        assert size is None or plain_shapes(size) == own


@pytest.mark.parametrize("kind", ["plain_llama", "mistral", "qwen2", "qwen3"])
def test_a_model_that_transformers_has_saved_is_one(kind: str, random_architecture: Callable[..., Path]) -> None:
    assert is_plainly_whole(random_architecture(kind))


WEIGHTS: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "a tensor is lost": lambda own: {name: own[name] for name in sorted(own)[:-1]},
    "another shape": lambda own: own | {UP: own[UP].T.contiguous()},
    "a bias too many": lambda own: own | {UP.replace("weight", "bias"): torch.ones(48)},
    "numbers of 8 bits": lambda own: own | {UP: torch.ones(48, 32, dtype=torch.int8)},
    "a layer too many": lambda own: own | {UP.replace("1", "2"): own[UP].clone()},
    "another name": lambda own: {f"module.{name}": each for name, each in own.items()},
    "a tied tensor twice": lambda own: own | {HEAD: own[EMBEDDING] + 1},
}


@pytest.mark.parametrize("fault", WEIGHTS)
def test_other_tensors_are_no_plain_decoder(
    fault: str, random_architecture: Callable[..., Path], tmp_path: Path
) -> None:
    given = random_architecture("qwen3")
    write_config(tmp_path, json.loads((given / "config.json").read_text()))
    save_file(WEIGHTS[fault](load_file(given / "model.safetensors")), tmp_path / "model.safetensors")
    assert not is_plainly_whole(tmp_path)
    with pytest.raises(DataError):
        check_files(tmp_path, empty_model(tmp_path))


VALUES: list[tuple[str, Any]] = [
    *(("num_hidden_layers", value) for value in (None, "2", 2.0, 0, True)),
    *(("head_dim", value) for value in (None, -8, 0, 7, "8")),
    *(("layer_types", value) for value in (["full_attention"], ["other_attention"] * 2, "full")),
    *(
        ("rope_parameters", value)
        for value in (1, {"rope_type": "llama3"}, {"rope_type": "other"}, {"rope_theta": "1"})
    ),
    ("rope_scaling", {"type": "linear", "factor": 2.0}),
    *(("dtype", value) for value in ("nonsense", 32)),
    ("torch_dtype", "nonsense"),
    ("hidden_act", "nonsense"),
    ("num_attention_heads", 3),
    ("pad_token_id", 61),
    ("eos_token_id", ["1"]),
    ("initializer_range", 2.0),
    ("rms_norm_eps", 1),
    ("rms_norm_eps", "small"),
    ("use_cache", "yes"),
    ("architectures", [1]),
    ("model_type", "nothing"),
    ("model_type", ["llama"]),
    ("quantization_config", {"quant_method": "gptq", "bits": 4}),
    ("auto_map", {"AutoConfig": "own.Config"}),
    ("text_config", SIZES),
    ("own_key", 1),
]


@pytest.mark.parametrize("kind", SIZED)
def test_other_values_than_plain_ones_are_left_to_transformers(kind: str) -> None:
    config = {"model_type": kind, **SIZES, "head_dim": 8}
    assert plain_size(config)
    assert [(key, value) for key, value in VALUES if plain_size(config | {key: value})] == []
    assert [key for key in SIZES if plain_size({other: config[other] for other in config if other != key})] == []


def test_a_scaled_rope_of_llama_is_plain_and_layers_of_a_mistral_are_not(tmp_path: Path) -> None:
    config = {"model_type": "llama", **SIZES, "rope_theta": 5e5, "rope_scaling": LLAMA3, "torch_dtype": "bfloat16"}
    assert plain_size(config)
    assert empty_model(write_config(tmp_path, config)).config.rope_parameters["rope_type"] == "llama3"
    layers = {"layer_types": ["full_attention"] * 2}
    assert not plain_size({"model_type": "mistral", **SIZES, **layers})
    assert plain_size({"model_type": "qwen2", **SIZES, **layers})
