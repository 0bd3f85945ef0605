"""`spot-async push`: a run's student on the hub, with a card of what the run knows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import hub_stand_in
import pytest
import yaml
from command import assert_refused, invoke

from spot_async.config.loading import load_config
from spot_async.models.hub import local_path, with_downloads
from spot_async.run_directory.layout import RunDirectory

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "running_sum"
COMMIT = "0123456789" * 4


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with hub_stand_in.reached(monkeypatch, tmp_path / "cache") as hub:
        yield hub


@pytest.fixture
def run(tmp_path):
    """A finished run with LoRA, as `train` leaves it."""
    config = load_config(
        ROOT / "configs" / "quickstart.yaml",
        [
            f"student.model=org/base@{COMMIT}",
            f"teacher.model={EXAMPLE / 'teacher'}",
            "training.lora.rank=8",
            "data.train=[data/train.jsonl, {path: org/code}]",
        ],
    )
    directory = RunDirectory.create(tmp_path / "run", config)
    student = directory.weights.after(60)
    shutil.copytree(EXAMPLE / "student", student)
    (student / "adapter").mkdir()
    (student / "adapter" / "adapter_config.json").write_text(
        json.dumps({"r": 8, "base_model_name_or_path": "/home/me/cache/base"})
    )
    (student / "adapter" / "adapter_model.safetensors").write_bytes(b"adapter")
    directory.weights.advance_student_to(student)
    figures = {"problems": 5, "avg_standard_error": 0.02, "pass_k": 4, "pass_standard_error": None}
    directory.write_summary(
        {
            "iterations": 60,
            "problems": {"usable": 8000},
            "before": {"samples": 4, "tiers": {"all": figures | {"avg": 0.25, "pass": 0.5}}},
            "after": {"samples": 4, "tiers": {"all": figures | {"avg": 0.615, "pass": 0.75}}},
        }
    )
    return directory.path


def test_a_student_is_pushed_whole_and_private_with_a_card_that_the_run_fills_in(hub, run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", hub_stand_in.TOKEN)
    shown = invoke(monkeypatch, "push", str(run), "me/student")
    assert shown.exit_code == 0, shown.stderr
    assert f"{hub.url}/me/student" in shown.stdout
    assert hub_stand_in.TOKEN not in shown.output
    repository = hub.repositories["me/student"]
    assert repository.private
    _, files = repository.find("main")
    student = run / "student"
    sent = {each.relative_to(student).as_posix() for each in student.rglob("*") if each.is_file()}
    assert files.keys() == {*sent, "README.md", ".gitattributes"}
    assert files["model.safetensors"] == (student / "model.safetensors").read_bytes()
    assert json.loads(files["adapter/adapter_config.json"])["base_model_name_or_path"] == "org/base"
    card = files["README.md"].decode()
    front = yaml.safe_load(card.split("---")[1])
    assert (front["base_model"], front["library_name"]) == ("org/base", "transformers")
    assert "license" not in front
    for words in (f"org/base/tree/{COMMIT}", "trained by SPOT", "teacher `teacher`", "learning_rate: ", "spot-async 0"):
        assert words in card
    assert (
        "`train.jsonl`, [org/code](https://huggingface.co/datasets/org/code), 8,000 problems, in 60 iterations" in card
    )
    assert "| tier | n | Avg@4 before | Avg@4 after | Pass@4 before | Pass@4 after |" in card
    assert "| all | 5 | 25.0 ±2.0 | 61.5 ±2.0 | 50.0 | 75.0 |" in card
    assert str(ROOT) not in card
    # What was pushed can be trained on.
    pushed = with_downloads(load_config(ROOT / "configs" / "quickstart.yaml", ["student.model=me/student"]))
    found = Path(local_path(pushed.student.model))
    assert (found / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_a_repository_that_is_there_gets_a_commit_only_when_asked_for_and_may_be_public_when_new(hub, run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", hub_stand_in.TOKEN)
    assert_refused(
        invoke(monkeypatch, "push", str(run), "me/student", "--update"), "no such repository: leave --update away"
    )
    assert invoke(monkeypatch, "push", str(run), "me/student", "--public").exit_code == 0
    assert not hub.repositories["me/student"].private
    assert_refused(invoke(monkeypatch, "push", str(run), "me/student"), "me/student: is there already: give --update")
    assert invoke(monkeypatch, "push", str(run), "me/student", "--update").exit_code == 0


def test_what_cannot_be_pushed_is_refused_before_the_hub_is_asked(hub, run, monkeypatch):
    shown = invoke(monkeypatch, "push", str(run), "me/student", "--dry-run")
    assert shown.exit_code == 0, shown.stderr
    assert "adapter/adapter_model.safetensors" in shown.stdout
    assert "## Figures" in shown.stdout
    assert_refused(invoke(monkeypatch, "push", str(run), "me/student"), "HF_TOKEN: not set")
    assert_refused(invoke(monkeypatch, "push", str(run), "student"), "give the name of a repository")
    assert_refused(invoke(monkeypatch, "push", str(run), "me/student", "--best"), "no best student")
    (run / "summary.json").unlink()
    assert_refused(invoke(monkeypatch, "push", str(run), "me/student"), "has not come to its end")
    assert hub.asked == []
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    RunDirectory.open(run).write_summary({"iterations": 60})
    refused = invoke(monkeypatch, "push", str(run), "me/student")
    assert_refused(refused, f"the hub (HF_ENDPOINT={hub.url}) refuses HF_TOKEN (401)")
    assert "hf_wrong" not in refused.output
