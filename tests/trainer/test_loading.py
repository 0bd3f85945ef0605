"""A loaded student has the values of its files, and a rank reads no more than it holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from makers import MakeModel
from safetensors.torch import load_file, save_file
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaModel, PreTrainedModel

import spot_async.trainer.loading as loading
from spot_async.config import LoraConfig
from spot_async.errors import DataError
from spot_async.trainer.loading import decoder_layers, new_student, read_parameters
from spot_async.trainer.lora import DOWN, UP, add_adapters
from spot_async.trainer.model import ResponseLogprobs
from spot_async.trainer.parallel import ShardedStrategy, Strategy, local
from spot_async.trainer.streaming import published_types

CPU = torch.device("cpu")
STUDENTS = {
    "tied": {},
    "untied, of odd sizes": {"tie_word_embeddings": False, "vocab_size": 53, "intermediate_size": 51},
}


@contextmanager
def second_of_two_ranks() -> Iterator[None]:
    """This process is; collectives do nothing. DTensor's caches would not let it be another one afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "1")
        patch.setenv("WORLD_SIZE", "2")
        dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each tensor, or part of one, that is read from a file."""
    found: list[int] = []

    class Slice:
        def __init__(self, slice: Any) -> None:
            self._slice = slice

        def __getitem__(self, index: Any) -> torch.Tensor:
            part: torch.Tensor = self._slice[index]
            found.append(part.nbytes)
            return part

    class File:
        def __init__(self, *arguments: Any, **choices: Any) -> None:
            self._file = open_file(*arguments, **choices)

        def __enter__(self) -> File:
            return self

        def __exit__(self, *error: object) -> None:
            self._file.__exit__(*error)

        def keys(self) -> Any:
            return self._file.keys()

        def get_slice(self, name: str) -> Slice:
            return Slice(self._file.get_slice(name))

    open_file = loading.safe_open
    monkeypatch.setattr(loading, "safe_open", File)
    return found


def loaded(directory: Path, sharding: str, lora: bool, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = new_student(str(directory))
    if lora:
        add_adapters(model, LoraConfig(rank=4), 0, published_types(model, directory, dtype))
    strategy = ShardedStrategy() if sharding == "fsdp2" else Strategy()
    module, layers = ResponseLogprobs(model, 1.0), decoder_layers(model)
    strategy.prepare(module, layers, CPU, "float32", fill=partial(read_parameters, model, str(directory)))
    return model


def values(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and buffers, tied ones under both names, without adapters; of a sharded one this rank's part."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: local(each).detach() for name, each in named if name.rpartition(".")[2] not in (DOWN, UP)}


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "adapters"])
@pytest.mark.parametrize("student", STUDENTS)
@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_a_loaded_student_is_that_of_from_pretrained_and_a_rank_reads_what_it_holds(
    random_model: MakeModel, read_bytes: list[int], sharding: str, student: str, lora: bool
) -> None:
    directory = random_model(**STUDENTS[student])
    new_student(str(directory))
    tried = sum(read_bytes)
    with second_of_two_ranks():
        model = loaded(directory, sharding, lora)
        held = sum(local(each).nbytes for each in model.parameters() if each.requires_grad is not lora)
        found = values(model)
    assert sum(read_bytes) - 2 * tried == held, "each number once, and no other rank's"
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == (student == "tied")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in values(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)).items():
        is_split = sharding == "fsdp2" and name in parameters
        assert torch.equal(found.pop(name), tensor.chunk(2)[1] if is_split else tensor), name
    assert not found


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "lfm2", "falcon_h1"])
def test_a_student_has_no_memory_until_it_is_spread(random_architecture: MakeModel, name: str) -> None:
    model = new_student(str(random_architecture(name)))
    assert all(each.is_meta for each in model.parameters())


@pytest.mark.parametrize("name", ["mixtral", "gpt2", "llama", "qwen3_5", "lfm2", "falcon_h1", "gemma4", "glm4_moe"])
def test_other_architectures_load_as_transformers_loads_them(random_architecture: MakeModel, name: str) -> None:
    """The tensors of mixtral's files are not its parameters, layers of three read their modules', one has a buffer."""
    model = loaded(random_architecture(name), "none", lora=False)
    expected = AutoModelForCausalLM.from_pretrained(random_architecture(name), dtype=torch.float32)
    found = values(model)
    assert all(torch.equal(found.pop(name), each) for name, each in values(expected).items())
    assert not found
    assert model.config.to_dict() == expected.config.to_dict()


def test_weights_are_not_called_damaged_before_the_whole_model_was_tried(
    random_architecture: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that reads a layer's weight beside the layer, as none of transformers' does so far."""
    forward = LlamaModel.forward

    def reads_beside(self: LlamaModel, **choices: Any) -> Any:
        found = forward(self, **choices)
        found.last_hidden_state = found.last_hidden_state + self.layers[0].mlp.down_proj.weight.mean()
        return found

    monkeypatch.setattr(LlamaModel, "forward", reads_beside)
    directory = random_architecture("llama")
    found = values(loaded(directory, "none", lora=False))
    for name, each in values(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)).items():
        assert torch.equal(found[name], each), name


def test_bfloat16_files_become_float32_and_frozen_matrices_stay_as_they_are(
    random_model: MakeModel, tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_pretrained(random_model(), dtype=torch.bfloat16).save_pretrained(
        tmp_path, max_shard_size="20KB"
    )
    assert len(set(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"].values())) > 1
    expected = values(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    assert all(torch.equal(each, expected[name]) for name, each in values(loaded(tmp_path, "none", lora=False)).items())
    for name, each in values(loaded(tmp_path, "none", lora=True, dtype=torch.bfloat16)).items():
        assert each.dtype == (torch.bfloat16 if each.ndim > 1 else torch.float32)
        assert torch.equal(each.float(), expected[name])


def test_numbers_that_are_not_finite_are_named(random_model: MakeModel) -> None:
    file = random_model() / "model.safetensors"
    own = load_file(file)
    save_file(own | {"model.norm.weight": own["model.norm.weight"] * torch.nan}, file, metadata={"format": "pt"})
    with pytest.raises(DataError, match=rf"^student {file.parent}: computes numbers that are not finite"):
        new_student(str(file.parent))


@pytest.mark.parametrize("student", STUDENTS)
def test_a_token_that_is_also_called_padding_is_trained_as_any_other(random_model: MakeModel, student: str) -> None:
    """As the end token of each turn is, where a model has no padding of its own."""
    directory, ids = random_model(**STUDENTS[student]), torch.tensor([[5, 9, 2, 7, 2]])
    config = json.loads((directory / "config.json").read_text())
    gradients = []
    for pad_token_id in (None, 2):
        (directory / "config.json").write_text(json.dumps(config | {"pad_token_id": pad_token_id}))
        model = loaded(directory, "none", lora=False)
        model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[0, :, 3].sum().backward()
        gradients.append(model.get_input_embeddings().weight.grad)
        assert model.config.pad_token_id == pad_token_id
    assert torch.equal(*gradients)
    assert gradients[0][2].any()
