"""The methods' configuration files, what each method needs, and runs with roles that only some methods have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import spot_async
from spot_async.checks.plan import plan_training
from spot_async.config.loading import load_config
from spot_async.errors import ConfigError, ReplayMissError
from spot_async.run_directory.reading import RunFiles
from spot_async.running.services import core_shares

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs" / "running_sum"


FEW = []  # the setting that names few problems


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch, few_problems: Path) -> None:
    monkeypatch.chdir(ROOT)
    FEW[:] = [f"data.train={few_problems}"]


def plan(name: str, *overrides: str):
    return plan_training(load_config(CONFIGS / f"{name}.yaml", [*FEW, *overrides]))


@pytest.mark.parametrize("kind", ["opd", "eopd", "grpo", "kd", "spot"])
def test_each_methods_file_makes_a_plan_with_the_models_that_it_needs(kind):
    planned = plan(kind)
    needs = planned.policy.needs
    assert load_config(CONFIGS / f"{kind}.yaml").policy.kind == kind
    assert needs.teacher == (bool(planned.teachers)) == (kind != "grpo")
    assert (planned.reference is not None) == (kind == "grpo")
    assert needs.teacher_responses == (kind == "kd")
    assert not needs.candidate_logprobs  # a rollout's own top-k will do
    assert not needs.exact_entropy  # and so will bounds
    assert needs.samples_per_prompt == (8 if kind == "grpo" else 1)


def test_experiments_start_from_the_papers_target_where_the_quickstart_has_a_baseline():
    found = {name: load_config(CONFIGS / f"{name}.yaml").policy.baseline for name in ("spot", "baseline")}
    assert found == {"spot": 0.0, "baseline": 0.8}
    assert load_config(ROOT / "experiments/tokenizers/spot.yaml").policy.baseline == 0.0


@pytest.mark.parametrize("kind", ["opd", "eopd", "grpo", "kd", "spot", "baseline"])
def test_each_methods_file_fits_the_two_cores_that_it_is_made_for(kind, monkeypatch):
    monkeypatch.setattr("spot_async.running.services.available_cores", lambda: frozenset({0, 1}))
    assert core_shares(plan(kind).served).warnings == ()


@pytest.mark.parametrize(
    ("kind", "overrides", "line"),
    [
        ("spot", ["teacher=null"], "teacher: required by policy spot, but not given"),
        ("kd", ["teacher=null", "prompt.template=student"], "teacher: required by policy kd, but not given"),
        ("grpo", ["prompt.template=teacher"], "prompt.template=teacher: the run has no teacher"),
        ("opd", ["training.reference_kl=0.1"], "training.reference_kl=0.1: policy opd asks no reference"),
        ("kd", ["policy.save=a"], "policy.save: unknown key; KD's responses are kept in the file of `teacher.cache`"),
        ("kd", ["policy.load=a"], "policy.load: unknown key; KD's responses are kept in the file of `teacher.cache`"),
        ("grpo", ["policy.samples=1"], "policy.samples: input should be greater than or equal to 2"),
        ("grpo", ["reference.model=no/such/model"], "reference.model: no directory 'no/such/model'"),
        ("grpo", ["queue.capacity_bytes=100000"], "=100000 holds less than one batch in the worst case: raise it to "),
    ],
)
def test_what_a_method_cannot_go_without_is_one_line(kind, overrides, line):
    with pytest.raises(ConfigError) as raised:
        plan(kind, *overrides)
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_teacher_that_cannot_write_is_refused_by_the_policy_that_wants_it_to(tmp_path, monkeypatch):
    (tmp_path / "scoring_only.py").write_text(
        "from spot_async.config import BackendSettings\n"
        "class ScoringOnly:\n"
        "    class Settings(BackendSettings):\n"
        "        kind: str = 'scoring_only:ScoringOnly'\n"
        "    async def score(self, request, *, top_k): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    backend = "teacher.backend=scoring_only:ScoringOnly"
    assert plan("eopd", backend).teachers
    with pytest.raises(ConfigError, match="policy kd needs a teacher that can `generate`"):
        plan("kd", backend)


def test_without_a_reference_kl_grpo_serves_no_reference():
    assert plan("grpo", "training.reference_kl=0").reference is None


SHORT = [
    "training.iterations=2",
    "training.warmup_iterations=0",
    "training.batch_size=4",
    "training.mini_batch_size=2",
    "evaluation=null",
]


def run(kind: str, directory: Path, *overrides: str) -> list[dict[str, float]]:
    """Metrics of a short run with real numbers; whatever it started is gone when it returns."""
    spot_async.run(CONFIGS / f"{kind}.yaml", [*SHORT, *FEW, f"run.directory={directory}", *overrides])
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_grpo_runs_with_a_frozen_reference_and_no_teacher(tmp_path, servers_on_threads, trainer_on_thread):
    first, second = run("grpo", tmp_path / "run", "training.mini_batch_size=4", "training.learning_rate=1e-3")
    assert first["train/trajectories"] == second["train/trajectories"] == 4 * 8
    assert first["train/loss_reference"] < 1e-9  # the only update is of the initial student
    assert second["train/loss_reference"] > 1e-6  # which the student leaves behind, and the reference does not
    assert first["train/mismatch_max"] < 1e-3
    assert sorted(p.stem for p in (tmp_path / "run" / "logs").glob("*.log")) == ["reference", "student", "trainer"]


@pytest.mark.parametrize("baseline", [0.5, pytest.param(0.0, marks=pytest.mark.long)])
def test_spot_less_a_share_of_the_prior_trains_and_tells_of_a_student_that_collapses(
    tmp_path, servers_on_threads, trainer_on_thread, monkeypatch, baseline
):
    monkeypatch.setattr("spot_async.telemetry.failures.COLLAPSED", 100.0)  # whatever the second iteration has left
    rows = run("spot", tmp_path / "run", f"policy.baseline={baseline}", "training.learning_rate=1e-3")
    assert len(rows) == 2
    pulls = [row["spot/baseline_pull"] for row in rows if "spot/baseline_pull" in row]
    told = [line for line in RunFiles(tmp_path / "run").mismatches() if "entropy fell" in line]
    assert all(0.5 <= each <= 1.5 for each in pulls)
    if baseline:
        assert pulls
        assert told == [line for line in told if f"policy.baseline={baseline}" in line and "iteration 2" in line]
    assert len(told) == len(pulls[:1])


def test_kd_keeps_what_it_was_taught_and_needs_no_teacher_to_train_from_it(
    tmp_path, servers_on_threads, trainer_on_thread
):
    kept = [f"teacher.cache={tmp_path / 'answers.sqlite'}"]
    taught = run("kd", tmp_path / "run", *kept)
    assert taught[0]["train/trajectories"] == 4
    assert taught[0]["train/branch_positions"] == taught[0]["train/tokens"]  # the teacher's top-16 at every position
    again = run("kd", tmp_path / "again", *kept, "teacher.replay=true")
    assert [row["train/loss"] for row in again] == [row["train/loss"] for row in taught]
    assert sorted(p.stem for p in (tmp_path / "again" / "logs").glob("*.log")) == ["student", "trainer"]
    with pytest.raises(ReplayMissError, match=r"teacher\.replay: .*answers.sqlite has no answer about prompt 0 \("):
        run("kd", tmp_path / "cooler", *kept, "teacher.replay=true", "sampling.temperature=0.5")
