"""What rests in the CPU's memory (`training.offload`) changes where state is, and no number.

Where there is no GPU, "the device" is the CPU too. Moments are copied there and back all the same.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from makers import MakeSettings, MakeTrainer, MixedBatch
from rank_groups import SAVED_AT, Group, Job, job, save, train_in_groups
from safetensors.torch import load_file

from spot_async.config import TrainingConfig
from spot_async.trainer.checkpoint import CheckpointSaver, load_checkpoint
from spot_async.trainer.messages import Batch
from spot_async.trainer.rank import StudentTrainer

STEPS = 4
CHOICES: dict[str, Any] = {"iterations": STEPS, "mini_batch_size": 4, "learning_rate": 1e-3, "weight_decay": 0.1}
OFFLOADS = [("none", "optimizer"), ("fsdp2", "optimizer"), ("fsdp2", "all")]
LORA = {"rank": 4, "alpha": 8.0}


def published(run: Path, step: int) -> bytes:
    return (run / "weights" / f"step-{step:06d}" / "model.safetensors").read_bytes()


@pytest.fixture
def batches(mixed_batch: MixedBatch) -> list[Batch]:
    return [Batch(iteration, tuple(mixed_batch())) for iteration in range(STEPS)]


@pytest.mark.parametrize("lora", [None, pytest.param(LORA, marks=pytest.mark.long)], ids=["all weights", "adapters"])
@pytest.mark.parametrize(
    ("sharding", "offload"),
    [pytest.param(*each, marks=[pytest.mark.long] * (each == ("fsdp2", "optimizer"))) for each in OFFLOADS],
)
def test_an_offloaded_run_is_the_plain_one_and_checkpoints_go_either_way(
    student_trainer: MakeTrainer,
    batches: list[Batch],
    tmp_path: Path,
    sharding: str,
    offload: str,
    lora: dict[str, Any] | None,
) -> None:
    def run(name: str, kind: str) -> StudentTrainer:
        return student_trainer(name, sharding=sharding, offload=kind, lora=lora, **CHOICES)

    metrics: dict[str, list[dict[str, float]]] = {}
    for kind in ("none", offload):
        trainer = run(kind, kind)
        metrics[kind] = []
        for batch in batches:
            metrics[kind].append(trainer.train(batch).metrics)
            if batch.iteration + 1 == SAVED_AT:
                assert save(trainer, tmp_path / kind / "tensors") == ""
    for found, expected in zip(metrics[offload], metrics["none"], strict=True):
        assert all(found[name] == expected[name] for name in ("loss", "grad_norm"))
    assert published(tmp_path / offload, STEPS) == published(tmp_path / "none", STEPS)
    files = [load_file(next((tmp_path / kind / "tensors").iterdir())) for kind in ("none", offload)]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])

    for saved, kind in (("none", offload), (offload, "none")):
        resumed = run(f"{saved} then {kind}", kind)
        parts = resumed.model, resumed._optimizer, resumed._strategy
        load_checkpoint(tmp_path / saved / "tensors", SAVED_AT, *parts)
        for batch in batches[SAVED_AT:]:
            resumed.train(batch)
        assert published(tmp_path / f"{saved} then {kind}", STEPS) == published(tmp_path / "none", STEPS)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_ranks_with_offload_publish_what_they_do_without_and_go_on_from_each_others_checkpoints(
    student: Path, trainer_settings: MakeSettings, batches: list[Batch], tmp_path: Path, ranks: int
) -> None:
    jobs: list[Job] = []
    expected_of: dict[str, str] = {}

    def prepare(name: str, sharding: str, offload: str, resumes: str = "") -> None:
        settings = trainer_settings(student, tmp_path / name, sharding=sharding, offload=offload, **CHOICES)
        jobs.append(job(settings, until=STEPS, saves_at=SAVED_AT, resumes=resumes))
        expected_of[name] = f"{sharding} plain"

    for sharding in ("none", "fsdp2"):
        prepare(f"{sharding} plain", sharding, "none")
    for sharding, offload in OFFLOADS:
        prepare(f"{sharding} {offload}", sharding, offload)
        prepare(f"{sharding} plain then {offload}", sharding, offload, f"{sharding} plain")
        prepare(f"{sharding} {offload} then plain", sharding, "none", f"{sharding} {offload}")
    train_in_groups(tmp_path, batches, [Group(ranks, jobs)])
    for name, plain in expected_of.items():
        assert published(tmp_path / name, STEPS) == published(tmp_path / plain, STEPS), name


def test_a_step_does_not_change_moments_that_are_being_saved(student_trainer: MakeTrainer) -> None:
    """On a GPU only offloaded state is read while it is saved, and a step has to wait for that."""
    trainer = student_trainer()
    gpu = torch.device("cuda")
    for is_offloaded in (False, True):
        saver = CheckpointSaver(trainer._strategy, gpu, is_offloaded=is_offloaded)
        saver._thread = thread = threading.Thread(target=time.sleep, args=(0.2,))
        thread.start()
        assert (saver.wait_before_step() > 0) is is_offloaded
        thread.join()


def test_all_is_refused_where_each_rank_holds_the_whole_student() -> None:
    with pytest.raises(ValueError, match=r"offload=all needs sharding=fsdp2, not none: set training\.sharding=fsdp2"):
        TrainingConfig(iterations=1, offload="all")
