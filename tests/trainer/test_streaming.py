"""What is published tensor by tensor is what transformers writes at once, and a rank holds one whole tensor."""

from __future__ import annotations

import errno
import os
import re
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from makers import MakeModel, MakeTrainer
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import spot_async.trainer.streaming as streaming
from spot_async.errors import TrainerError
from spot_async.trainer.rank import StudentTrainer
from spot_async.trainer.streaming import WeightStream

FILE_SIZE = 20_000  # bytes: the student takes several files


def published(trainer: StudentTrainer, step: int) -> Path:
    trainer._publisher.publish(trainer.model, step)
    return trainer._publisher.path(step)


@pytest.mark.parametrize("size", [FILE_SIZE, 1 << 30], ids=["several files", "one file"])
@pytest.mark.parametrize(
    ("tied", "training"),
    [(True, {}), (False, {"sharding": "fsdp2"}), (True, {"sharding": "fsdp2", "dtype": "bfloat16"})],
    ids=["replicated", "sharded, untied", "sharded, bfloat16"],
)
def test_files_are_byte_for_byte_those_of_save_pretrained(
    random_model: MakeModel,
    make_trainer: MakeTrainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tied: bool,
    training: dict[str, Any],
    size: int,
) -> None:
    monkeypatch.setattr(streaming, "MAX_FILE_SIZE", size)
    directory = random_model(tie_word_embeddings=tied)
    directory_of_weights = published(make_trainer(directory, tmp_path / "run", **training), 1)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, training.get("dtype", "float32")))
    model.save_pretrained(tmp_path / "expected", max_shard_size=size)
    expected = {each.name: each.read_bytes() for each in (tmp_path / "expected").iterdir()}
    assert (len(expected) > 3) == (size == FILE_SIZE)
    for name, content in expected.items():
        assert (directory_of_weights / name).read_bytes() == content, name


def test_a_model_that_transformers_converts_is_published_as_it_was(
    random_architecture: MakeModel, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    directory = random_architecture("mixtral")
    weights = published(make_trainer(directory, tmp_path), 1)
    found, expected = (load_file(each / "model.safetensors") for each in (weights, directory))
    assert all(torch.equal(found.pop(name), each) for name, each in expected.items())
    assert not found


KEPT = {  # what has its own type in published files of bfloat16
    "glm4_moe": r"e_score_correction_bias",  # a buffer
    "ernie4_5_moe": r"moe_statics|gate\.weight",  # weights, of which a router's is trained
    "falcon_h1": r"A_log|dt_bias|\.D$",  # as the files have it, where transformers has no rule
    "gemma4": r"^$",  # a buffer of bfloat16
    "mixtral": r"gate\.weight",  # a weight of another name in the files
}


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "adapters"])
@pytest.mark.parametrize("name", KEPT)
def test_what_the_files_keep_in_float32_is_published_bit_for_bit(
    random_architecture: MakeModel, make_trainer: MakeTrainer, tmp_path: Path, name: str, lora: bool
) -> None:
    directory = shutil.copytree(random_architecture(name), tmp_path / "given")
    given = load_file(directory / "model.safetensors")
    given = {key: each if re.search(KEPT[name], key) else each.bfloat16() for key, each in given.items()}
    save_file(given, directory / "model.safetensors", metadata={"format": "pt"})
    training: dict[str, Any] = {"lora": {"rank": 2, "targets": "attention"}} if lora else {}
    weights = published(make_trainer(directory, tmp_path / "run", dtype="bfloat16", **training), 1)
    found = load_file(weights / "model.safetensors")
    assert found.keys() == given.keys()
    for key, each in given.items():
        assert found[key].dtype == each.dtype, key
        assert torch.equal(found[key], each), key


def test_a_rank_that_writes_nothing_copies_nothing(student: Path, student_trainer: MakeTrainer) -> None:
    """Told on the meta device, from which nothing can be copied, and by what is done with weights there."""
    done: list[str] = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            done.append(str(func))
            return func(*args, **(kwargs or {}))

    trainer = student_trainer(dtype="bfloat16")
    trainer.model.to("meta")
    trainer._publisher.writes = False
    with Noted():
        published(trainer, 1)
    assert done.count("aten.detach.default") >= len(load_file(student / "model.safetensors")), "all are gathered"
    assert set(done) == {"aten.detach.default"}


@pytest.mark.parametrize("size", [8, 1000, 1 << 20], ids=["pieces of two numbers", "pieces", "whole"])
def test_weights_written_in_pieces_are_those_written_at_once(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "BUFFER_BYTES", size)
    tensors = [torch.randn(*shape) for shape in ((3, 50), (7,), (2, 0), (400, 2))]
    tensors[0] = tensors[0].T  # not contiguous
    with (tmp_path / "file").open("wb") as file:
        streaming.write_tensors(file, iter(tensors), [torch.bfloat16] * len(tensors))
    expected = torch.cat([each.flatten().bfloat16() for each in tensors])
    assert (tmp_path / "file").read_bytes() == expected.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("training", [{}, {"lora": {"rank": 2}}], ids=["all weights", "adapters"])
def test_a_whole_weight_is_gone_before_the_next_is_gathered_and_a_failed_rank_gathers_on(
    student_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, training: dict[str, Any]
) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    gathered = 0

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal gathered
        assert not alive
        gathered += 1
        alive.add(found := tensor.detach().full_tensor().clone())
        return found

    def is_full(self: WeightStream, path: Path, shapes: object, tensors: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(streaming, "whole", whole)
    trainer = student_trainer(sharding="fsdp2", **training)
    weights = len(load_file(published(trainer, 1) / "model.safetensors"))
    assert gathered == weights
    monkeypatch.setattr(WeightStream, "_write_file", is_full)
    with pytest.raises(TrainerError, match=r"No space left on device; complete weights up to .*step-000001"):
        published(trainer, 2)
    assert gathered == 2 * weights, "the other ranks gather all, and wait for this one"
