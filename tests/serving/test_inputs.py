"""What the serving engine accepts (model directories, published weights, requests), and what it refuses in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from spot_async.errors import DataError, PermanentError
from spot_async.serving.api import CandidateRequest, GenerateRequest, ScoreRequest
from spot_async.serving.engine.limits import Limits
from spot_async.serving.engine.model import load_model
from spot_async.serving.engine.weights import Parameters
from spot_async.serving.settings import EngineSettings
from spot_async.types import SamplingSettings, WeightVersion

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 160,
}


def make_model(seed: int) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, tie_word_embeddings=True)).eval()


def config_of(name: str) -> transformers.PreTrainedConfig:
    match name:
        case "window":
            return transformers.MistralConfig(**SIZES, sliding_window=32)
        case "rope":
            factors = {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "original_max_position_embeddings": 32}
            rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
            return transformers.LlamaConfig(**SIZES, rope_parameters=rope)
        case "recurrent":
            return transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2)
        case "linear":
            return transformers.Qwen3NextConfig(**SIZES, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8)
        case "biased":  # positions are a bias of the attention mask, not of the position ids
            return transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)
        case _:
            raise ValueError(name)


@pytest.mark.parametrize(
    ("name", "context", "message"),
    [
        ("window", None, "attends to 32 tokens only: set max_context_tokens to 32 or less"),
        ("rope", None, "longrope rotary scaling changes with the sequence length"),
        ("recurrent", 64, "linear_attention layers; only full attention"),
        ("linear", None, "linear_attention layers; only full attention"),
        ("biased", 64, "BloomForCausalLM cannot be served"),
    ],
)
def test_models_that_would_be_served_wrong_are_refused(
    name: str, context: int | None, message: str, tmp_path: Path
) -> None:
    transformers.AutoModelForCausalLM.from_config(config_of(name)).save_pretrained(tmp_path)
    with pytest.raises(DataError, match=message) as refusal:
        load_model(tmp_path, EngineSettings(max_context_tokens=context))
    assert len(str(refusal.value).splitlines()) == 1


def test_a_checkpoint_without_all_its_weights_is_refused(tmp_path: Path) -> None:
    make_model(seed=0).save_pretrained(tmp_path)
    damage(tmp_path, "missing")
    with pytest.raises(DataError, match=r"tensor 'model\.layers\.1\.mlp\.up_proj\.weight' is missing"):
        load_model(tmp_path, EngineSettings())


def damage(directory: Path, how: str) -> None:
    path = directory / "model.safetensors"
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
        return
    if how == "no file":
        path.unlink()
        return
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    match how:
        case "missing":
            del tensors[name]
        case "shape":
            tensors[name] = tensors[name].T.contiguous()
        case "nan":
            tensors[name][3, 4] = float("nan")
        case "unknown":
            tensors["model.layers.2.mlp.up_proj.weight"] = tensors[name].clone()
        case "untied":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "layers.1.mlp.up_proj.weight' is missing"),
        ("shape", r"up_proj.weight' has shape \(32, 48\), the model's has \(48, 32\)"),
        ("nan", "up_proj.weight' holds values that are not finite"),
        ("unknown", "layers.2.mlp.up_proj.weight' is not one of the model's"),
        ("untied", "the model ties them"),
        ("truncated", "cannot be read, it may be cut off"),
        ("no file", "holds neither model.safetensors nor"),
    ],
)
def test_damaged_weights_are_refused_and_the_model_keeps_its_own(how: str, message: str, tmp_path: Path) -> None:
    make_model(seed=1).save_pretrained(tmp_path)
    damage(tmp_path, how)
    model = make_model(seed=0)
    with pytest.raises(DataError, match=message) as refusal:
        Parameters(model.state_dict()).read(tmp_path)
    assert len(str(refusal.value).splitlines()) == 1
    for name, tensor in make_model(seed=0).state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])


def test_weights_are_read_from_shards_and_not_from_outside_the_directory(tmp_path: Path) -> None:
    new, model = make_model(seed=1), make_model(seed=0)
    new.save_pretrained(tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists()
    parameters = Parameters(model.state_dict())
    parameters.copy_in(parameters.read(tmp_path))
    tokens = torch.arange(20)[None]
    assert torch.equal(model(tokens).logits, new(tokens).logits)
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))
    with pytest.raises(DataError, match="outside its directory"):
        parameters.read(tmp_path)


def test_weights_of_architectures_that_fuse_tensors_are_known_not_to_match(tmp_path: Path) -> None:
    fusing = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=2))
    for model, matching in ((make_model(seed=0), True), (fusing, False)):
        model.save_pretrained(tmp_path)
        assert Parameters(model.state_dict()).match(tmp_path) is matching


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_tied_weights_may_come_under_either_name(name: str, tmp_path: Path) -> None:
    new, model = make_model(seed=1), make_model(seed=0)
    state = dict(new.state_dict())
    tied = state.pop("lm_head.weight")
    del state["model.embed_tokens.weight"]
    save_file({**state, name: tied}, tmp_path / "model.safetensors")
    parameters = Parameters(model.state_dict())
    parameters.copy_in(parameters.read(tmp_path))
    assert torch.equal(model.lm_head.weight, new.lm_head.weight)
    assert torch.equal(model.model.embed_tokens.weight, new.lm_head.weight)


LIMITS = Limits(vocab_size=VOCAB, max_context_tokens=160)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": np.zeros(0, np.int32)}, "prompt_ids is empty"),
        (
            {"prompt_ids": np.array([3, VOCAB], np.int32)},
            "prompt_ids holds 61: the vocabulary has 61 tokens",
        ),
        ({"prompt_ids": np.array([-1], np.int32)}, "prompt_ids holds -1"),
        ({"prompt_ids": np.ones(3, np.float32)}, "must be integers"),
        ({"prompt_ids": np.ones((1, 3), np.int32)}, "must be integers with 1 axes"),
        ({"prompt_ids": np.ones(150, np.int32)}, r"150 prompt tokens \+ 12 \(max_tokens\) exceed the context of 160"),
        ({"temperature": -1.0}, "temperature=-1.0: must be a number above 0, or 0 for the likeliest token"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"further": (("top_k", 3),)}, "top_k: the local engine has none: leave it out"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"stop_token_ids": (VOCAB,)}, "stop_token_ids holds 61"),
        ({"seed": -1}, "seed=-1"),
        ({"top_k": VOCAB + 1}, "top_k=62: must be from 0 to 61"),
    ],
)
def test_generation_requests_that_cannot_be_served_are_refused(change: dict[str, object], message: str) -> None:
    fields = {"prompt_ids": np.array([1, 2], np.int32), "top_k": 0}
    sampling = {"max_tokens": 12, "stop_token_ids": (), "seed": 0}
    for name, value in change.items():
        (fields if name in fields else sampling)[name] = value
    request = GenerateRequest(**fields, sampling=SamplingSettings(**sampling), timeout_s=1.0)  # type: ignore[arg-type]
    with pytest.raises(PermanentError, match=message):
        LIMITS.check(request)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_ids": np.zeros(0, np.int32)}, "response_ids is empty"),
        ({"response_ids": np.array([VOCAB], np.int32)}, "response_ids holds 61"),
        ({"response_ids": np.ones(160, np.int32)}, r"2 prompt tokens \+ 160 \(response\) exceed the context of 160"),
        ({"positions": np.array([3], np.int32)}, "positions: must lie in the response's 3 tokens"),
        ({"positions": np.array([-1], np.int32)}, "positions: must lie"),
        ({"positions": np.array([0, 1], np.int32)}, r"must be \(N,\) integers"),
        ({"candidate_ids": np.array([[VOCAB]], np.int32)}, "candidate_ids holds 61"),
        ({"candidate_ids": np.array([1], np.int32)}, "must be integers with 2 axes"),
        ({"candidate_ids": np.zeros((1, 0), np.int32)}, "candidate_ids is empty"),
    ],
)
def test_scoring_requests_that_cannot_be_served_are_refused(change: dict[str, object], message: str) -> None:
    sequence = {"prompt_ids": np.array([1, 2], np.int32), "response_ids": np.array([3, 4, 5], np.int32)}
    candidates = {"positions": np.array([2], np.int32), "candidate_ids": np.array([[7, 8]], np.int32)}
    request = CandidateRequest(
        **{**sequence, **candidates, **change}, expected_version=WeightVersion(0, 0), timeout_s=1.0
    )  # type: ignore[arg-type]
    with pytest.raises(PermanentError, match=message):
        LIMITS.check(request)
    if "response_ids" in change:
        with pytest.raises(PermanentError, match=message):
            LIMITS.check(ScoreRequest(**{**sequence, **change}, top_k=1, timeout_s=1.0))  # type: ignore[arg-type]
