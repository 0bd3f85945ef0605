"""The methods' configuration files, what each method needs, and runs with roles that only some methods have."""

from __future__ import annotations

import asyncio
import json
import shutil
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

import spot_async
from spot_async.checks.plan import plan_training
from spot_async.config.loading import load_config
from spot_async.errors import ConfigError, DataError
from spot_async.running.services import core_shares
from spot_async.testing.services import generation, token_scores
from spot_async.testing.simulation import ScriptedStages

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
    assert needs.teacher == (planned.teacher is not None) == (kind != "grpo")
    assert (planned.reference is not None) == (kind == "grpo")
    assert needs.teacher_responses == (kind == "kd")
    assert not needs.candidate_logprobs  # a rollout's own top-k will do
    assert not needs.exact_entropy  # and so will bounds
    assert needs.samples_per_prompt == (8 if kind == "grpo" else 1)


@pytest.mark.parametrize("kind", ["opd", "eopd", "grpo", "kd", "spot"])
def test_each_methods_file_fits_the_two_cores_that_it_is_made_for(kind, monkeypatch):
    monkeypatch.setattr("spot_async.running.services.available_cores", lambda: frozenset({0, 1}))
    assert core_shares(plan(kind).served).warnings == ()


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
        "from spot_async.config import BackendSettings\n"
        "class ScoringOnly:\n"
        "    class Settings(BackendSettings):\n"
        "        kind: str = 'scoring_only:ScoringOnly'\n"
        "    async def score(self, request, *, top_k): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    backend = "teacher.backend=scoring_only:ScoringOnly"
    assert plan("eopd", backend).teacher is not None
    with pytest.raises(ConfigError, match="policy kd needs a teacher that can `generate`"):
        plan("kd", backend)


def test_without_a_reference_kl_grpo_serves_no_reference():
    assert plan("grpo", "training.reference_kl=0").reference is None


EIGHT = ["training.iterations=2", "training.warmup_iterations=0", "training.batch_size=4", "training.mini_batch_size=2"]


def write_responses(path: Path, problems: int, *overrides: str) -> list[str]:
    """A file with responses to the first problems that a run of eight prompts asks for; the ids of all eight."""
    planned = plan("kd", f"policy.save={path}", *EIGHT, *overrides)
    prompts = list(islice(planned.schedule, 8))
    for prompt in prompts[:problems]:
        written = ScriptedStages(generation([9, 1]), token_scores([-1.0, -1.0], topk_ids=np.zeros((2, 16))))
        asyncio.run(planned.policy.supervise(prompt, written))
    return [prompt.problem.id for prompt in prompts]


def test_a_file_without_all_scheduled_problems_is_refused_with_their_number_before_anything_starts(tmp_path):
    path = tmp_path / "responses"
    ids = write_responses(path, 5)
    with pytest.raises(ConfigError) as raised:
        plan("kd", f"policy.load={path}", *EIGHT)
    assert f"{path} has no response to 3 of 8 scheduled problems, the first is {ids[5]!r}" in str(raised.value)
    assert "\n" not in str(raised.value)
    short = ["training.iterations=1", "training.batch_size=5", "training.mini_batch_size=5"]
    assert not plan("kd", f"policy.load={path}", *EIGHT, *short).policy.needs.teacher  # needs no more than it has


def test_a_file_written_for_other_prompts_or_sampling_is_refused_before_anything_starts(tmp_path):
    path = tmp_path / "responses"
    write_responses(path, 8)
    plan("kd", f"policy.load={path}", *EIGHT)
    with pytest.raises(DataError, match="was rendered differently"):
        plan("kd", f"policy.load={path}", "prompt.instruction=Answer in one word.", *EIGHT)
    with pytest.raises(
        ConfigError, match=r"sampling\.temperature=0\.5: .* of .*running_sum/teacher at temperature 1, .* set it to 1"
    ):
        plan("kd", f"policy.load={path}", "sampling.temperature=0.5", *EIGHT)
    with pytest.raises(ConfigError, match=r"sampling\.max_response_tokens=1: .* a response of 2 tokens to problem"):
        plan("kd", f"policy.load={path}", "sampling.max_response_tokens=1", *EIGHT)
    plan("kd", f"policy.load={path}", "sampling.max_response_tokens=2", *EIGHT)


def test_a_file_is_continued_by_the_teacher_that_began_it_wherever_it_lies_and_by_no_other_of_its_name(tmp_path):
    path, (first, moved, other) = tmp_path / "responses", (tmp_path / name / "student" for name in ("a", "b", "c"))
    for directory in (first, moved, other):
        shutil.copytree("examples/running_sum/teacher", directory)
    weights = (other / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    write_responses(path, 2, f"teacher.model={first}")
    saving = [f"policy.save={path}", *EIGHT]
    plan("kd", f"teacher.model={moved}", "teacher.backend.dtype=bfloat16", *saving)
    for another in (f"teacher.model={other}", "teacher.backend={kind: vllm, url: 'http://h', served_model: m}"):
        with pytest.raises(ConfigError) as raised:
            plan("kd", f"teacher.model={moved}", another, *saving)
        assert f"policy.save: {path} holds responses of another teacher ({first}) than teach" in str(raised.value)
        assert "\n" not in str(raised.value)


def test_a_file_loads_without_the_teacher_only_where_the_students_template_renders_its_prompts(tmp_path):
    path = tmp_path / "responses"
    write_responses(path, 8)
    with pytest.raises(ConfigError, match=r"prompt\.template=teacher: .* set prompt\.template=student"):
        plan("kd", f"policy.load={path}", "teacher=null", *EIGHT)
    assert plan("kd", f"policy.load={path}", "teacher=null", "prompt.template=student", *EIGHT).teacher is None


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


def test_kd_saves_its_responses_and_needs_no_teacher_to_train_from_them(
    tmp_path, servers_on_threads, trainer_on_thread
):
    responses = tmp_path / "responses"
    (trained,) = run("kd", tmp_path / "run", f"policy.save={responses}", "training.iterations=1")
    assert trained["train/trajectories"] == 4
    assert trained["train/branch_positions"] == trained["train/tokens"]  # the teacher's top-16 at every position
    alone = ["training.iterations=1", f"policy.load={responses}", "teacher=null", "prompt.template=student"]
    loading = plan("kd", *SHORT, *alone)
    assert loading.teacher is None
    assert not loading.policy.needs.teacher
