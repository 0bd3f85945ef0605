"""Weights that are written in a thread, while the next step computes its gradients."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from makers import MakeBatch, MakeModel, MakeSettings, MakeTrainer
from rank_groups import save
from transformers import AutoModelForCausalLM

from spot_async.errors import TrainerError
from spot_async.trainer.handle import TrainerProcess

LONGEST_S = 20.0


def test_the_next_step_waits_for_the_weights_only_when_it_has_its_gradients(
    student_trainer: MakeTrainer, small_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = student_trainer(publishes_beside=True)
    happened: list[str] = []
    may_write = threading.Event()
    publish, step, clip = trainer._publisher.publish, trainer._optimizer.step, trainer._strategy.clip_grad_norm

    def slow_publish(*given: object, **choices: object) -> None:
        assert may_write.wait(LONGEST_S), "training waits for weights before it has gradients"
        publish(*given, **choices)  # type: ignore[arg-type]
        happened.append("written")

    def clipped(*given: object) -> float:
        happened.append("gradients")
        if happened.count("gradients") == 2:
            may_write.set()
        return clip(*given)  # type: ignore[arg-type]

    def stepped() -> None:
        happened.append("step")
        step()

    monkeypatch.setattr(trainer._publisher, "publish", slow_publish)
    monkeypatch.setattr(trainer._strategy, "clip_grad_norm", clipped)
    monkeypatch.setattr(trainer._optimizer, "step", stepped)
    trainer.train(small_batch(0))
    trainer.train(small_batch(1))
    trainer._publisher.wait()
    assert happened == ["gradients", "step", "gradients", "written", "step", "written"]


def test_a_checkpoint_adds_the_whole_student_only_after_its_adapter_is_written(
    student_trainer: MakeTrainer, student: Path, tmp_path: Path, small_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = student_trainer(publishes_beside=True, merged_every=0, lora={"rank": 2, "alpha": 4})
    publish = trainer._publisher.publish
    may_write = threading.Event()

    def slow_publish(*given: object, **choices: object) -> None:
        assert may_write.wait(LONGEST_S)
        publish(*given, **choices)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer._publisher, "publish", slow_publish)
    snapshot = trainer.train(small_batch(0)).snapshot
    threading.Timer(0.5, may_write.set).start()
    assert save(trainer, tmp_path / "checkpoint") == ""
    AutoModelForCausalLM.from_pretrained(snapshot.directory)
    peft = pytest.importorskip("peft")
    peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(student), f"{snapshot.directory}/adapter")


def test_names_beside_published_weights_that_are_not_the_run_s_are_left_alone(
    student_trainer: MakeTrainer, tmp_path: Path, small_batch: MakeBatch
) -> None:
    weights = tmp_path / "weights"
    others = ["step-000001-good", "step-1", ".step-good", "step-000001 (1)"]
    for name in (*others, ".step-000001"):  # the last one is half written, by a process that was killed
        (weights / name).mkdir(parents=True)
    (weights / "step-000000").symlink_to("nowhere")
    trainer = student_trainer(keep_weights=2)
    for iteration in range(4):
        trainer.train(small_batch(iteration))
    left = sorted(each.name for each in weights.iterdir())
    assert left == sorted([*others, "step-000000", "step-000003", "step-000004"])


def test_a_failed_write_stops_the_next_step(
    student_trainer: MakeTrainer, small_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object, **choices: object) -> None:
        raise TrainerError("cannot publish weights: No space left on device")

    trainer = student_trainer(publishes_beside=True)
    monkeypatch.setattr(trainer._publisher, "publish", full)
    monkeypatch.setattr(trainer._optimizer, "step", steps := Mock(wraps=trainer._optimizer.step))
    trainer.train(small_batch(0))
    assert steps.call_count == 1
    with pytest.raises(TrainerError, match="No space left"):
        trainer.train(small_batch(1))
    assert steps.call_count == 1


@pytest.mark.long
async def test_weights_written_beside_the_next_step_are_those_written_before_it(
    student: Path, tmp_path: Path, trainer_settings: MakeSettings, small_batch: MakeBatch
) -> None:
    files = []
    for is_beside in (False, True):
        settings = trainer_settings(
            student, tmp_path / str(is_beside), publishes_beside=is_beside, ranks=2, keep_weights=4
        )
        async with TrainerProcess(settings) as trainer:
            reports = [await trainer.train(iteration, small_batch(iteration).samples) for iteration in range(3)]
            assert await trainer.published(3)  # without having asked for the others
        files.append([(Path(each.snapshot.directory) / "model.safetensors").read_bytes() for each in reports])
    assert files[0] == files[1]


@pytest.mark.parametrize("odd", [{"temperature": 0.6}, {"do_sample": False, "top_k": 20}, {"pad_token_id": -1}])
def test_settings_that_transformers_reads_and_does_not_write_are_published_as_given(
    make_trainer: MakeTrainer, random_model: MakeModel, tmp_path: Path, small_batch: MakeBatch, odd: dict[str, object]
) -> None:
    student = random_model()
    (student / "generation_config.json").write_text(given := json.dumps({"eos_token_id": 1} | odd))
    published = Path(make_trainer(student, tmp_path).train(small_batch(0)).snapshot.directory)
    assert (published / "generation_config.json").read_text() == given
    AutoModelForCausalLM.from_pretrained(published)


def test_what_cannot_be_published_is_found_out_before_anything_is_trained(
    student_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object, **choices: object) -> None:
        raise ValueError("The settings are invalid.\n\nThrown during validation:\n[pad_token_id is -1]")

    monkeypatch.setattr("spot_async.trainer.publishing.publish_small_files", refuse)
    with pytest.raises(TrainerError, match=r"invalid\. Thrown during validation: \[pad_token_id is -1\]; none were"):
        student_trainer()
    assert not list((tmp_path / "weights").iterdir()), "nothing is left"


def test_a_place_that_others_can_write_is_found_out_before_anything_is_trained(
    student_trainer: MakeTrainer, tmp_path: Path
) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights").chmod(0o777)
    with pytest.raises(TrainerError, match=r"cannot publish weights to .*/weights can be written by everybody"):
        student_trainer()
