"""Which students are trained on packed rows, and that documents in one row know nothing of each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from makers import MakeModel, MakeTrainer, MixedBatch
from transformers import AutoModelForCausalLM

from spot_async.errors import DataError
from spot_async.trainer.messages import Batch
from spot_async.trainer.packing import Documents, attend_per_document, first_layers

LENGTHS = (20, 1, 33, 7)


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama", "gpt2", "mixtral"])
def test_packed_documents_are_computed_as_if_each_were_alone(random_architecture: MakeModel, name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(random_architecture(name)).eval()
    documents = torch.randint(61, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0)).split(LENGTHS, dim=1)
    config = model.config.to_json_string()
    with torch.no_grad():
        alone = torch.cat([model(each).logits for each in documents], dim=1)
        attend_per_document(model)
        packed = model(
            torch.cat(documents, dim=1),
            position_ids=torch.cat([torch.arange(each) for each in LENGTHS])[None],
            use_cache=False,
            documents=Documents(LENGTHS),
        ).logits
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5 * alone.abs().max().item())
    assert model.config.to_json_string() == config  # which is published


SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}
OTHERS: dict[str, tuple[Callable[[], transformers.PreTrainedConfig], str]] = {
    "window": (
        lambda: transformers.MistralConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, sliding_window=9),
        "MistralForCausalLM has sliding_window=9",
    ),
    "windows in some layers": (
        lambda: transformers.Gemma3TextConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=8),
        "Gemma3ForCausalLM has sliding_attention layers",
    ),
    "soft cap": (
        lambda: transformers.Gemma2Config(
            **SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=8, layer_types=["full_attention"] * 2
        ),
        "Gemma2ForCausalLM cannot be packed: its attention has softcap",
    ),
    "attention of its own": (
        lambda: transformers.BloomConfig(**SIZES, n_head=4),
        "BloomForCausalLM takes no attention function",
    ),
    "states": (
        lambda: transformers.MambaConfig(**SIZES, state_size=4),
        "MambaForCausalLM has linear_attention layers",
    ),
}


def test_a_trial_passes_through_two_layers_of_a_kind_and_leaves_the_model_whole() -> None:
    config = transformers.LlamaConfig(**SIZES, intermediate_size=32, num_attention_heads=4)
    config.num_hidden_layers = 5
    model = transformers.LlamaForCausalLM(config)
    model.model.layers[3].mlp.act_fn = torch.nn.Tanh()  # a kind of its own
    layers, names, passed = list(model.model.layers), list(model.state_dict()), list[int]()
    for number, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, number=number: passed.append(number))
    ids = torch.arange(6)[None]
    with torch.no_grad():
        whole = model(ids).logits
        passed.clear()
        with first_layers(model):
            model(ids)
        assert passed == [0, 1, 3]
        assert (list(model.model.layers), list(model.state_dict())) == (layers, names)
        assert torch.equal(model(ids).logits, whole)


@pytest.mark.parametrize("kind", OTHERS)
def test_a_student_that_cannot_be_packed_says_why_and_stays_as_it_was(kind: str) -> None:
    config, reason = OTHERS[kind]
    model = AutoModelForCausalLM.from_config(config()).eval()
    before = model(torch.arange(12)[None]).logits
    with pytest.raises(DataError) as failure:
        attend_per_document(model)
    assert str(failure.value) == reason
    assert torch.equal(model(torch.arange(12)[None]).logits, before)


@pytest.mark.parametrize("unread", ["position_ids", "documents"])
def test_a_student_that_does_not_read_what_it_is_given_is_found_by_trying(
    random_architecture: MakeModel, unread: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(random_architecture("gpt2")).eval()
    forward = model.base_model.forward
    model.base_model.forward = lambda **given: forward(**{name: given[name] for name in given if name != unread})
    with pytest.raises(DataError, match=r"GPT2LMHeadModel cannot be packed: packed documents are \S+ off documents al"):
        attend_per_document(model)


def test_a_student_whose_packed_rows_are_one_in_a_hundred_off_is_not_packed(random_architecture: MakeModel) -> None:
    model = AutoModelForCausalLM.from_pretrained(random_architecture("gpt2")).eval()
    attend, off = model.base_model.forward, 1.01

    def forward(**given: Any) -> Any:
        output = attend(**given)
        output.last_hidden_state *= off if "documents" in given else 1.0
        return output

    model.base_model.forward = forward
    with pytest.raises(DataError, match=r"packed documents are 0\.01 off documents alone"):
        attend_per_document(model)
    off = 1 + 1e-6
    attend_per_document(model)


def test_a_student_that_cannot_be_packed_is_padded_unless_packing_is_demanded(
    random_architecture: MakeModel,
    make_trainer: MakeTrainer,
    mixed_batch: MixedBatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    student = random_architecture("mistral")
    trainer = make_trainer(student, tmp_path / "auto")
    said = capsys.readouterr().err
    assert said.endswith("trajectories are padded, not packed: MistralForCausalLM has sliding_window=140\n")
    assert trainer.attention == "sdpa, rows padded to one length"
    metrics = [
        each.train(Batch(0, tuple(mixed_batch()))).metrics
        for each in (trainer, make_trainer(student, tmp_path / "false", packing=False))
    ]
    assert metrics[0]["loss"] == metrics[1]["loss"]
    with pytest.raises(DataError) as failure:
        make_trainer(student, tmp_path / "true", packing=True)
    assert str(failure.value) == (
        "training.packing=true: MistralForCausalLM has sliding_window=140; set training.packing=false"
    )
