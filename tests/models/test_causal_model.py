"""Directories whose files are no whole model: trainer, engine and plan refuse the same, in one line that names why."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    HunYuanDenseV1Config,
    LlamaConfig,
    PreTrainedConfig,
)

from spot_async.checks.plan_inputs import check_weights
from spot_async.config import ModelConfig
from spot_async.errors import DataError
from spot_async.models.causal_model import read_config
from spot_async.serving.engine.model import load_model
from spot_async.serving.engine.weights import Parameters
from spot_async.serving.settings import EngineSettings
from spot_async.trainer.loading import new_student

ROOT = Path(__file__).parents[2]
Tensors = dict[str, torch.Tensor]
UP = "model.layers.1.mlp.up_proj.weight"
LAST = "model.norm.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:77\nsize 3087467144\n"


def without_last(own: Tensors) -> Tensors:
    return {name: own[name] for name in sorted(own)[:-1]}


FAULTS: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, Any], str]] = {
    "no head": (lambda own: own, {"tie_word_embeddings": False}, f"'{HEAD}' is missing"),
    "a tensor is lost": (without_last, {}, f"'{LAST}' is missing"),
    "a wrapper's prefix": (
        lambda own: {f"module.{name}": each for name, each in own.items()}, {}, "take 'module.' out of their names",
    ),
    "a head of its own": (lambda own: own | {HEAD: own[EMBEDDING] + 1}, {}, f"'{HEAD}' and '{EMBEDDING}' differ"),
    "another shape": (lambda own: own | {UP: own[UP].T.contiguous()}, {}, rf"{UP}' has shape \(32, 64\)"),
    "more layers": (
        lambda own: own, {"num_hidden_layers": 1, "layer_types": None}, "no layer uses tensor 'model.layers.1",
    ),
    "a bias too many": (
        lambda own: own | {UP.replace("weight", "bias"): torch.ones(64)}, {}, "no layer uses tensor .*up_proj.bias",
    ),
    "another kind of layer": (
        lambda own: own | {"model.layers.0.self_attn.sinks": torch.ones(4)}, {}, "no layer uses tensor .*sinks",
    ),
    "names with and without prefix": (
        lambda own: own | {UP.removeprefix("model."): own[UP] + 1}, {}, "with and without its prefix",
    ),
    "numbers of 8 bits": (lambda own: own | {UP: torch.ones(64, 32, dtype=torch.int8)}, {}, "is of type I8"),
}  # fmt: skip


def changed(model: Path, target: Path, change: Callable[[Tensors], Tensors], config: dict[str, Any]) -> Path:
    shutil.copytree(model, target)
    save_file(change(load_file(model / "model.safetensors")), target / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((model / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(said))
    return target


def refusals(directory: Path) -> Iterator[str]:
    model = ModelConfig.model_validate({"model": str(directory)})
    for load in (
        lambda: new_student(str(directory)),
        lambda: load_model(directory, EngineSettings()),
        lambda: check_weights("teacher", model, directory),
    ):
        with pytest.raises(DataError) as refusal:
            load()
        yield str(refusal.value)


@pytest.mark.parametrize("fault", FAULTS)
def test_trainer_engine_and_plan_refuse_the_same_by_name(
    random_model: Callable[..., Path], tmp_path: Path, fault: str
) -> None:
    change, config, message = FAULTS[fault]
    directory = changed(random_model(), tmp_path / "model", change, config)
    for said in refusals(directory):
        assert "\n" not in said
        assert re.search(message, said), said
        assert str(directory) in said


@pytest.mark.parametrize("fault", ["pointer", "a pointer as index", "a web page", "cut off", "no such shard"])
def test_files_that_are_not_whole_are_named(random_model: Callable[..., Path], tmp_path: Path, fault: str) -> None:
    directory = changed(random_model(), tmp_path / "model", dict, {})
    file = directory / "model.safetensors"
    if fault == "pointer":
        file.write_bytes(POINTER)
    elif fault == "a pointer as index":
        file.rename(directory / "model-1.safetensors")
        (directory / "model.safetensors.index.json").write_bytes(POINTER)
    elif fault == "a web page":
        file.write_bytes(b"<!DOCTYPE html>" + bytes(500))
    elif fault == "cut off":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        names = dict.fromkeys(load_file(file), "model-1.safetensors") | {UP: "model-2.safetensors"}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
        file.rename(directory / "model-1.safetensors")
    messages = {"a web page": "its header would be longer", "cut off": "is cut off"}
    messages |= {"no such shard": "names model-2.safetensors"}
    for said in refusals(directory):
        assert messages.get(fault, "git lfs pull") in said
        assert str(directory) in said
        assert "\n" not in said


@pytest.mark.parametrize("fault", ["in two shards", "in a file beside the shards"])
def test_a_tensor_that_stands_twice_is_refused_wherever_a_model_is_read(
    random_model: Callable[..., Path], tmp_path: Path, fault: str
) -> None:
    """transformers takes the last shard's, or the file beside them, and says nothing."""
    directory = changed(random_model(), tmp_path / "model", dict, {})
    single, own = directory / "model.safetensors", load_file(directory / "model.safetensors")
    shards = {"model-1.safetensors": without_last(own), "model-2.safetensors": {LAST: own[LAST]}}
    names = {name: file for file, tensors in shards.items() for name in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    message = "holds both model.safetensors and model.safetensors.index.json"
    if fault == "in two shards":
        single.unlink()
        shards["model-2.safetensors"][UP] = own[UP] + 7
        message = rf"model-2.safetensors: tensor '{UP}' is in another file of"
    for file, tensors in shards.items():
        save_file(tensors, directory / file, metadata={"format": "pt"})
    assert all(re.search(message, said) for said in refusals(directory))


def test_an_index_may_name_the_single_file(random_model: Callable[..., Path]) -> None:
    directory = random_model()
    names = dict.fromkeys(load_file(directory / "model.safetensors"), "model.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    new_student(str(directory))


SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 160}  # fmt: skip
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "rope_theta": 1e4}
SCALED = {"factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 40}
CHANGING: dict[str, tuple[Callable[..., PreTrainedConfig], dict[str, Any]]] = {
    "longrope": (LlamaConfig, LONG | {"original_max_position_embeddings": 32}),
    "longrope of some layers": (
        partial(Gemma3TextConfig, sliding_window=160, layer_types=["full_attention", "sliding_attention"]),
        {
            "full_attention": LONG | {"original_max_position_embeddings": 32},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}
FIXED: dict[str, tuple[Callable[..., PreTrainedConfig], dict[str, Any]]] = {
    "longrope that is never long": (LlamaConfig, LONG | {"original_max_position_embeddings": 160}),
    "dynamic beyond the context": (LlamaConfig, {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
    "dynamic by name alone": (HunYuanDenseV1Config, {"rope_type": "dynamic", "alpha": 9.0, **SCALED}),
    "yarn": (LlamaConfig, {"rope_type": "yarn", **SCALED}),
    "linear": (LlamaConfig, {"rope_type": "linear", **SCALED}),
    "llama3": (LlamaConfig, {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SCALED}),
}


@pytest.mark.parametrize("kind", [*CHANGING, *FIXED])
def test_no_student_is_trained_whose_numbers_follow_the_longest_sequence_beside_it(tmp_path: Path, kind: str) -> None:
    """None is served so, and the plan says it. Where that cannot happen, it is taken."""
    make, rope = (CHANGING | FIXED)[kind]
    AutoModelForCausalLM.from_config(make(**SIZES, rope_parameters=rope)).save_pretrained(tmp_path)
    model = ModelConfig.model_validate({"model": str(tmp_path)})
    check_weights("teacher", model, tmp_path)  # its server may choose factors once for all
    for load in (
        lambda: new_student(str(tmp_path)),
        lambda: load_model(tmp_path, EngineSettings()),
        lambda: check_weights("student", model, tmp_path, longest=160),
    ):
        said = f"{tmp_path}: its {kind.split()[0]} rotary scaling changes with the sequence length"
        with nullcontext() if kind in FIXED else pytest.raises(DataError, match=said):
            load()


@pytest.mark.parametrize("longest", [32, 33])
def test_a_student_is_trained_on_sequences_that_change_no_rotary_factors(tmp_path: Path, longest: int) -> None:
    make, rope = CHANGING["longrope"]
    AutoModelForCausalLM.from_config(make(**SIZES, rope_parameters=rope)).save_pretrained(tmp_path)
    model = ModelConfig.model_validate({"model": str(tmp_path)})
    for load in (
        lambda: new_student(str(tmp_path), longest),
        lambda: load_model(tmp_path, EngineSettings(max_context_tokens=longest)),
        lambda: check_weights("student", model, tmp_path, longest=longest),
    ):
        with nullcontext() if longest == 32 else pytest.raises(DataError, match="above 32 tokens: make sequences no"):
            load()


def test_a_pointer_as_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(POINTER)
    with pytest.raises(DataError, match="git lfs pull"):
        read_config(tmp_path)


def test_a_mixture_that_lacks_a_tensor_is_refused_when_it_is_loaded(
    random_architecture: Callable[..., Path], tmp_path: Path
) -> None:
    """Its files' names are not the model's, so that names alone do not show it."""
    directory = changed(random_architecture("mixtral"), tmp_path / "model", without_last, {})
    with pytest.raises(DataError, match="is missing"):
        new_student(str(directory))


@pytest.mark.parametrize(
    "extra", ["computed buffers", "the tied head", "the tied head, rounded", "no prefix", "another head"]
)
def test_what_older_checkpoints_have_or_lack_is_no_reason_to_refuse(
    random_model: Callable[..., Path], tmp_path: Path, extra: str
) -> None:
    changes: dict[str, Callable[[Tensors], Tensors]] = {
        "computed buffers": lambda own: own | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
        "the tied head": lambda own: own | {HEAD: own[EMBEDDING].clone()},
        "the tied head, rounded": lambda own: own | {HEAD: own[EMBEDDING].bfloat16()},
        "no prefix": lambda own: {name.removeprefix("model."): each for name, each in own.items()},
        "another head": lambda own: own | {"score.weight": torch.ones(2, 32)},
    }
    directory = changed(random_model(), tmp_path / "model", changes[extra], {})
    model = new_student(str(directory))
    assert all(each.is_meta for each in model.parameters()) == (extra != "another head"), "read as it is spread"
    engine = load_model(directory, EngineSettings())
    assert Parameters(engine.module.state_dict()).match(directory), "new weights can be sent"


def test_the_first_gpt2_has_masks_and_no_prefix(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=150))
    model.save_pretrained(tmp_path / "given")
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 150, 150).tril() for layer in range(2)}
    masks |= {f"h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(2)}
    directory = changed(
        tmp_path / "given",
        tmp_path / "model",
        lambda own: {name.removeprefix("transformer."): each for name, each in own.items()} | masks,
        {},
    )
    assert all(each.is_meta for each in new_student(str(directory)).parameters())
    engine = load_model(directory, EngineSettings())
    assert Parameters(engine.module.state_dict()).match(directory)


def test_code_of_a_directory_is_never_run(random_model: Callable[..., Path], tmp_path: Path) -> None:
    own_code = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    directory = changed(random_model(), tmp_path / "model", dict, own_code)
    (directory / "own.py").write_text("raise SystemExit('run')")
    for load in (lambda: new_student(str(directory)), lambda: load_model(directory, EngineSettings())):
        with pytest.raises(DataError, match="code of its own") as refusal:
            load()
        assert "trust_remote_code" not in str(refusal.value)


def test_whatever_loads_a_model_or_a_data_set_says_that_code_of_it_is_not_run() -> None:
    """transformers asks at a terminal where it is not told."""
    loaders = {"from_pretrained", "from_config", "load_dataset", "pipeline"}
    silent = []
    for top in ("spot_async", "backends", "policies", "benchmarks", "examples", "experiments"):
        for path in (ROOT / top).rglob("*.py"):
            for call in (each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.Call)):
                named = {each.attr for each in (call.func, *call.args) if isinstance(each, ast.Attribute)}
                said = {each.arg: ast.unparse(each.value) for each in call.keywords}
                if named & loaders and said.get("trust_remote_code") != "False":
                    silent.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert silent == []
