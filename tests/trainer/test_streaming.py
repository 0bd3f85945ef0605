"""What is published tensor by tensor is what transformers writes at once, and a rank holds one whole tensor."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import spot_async.trainer.streaming as streaming
from spot_async.errors import TrainerError
from spot_async.trainer.rank import StudentTrainer
from spot_async.trainer.streaming import WeightStream

MakeTrainer = Callable[..., StudentTrainer]
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
    random_model: Callable[..., Path],
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
    random_architecture: Callable[..., Path], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    directory = random_architecture("mixtral")
    weights = published(make_trainer(directory, tmp_path), 1)
    found, expected = (load_file(each / "model.safetensors") for each in (weights, directory))
    assert all(torch.equal(found.pop(name), each) for name, each in expected.items())
    assert not found


@pytest.mark.parametrize("training", [{}, {"lora": {"rank": 2}}], ids=["all weights", "adapters"])
def test_a_whole_weight_is_gone_before_the_next_is_gathered_and_a_failed_rank_gathers_on(
    student: Path, make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training: dict[str, Any]
) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    gathered = 0

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal gathered
        assert not alive
        gathered += 1
        alive.add(found := tensor.detach().full_tensor().clone())
        return found

    def is_full(self: WeightStream, path: Path, shapes: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(streaming, "whole", whole)
    trainer = make_trainer(student, tmp_path, sharding="fsdp2", **training)
    weights = len(load_file(published(trainer, 1) / "model.safetensors"))
    assert gathered == weights
    monkeypatch.setattr(WeightStream, "_write_file", is_full)
    with pytest.raises(TrainerError, match=r"No space left on device; complete weights up to .*step-000001"):
        published(trainer, 2)
    assert gathered == 2 * weights, "the other ranks gather all, and wait for this one"
