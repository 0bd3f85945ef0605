"""Checkpoints of the trainer: a resumed run is the uninterrupted one, on any ranks, and what is wrong is said."""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from makers import MakeBatch, MakeModel, MakeSettings, MakeTrainer
from rank_groups import SAVED_AT, Group, Job, job, save, train_in_groups
from safetensors.torch import load_file, save_file

from spot_async.errors import TrainerError
from spot_async.trainer import checkpoint
from spot_async.trainer.checkpoint import load_checkpoint, write_checkpoint
from spot_async.trainer.handle import TrainerProcess
from spot_async.trainer.settings import ResumePoint
from spot_async.types import WeightVersion

SHORT = {"iterations": 4, "batch_size": 4, "mini_batch_size": 2, "keep_weights": 4}


def weights(run: Path, step: int) -> Path:
    return run / "weights" / f"step-{step:06d}" / "model.safetensors"


@pytest.mark.long
def test_a_resumed_run_is_the_uninterrupted_one_and_ranks_and_sharding_may_change(
    random_model: MakeModel, trainer_settings: MakeSettings, small_batch: MakeBatch, tmp_path: Path
) -> None:
    # With heads of 6 the fourth of four ranks has no part of some tensors, and 50 tokens are not a multiple of 4.
    student = random_model(head_dim=6)

    def planned(name: str, sharding: str, until: int = 4, **choices: Any) -> Job:
        is_compiled = name.startswith("1 compiled")
        settings = trainer_settings(student, tmp_path / name, sharding=sharding, compile=is_compiled, **SHORT)
        return job(settings, until=until, **choices)

    same = {"1 none": (1, "none"), "1 compiled": (1, "none"), "2 none": (2, "none"), "2 fsdp2": (2, "fsdp2")}
    changed = [
        ("4 none", 2, "fsdp2"),
        ("4 fsdp2", 2, "none"),
        ("4 none", 1, "fsdp2"),
        ("4 fsdp2", 1, "none"),
        ("2x2 fsdp2", 1, "none"),
    ]
    over_nodes = ["none", "fsdp2"]
    first: dict[int, list[Job]] = {4: [], 2: [], 1: []}
    then: dict[int, list[Job]] = {2: [], 1: []}
    first_over_nodes, then_over_nodes = [], []
    for sharding in over_nodes:  # these continue for one step, so that others have something to compare with
        first[4].append(planned(f"4 {sharding}", sharding, SAVED_AT + 1, saves_at=SAVED_AT))
        first_over_nodes.append(planned(f"2x2 {sharding}", sharding, SAVED_AT + 1, saves_at=SAVED_AT))
        then_over_nodes.append(planned(f"2x2 {sharding} resumed", sharding, SAVED_AT + 1, resumes=f"2x2 {sharding}"))
    for name, (ranks, sharding) in same.items():
        first[ranks] += [planned(f"{name} whole", sharding), planned(name, sharding, SAVED_AT, saves_at=SAVED_AT)]
        then[ranks].append(planned(f"{name} resumed", sharding, resumes=name))
    for saved, ranks, sharding in changed:
        then[ranks].append(planned(f"{saved} on {ranks} {sharding}", sharding, SAVED_AT + 1, resumes=saved))
    full = {"saves_at": SAVED_AT + 1, "is_full": True}
    then[2].append(planned("full disk", "fsdp2", SAVED_AT + 1, resumes="2 fsdp2", **full))
    groups = [Group(*each) for each in first.items()] + [Group(4, first_over_nodes, nodes=2)]
    groups += [Group(*each) for each in then.items()] + [Group(4, then_over_nodes, nodes=2)]
    train_in_groups(tmp_path, [small_batch(iteration) for iteration in range(4)], groups)

    for name in same:
        for step in (SAVED_AT, 3, 4):  # the first of them is published again
            found, expected = weights(tmp_path / f"{name} resumed", step), weights(tmp_path / f"{name} whole", step)
            assert found.read_bytes() == expected.read_bytes(), (name, step)
    for saved, ranks, sharding in changed:
        run = tmp_path / f"{saved} on {ranks} {sharding}"
        again, before = weights(run, SAVED_AT), weights(tmp_path / saved, SAVED_AT)
        assert again.read_bytes() == before.read_bytes(), run.name
        found, expected = load_file(weights(run, 3)), load_file(weights(tmp_path / saved, 3))
        assert all(torch.allclose(found[key], expected[key], rtol=0, atol=1e-5) for key in expected), run.name

    for sharding in over_nodes:
        steps = [weights(tmp_path / name, 3) for name in (f"2x2 {sharding}", f"2x2 {sharding} resumed")]
        assert steps[0].read_bytes() == steps[1].read_bytes(), sharding
        found, expected = load_file(steps[0]), load_file(weights(tmp_path / f"4 {sharding}", 3))
        assert all(torch.allclose(found[key], expected[key], rtol=0, atol=1e-5) for key in expected), sharding
        held = sorted(each.name for each in (tmp_path / f"2x2 {sharding}" / "tensors").iterdir())
        assert held == [f"rank-{rank:05d}-of-00002.safetensors" for rank in (1, 2)]
    assert not (tmp_path / "no such directory").exists()

    names = [sorted(each.name for each in (tmp_path / f"4 {kind}" / "tensors").iterdir()) for kind in ("none", "fsdp2")]
    assert names[0] == names[1] == [f"rank-{rank:05d}-of-00004.safetensors" for rank in range(1, 5)]
    fourth = load_file(tmp_path / "4 fsdp2" / "tensors" / names[1][3])
    assert any(name.startswith("parameter.") for name in fourth)
    assert not any("q_norm" in name for name in fourth), "the test has no empty part"

    errors = [(tmp_path / "full disk" / f"error-{rank}").read_text() for rank in range(2)]
    assert errors[0] == errors[1]
    assert errors[0].startswith(f"cannot save a checkpoint to {tmp_path / 'full disk' / 'tensors'}: ")
    assert "File too large" in errors[0]
    assert errors[0].endswith("; older ones are untouched")
    assert "\n" not in errors[0]
    assert list((tmp_path / "full disk" / "tensors").iterdir()) == []
    assert len(list((tmp_path / "2 fsdp2" / "tensors").iterdir())) == 2


