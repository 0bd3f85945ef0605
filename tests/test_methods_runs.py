"""The methods' configuration files, what a method may not go without, and runs with roles that only some have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spot_async.config_loading import load_config
from spot_async.errors import ConfigError
from spot_async.preflight import plan_training

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs" / "running_sum"


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def plan(name: str, *overrides: str):
    return plan_training(load_config(CONFIGS / f"{name}.yaml", overrides))


@pytest.mark.parametrize("kind", ["opd", "eopd", "grpo", "kd", "spot"])
def test_each_methods_file_makes_a_plan_with_the_models_that_it_needs(kind):
    planned = plan(kind)
    needs = planned.policy.needs
    assert load_config(CONFIGS / f"{kind}.yaml").policy.kind == kind
    assert needs.teacher == (planned.teacher is not None) == (kind != "grpo")
    assert (planned.reference is not None) == (kind == "grpo")
    assert needs.teacher_responses == (kind == "kd")
    assert needs.samples_per_prompt == (8 if kind == "grpo" else 1)


@pytest.mark.parametrize(
    ("kind", "overrides", "line"),
    [
        ("spot", ["teacher=null"], "teacher: required by policy spot, but not given"),
        ("kd", ["teacher=null", "prompt.template=student"], "teacher: required by policy kd, but not given"),
        ("grpo", ["prompt.template=teacher"], "prompt.template=teacher: the run has no teacher section"),
        ("opd", ["training.reference_kl=0.1"], "training.reference_kl=0.1: policy opd asks no reference"),
        ("kd", ["policy.save=no/such/folder/file"], "policy.save: no directory 'no/such/folder'"),
        ("kd", ["policy.save=a", "policy.load=b"], "policy: give only one of save and load"),
        ("grpo", ["policy.samples=1"], "policy.samples: input should be greater than or equal to 2"),
        ("grpo", ["reference.model=no/such/model"], "reference.model: no directory 'no/such/model'"),
        ("grpo", ["queue.capacity_bytes=100000"], "queue.capacity_bytes=100000 holds less than one batch"),
    ],
)
def test_what_a_method_cannot_go_without_is_one_line(kind, overrides, line):
    with pytest.raises(ConfigError) as raised:
        plan(kind, *overrides)
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_teacher_that_cannot_write_is_refused_by_the_policy_that_wants_it_to(tmp_path, monkeypatch):
    (tmp_path / "scoring_only.py").write_text(
        "from spot_async.config import PluginSettings\n"
        "class ScoringOnly:\n"
        "    class Settings(PluginSettings):\n"
        "        kind: str = 'scoring_only:ScoringOnly'\n"
        "    async def score(self, prompt_ids, response_ids, *, top_k, deadline): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    backend = "teacher.backend=scoring_only:ScoringOnly"
    assert plan("eopd", backend).teacher is not None
    with pytest.raises(ConfigError, match="policy kd needs a teacher that can `generate`"):
        plan("kd", backend)


def test_without_a_reference_kl_grpo_serves_no_reference():
    assert plan("grpo", "training.reference_kl=0").reference is None


def run(kind: str, directory: Path, *overrides: str) -> list[dict[str, float]]:
    """Metrics of a short real run; whatever it started is gone when it returns."""
    short = ["training.iterations=2", "training.warmup_iterations=0", "training.batch_size=4"]
    short += ["training.mini_batch_size=2", "evaluation=null", f"run.directory={directory}"]
    command = [sys.executable, "-m", "spot_async", "train", str(CONFIGS / f"{kind}.yaml"), *short, *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_grpo_runs_with_a_frozen_reference_and_no_teacher(tmp_path):
    first, second = run("grpo", tmp_path / "run", "training.mini_batch_size=4", "training.learning_rate=1e-3")
    assert first["train/trajectories"] == second["train/trajectories"] == 4 * 8
    assert first["train/loss_reference"] < 1e-9  # the only update is of the initial student
    assert second["train/loss_reference"] > 1e-6  # which the student leaves behind, and the reference does not
    assert first["train/mismatch_max"] < 1e-3
    assert sorted(p.stem for p in (tmp_path / "run" / "logs").glob("*.log")) == ["reference", "student", "trainer"]


def test_kd_saves_its_responses_and_trains_from_them_without_a_teacher(tmp_path):
    taught = run("kd", tmp_path / "taught", f"policy.save={tmp_path / 'responses'}")
    again = run("kd", tmp_path / "again", f"policy.load={tmp_path / 'responses'}", "teacher=null",
                "prompt.template=student")  # fmt: skip
    assert [m["train/loss"] for m in again] == [m["train/loss"] for m in taught]
    assert not (tmp_path / "again" / "logs" / "teacher.log").exists()
