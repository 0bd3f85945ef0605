"""What teachers that follow the student have of its weights: against float64, over a resume, with adapters, sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from makers import MakeBatch, MakeModel, MakeSettings
from safetensors.torch import load_file

from spot_async.config import FollowsConfig
from spot_async.trainer.messages import Batch
from spot_async.trainer.parallel import strategy_of
from spot_async.trainer.rank import StudentTrainer
from spot_async.trainer.settings import ResumePoint, TrainerSettings
from spot_async.types import WeightVersion

AVERAGED = FollowsConfig(decay=0.8)
LAGGED = FollowsConfig(every=3)
LIVE = FollowsConfig(every=1)


def make(settings: TrainerSettings, **changes: Any) -> StudentTrainer:
    settings = settings.model_copy(update=changes)
    return StudentTrainer(settings, strategy_of(settings.training), torch.device("cpu"))


def tensors(directory: Path | str) -> dict[str, torch.Tensor]:
    return load_file(Path(directory) / "model.safetensors")


def files(directory: Path) -> dict[str, bytes]:
    return {str(each.relative_to(directory)): each.read_bytes() for each in directory.rglob("*.safetensors")}


@pytest.mark.parametrize(
    "sharding", [{"sharding": "none"}, {"sharding": "fsdp2"}, {"offload": "optimizer"}], ids=lambda given: str(given)
)
@pytest.mark.usefixtures("make_trainer")  # ranks in this process
def test_an_average_of_ten_steps_is_that_of_float64_and_a_copy_lags(
    student: Path, trainer_settings: MakeSettings, small_batch: MakeBatch, tmp_path: Path, sharding: dict[str, str]
) -> None:
    settings = trainer_settings(student, tmp_path, iterations=10, keep_weights=12, **sharding)
    trainer = make(settings, follows={"teachers.old": LAGGED, "teacher": AVERAGED, "teachers.live": LIVE})
    average = {name: each.double() for name, each in tensors(student).items()}
    for step in range(1, 11):
        report = trainer.train(small_batch(step - 1))
        new = tensors(report.snapshot.directory)
        average = {name: 0.8 * average[name] + 0.2 * new[name].double() for name in new}
        held = report.teachers
        assert held["teachers.live"] == report.snapshot
        assert held["teacher"].version == report.snapshot.version
        assert ("teachers.old" in held) == (step >= 3)
        if step >= 3:
            assert held["teachers.old"].version == WeightVersion(0, step - step % 3)
            then = tensors(trainer._publisher.path(step - step % 3))
            assert all(torch.equal(each, then[name]) for name, each in tensors(held["teachers.old"].directory).items())
    found = tensors(held["teacher"].directory)
    for name, each in found.items():
        torch.testing.assert_close(each.double(), average[name], rtol=1e-6, atol=1e-7)
    assert any(not torch.equal(each, new[name]) for name, each in found.items())


@pytest.mark.usefixtures("make_trainer")
def test_a_copy_is_published_in_the_types_of_the_student(
    random_architecture: MakeModel, trainer_settings: MakeSettings, small_batch: MakeBatch, tmp_path: Path
) -> None:
    """Of a mixture in bfloat16, whose routers and their biases stay in float32."""
    settings = trainer_settings(random_architecture("ernie4_5_moe"), tmp_path, dtype="bfloat16")
    report = make(settings, follows={"teacher": AVERAGED}).train(small_batch(0))
    student, copy = (tensors(each.directory) for each in (report.snapshot, report.teachers["teacher"]))
    types = {name: each.dtype for name, each in student.items()}
    assert {torch.float32, torch.bfloat16} == {*types.values()}
    assert {name: each.dtype for name, each in copy.items()} == types


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8.0}])
def test_a_resumed_run_has_the_same_copies_and_publishes_them_again_where_they_are_gone(
    student: Path, trainer_settings: MakeSettings, small_batch: MakeBatch, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    short = {"iterations": 6, "keep_weights": 8, "lora": lora}
    followers = {"follows": {"teacher": AVERAGED, "teachers.old": LAGGED}, "teachers_take_adapters": lora is not None}
    whole = make(trainer_settings(student, tmp_path / "whole", **short), **followers)
    saved = tmp_path / "saved"
    for iteration in range(6):
        expected = whole.train(small_batch(iteration))
        if iteration == 3:
            whole.begin_to_save(saved, lambda seconds, reason: None)
    point = ResumePoint(directory=str(saved), step=4)
    resumed = make(trainer_settings(student, tmp_path / "resumed", **short), **followers, resume=point)
    again = tmp_path / "resumed" / "weights"
    for part in ("teacher/step-000004", "teachers.old/step-000003"):
        assert files(again / part) == files(tmp_path / "whole" / "weights" / part) != {}
    for iteration in (4, 5):
        found = resumed.train(small_batch(iteration))
    assert {role: each.version for role, each in found.teachers.items()} == {
        role: each.version for role, each in expected.teachers.items()
    }
    for role, each in found.teachers.items():
        assert files(Path(each.directory)) == files(Path(expected.teachers[role].directory)) != {}
    names = {name for each in (again / "teacher").glob("step-000006/**/*.safetensors") for name in [each.name]}
    assert names == ({"model.safetensors"} if lora is None else {"adapter_model.safetensors"})


def test_copies_are_written_beside_the_next_step_before_its_weights_are_said_to_be_there(
    student: Path, trainer_settings: MakeSettings, small_batch: MakeBatch, tmp_path: Path
) -> None:
    plain = make(trainer_settings(student, tmp_path / "plain"), follows={"teacher": AVERAGED})
    beside = make(trainer_settings(student, tmp_path / "beside"), follows={"teacher": AVERAGED}, publishes_beside=True)
    there: list[bool] = []
    for iteration in range(3):
        directory = plain.train(small_batch(iteration)).teachers["teacher"].directory
        (share,) = beside.divide(small_batch(iteration))
        path = Path(directory.replace("/plain/", "/beside/"))
        beside.train_share(share, lambda files, reason, path=path: there.append(path.is_dir()))
    beside._publisher.wait()
    assert there == [True] * 3
    for step in (2, 3):
        name = f"weights/teacher/step-{step:06d}"
        assert files(tmp_path / "plain" / name) == files(tmp_path / "beside" / name) != {}


def test_a_batch_without_samples_moves_the_average_and_harms_no_checkpoint_under_way(
    student: Path, trainer_settings: MakeSettings, small_batch: MakeBatch, tmp_path: Path
) -> None:
    trainer = make(trainer_settings(student, tmp_path), follows={"teacher": AVERAGED})
    trainer.train(small_batch(0))
    averages = {name: trainer._optimizer.state[each]["teacher"] for name, each in trainer.model.named_parameters()}
    before = {name: each.clone() for name, each in averages.items()}
    trainer.begin_to_save(tmp_path / "saved", lambda seconds, reason: None)
    trainer.train(Batch(1, ()))
    (file,) = (tmp_path / "saved").iterdir()
    held = load_file(file)
    assert all(torch.equal(held[f"teacher.{name}"], each) for name, each in before.items())
    assert any(not torch.equal(each, before[name]) for name, each in averages.items())