def test_loading_names_the_tensor_that_is_missing_unknown_or_different(
    student: Path, student_trainer: MakeTrainer, small_batch: MakeBatch, tmp_path: Path
) -> None:
    trainer = student_trainer(sharding="fsdp2")
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "rank-00004-of-00004.safetensors").write_bytes(b"of an attempt on more ranks that was cut off")
    trainer.train(small_batch(0))
    assert save(trainer, saved) == ""
    (file,) = saved.iterdir()
    tensors = load_file(file)
    name = "exp_avg.model.layers.0.mlp.up_proj.weight"
    assert name in tensors
    parameters = dict(trainer.model.named_parameters())
    assert len([each for each in tensors if each.startswith("parameter.")]) == len(parameters)

    def load(directory: Path, step: int = 1) -> None:
        load_checkpoint(directory, step, trainer.model, trainer._optimizer, trainer._strategy)

    def places(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
        offsets = {each: {"saved_offsets": [0] * tensor.dim()} for each, tensor in tensors.items()}
        return {"DCP_SHARDING_INFO": json.dumps(offsets)}

    def spoiled(**changed: torch.Tensor | None) -> Path:
        spoilt = tmp_path / "spoilt"
        shutil.rmtree(spoilt, ignore_errors=True)
        spoilt.mkdir()
        kept = {each: tensor for each, tensor in {**tensors, **changed}.items() if tensor is not None}
        save_file(kept, spoilt / file.name, metadata=places(kept))
        return spoilt

    wide = torch.zeros(3, 5)

    def refused(directory: Path, why: str, step: int = 1) -> None:
        with pytest.raises(TrainerError) as caught:
            load(directory, step)
        assert str(caught.value).startswith(f"cannot load checkpoint {directory}: {why}")
        assert "\n" not in str(caught.value)

    refused(spoiled(**{name: None}), f"tensor {name} is missing")
    refused(spoiled(**{name: wide}), f"tensor {name} has shape (3, 5), the student's has {tuple(tensors[name].shape)}")
    refused(
        spoiled(**{name: tensors[name].double()}), f"tensor {name} is torch.float64, the student's is torch.float32"
    )
    refused(spoiled(**{"exp_avg.lm_head.bias": wide}), "tensor exp_avg.lm_head.bias is none of the student's")
    refused(saved, "it is of step 1, not 7", step=7)
    refused(tmp_path / "nowhere", "No such file or directory")

    # A whole in three parts, of which the middle one is gone: the shape alone does not tell.
    holed = spoiled(**{name: None})
    thirds = tensors[name].chunk(3)
    for number in (0, 2):
        offsets = {name: {"saved_offsets": [number * len(thirds[0]), 0]}}
        path = holed / f"rank-{number + 2:05d}-of-00004.safetensors"
        save_file({name: thirds[number].clone()}, path, metadata={"DCP_SHARDING_INFO": json.dumps(offsets)})
    refused(holed, f"a part of tensor {name} is missing")
    cut = spoiled() / file.name
    cut.write_bytes(cut.read_bytes()[:-100])
    refused(cut.parent, "")
    shutil.copy(saved / file.name, saved / f"copy of {file.name}")  # somebody's, and not read
    (saved / "mine.safetensors").write_bytes(b"no tensors")
    load(saved)  # and this one is good


def test_a_checkpoint_outlives_a_power_cut(
    student_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = student_trainer()
    flushed: list[tuple[int, int]] = []

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        flushed.append((status.st_ino, status.st_size if stat.S_ISREG(status.st_mode) else 0))

    monkeypatch.setattr(os, "fsync", fsync)
    directory = tmp_path / "checkpoints" / "step-000001"
    assert save(trainer, directory) == ""
    (file,) = directory.iterdir()
    assert (file.stat().st_ino, file.stat().st_size) in flushed, "the file, when it was whole"
    assert {(each.stat().st_ino, 0) for each in (directory, directory.parent, tmp_path)} <= set(flushed)
    assert flushed.index((file.stat().st_ino, file.stat().st_size)) < len(flushed) - 1, "its name comes after it"


def test_torchs_random_state_goes_on_with_the_run(student_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = student_trainer()
    parts = trainer.model, trainer._optimizer, trainer._strategy
    with torch.random.fork_rng():
        torch.manual_seed(3)
        assert save(trainer, tmp_path / "saved") == ""
        expected = torch.rand(4)
        torch.manual_seed(4)
        load_checkpoint(tmp_path / "saved", 0, *parts)
        assert torch.equal(torch.rand(4), expected)


def test_a_step_does_not_change_what_is_being_saved(
    student_trainer: MakeTrainer, small_batch: MakeBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*given: Any) -> None:
        time.sleep(0.5)
        write_checkpoint(*given)

    monkeypatch.setattr(checkpoint, "write_checkpoint", slow)
    trainer = student_trainer()
    trainer.train(small_batch(0))
    expected = {name: each.detach().clone() for name, each in trainer.model.named_parameters()}
    trainer.begin_to_save(tmp_path / "saved", lambda seconds, failure: None)
    report = trainer.train(small_batch(1))
    assert report.metrics["checkpoint_s"] > 0.1
    found = load_file(tmp_path / "saved" / "rank-00001-of-00001.safetensors")
    assert all(torch.equal(found[f"parameter.{name}"], each) for name, each in expected.items())
    assert "checkpoint_s" not in trainer.train(small_batch(2)).metrics


async def test_the_trainer_checkpoints_when_asked_and_goes_on_at_its_step_in_its_lineage(
    student: Path, trainer_settings: MakeSettings, trainer_on_thread: None, small_batch: MakeBatch, tmp_path: Path
) -> None:
    settings = trainer_settings(student, tmp_path, **SHORT)
    saved = tmp_path / "checkpoints" / "step-000002"
    async with TrainerProcess(settings) as trainer:
        assert trainer.step == 0
        await trainer.train(0, small_batch(0).samples)
        await trainer.train(1, small_batch(1).samples)
        await trainer.save(2, str(saved))
        assert await trainer.saved(2) > 0
    published = weights(tmp_path, 2)
    before, inode = published.read_bytes(), published.stat().st_ino

    resumed = settings.model_copy(update={"resume": ResumePoint(directory=str(saved), step=2), "lineage": 1})
    async with TrainerProcess(resumed) as trainer:
        assert trainer.step == 2
        assert published.stat().st_ino == inode, "weights that are there are not written again"
        report = await trainer.train(2, small_batch(2).samples)
        assert report.snapshot.version == WeightVersion(1, 3)
    shutil.rmtree(published.parent)
    async with TrainerProcess(resumed) as trainer:
        assert published.read_bytes() == before
        with pytest.raises(TrainerError, match=r"^the trainer was given iteration 2, but iteration 3 is due$"):
            await trainer.train(1, small_batch(1).samples)
