"""A short SPOT run on every combination of servers that users swap between, by the command they would type."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import StartServer, TinyModels
from engine_requests import dense_logprobs
from parity import PARITY_NATS
from served_versions import largest_difference_nats

from spot_async.backends.shared.launch_settings import LaunchSettings
from spot_async.models.vocabulary import Vocabulary

HERE = Path(__file__).parent
ITERATIONS = 3
BATCH = 8


@pytest.fixture(scope="session")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("problems") / "problems.jsonl"
    path.write_text("".join(json.dumps({"problem": f"{i} + {i} =", "answer": str(2 * i)}) + "\n" for i in range(24)))
    return path


def write_config(folder: Path, models: TinyModels, problems: Path, student: Any, teacher: Any) -> Path:
    config = {
        "student": {"model": str(models.student), "backend": student},
        "teacher": {"model": str(models.teacher), "backend": teacher},
        "data": {"train": str(problems)},
        "sampling": {"max_prompt_tokens": 128, "max_response_tokens": 48},
        "policy": {"kind": "spot", "score_top_k": 8, "probe_top_k": 2},
        "verifier": {"kind": "coin_verifier:CoinVerifier"},
        "training": {"iterations": ITERATIONS, "batch_size": BATCH, "mini_batch_size": 4, "learning_rate": 1e-3},
        "evaluation": {
            "problems": str(problems),
            "samples": 1,
            "max_response_tokens": 16,
            "verifier": {"kind": "coin_verifier:CoinVerifier"},
        },
        "run": {"directory": str(folder / "run")},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def run(*arguments: str) -> str:
    """Run a command of ours to a good end, and return what it printed."""
    finished = subprocess.run(
        [sys.executable, "-m", "spot_async", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A JSONL file's objects. Responses may have other ends of lines in them."""
    with path.open(newline="\n") as file:
        return [json.loads(line) for line in file]


def train(folder: Path, models: TinyModels, problems: Path, student: Any, teacher: Any) -> list[dict[str, float]]:
    """The rows of metrics.jsonl of a run that ended well."""
    run("train", str(write_config(folder, models, problems, student, teacher)))
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == ITERATIONS
    samples = read_lines(folder / "run" / "samples.jsonl")
    assert [sample["version"] for sample in samples] == [f"0.{i}" for i in range(ITERATIONS) for _ in range(BATCH)]
    return rows


def check(rows: list[dict[str, float]], *, may_be_stale: bool = False) -> None:
    """What only a run whose parts fit together shows. An iteration may be without a token of its own weights."""
    for row in rows:
        assert row["spot/selected"] > 0
        assert row["probe/requests"] > 0
        # The trainer computes the same log-probabilities from its own weights: rollouts came from the version they
        # carry, and tokens are aligned. Both sides are float32.
        assert abs(row.get("train/mismatch_max", 0.0 if may_be_stale else math.inf)) < 2e-4, row
    assert sum(row["spot/retained"] for row in rows) > 0


@pytest.mark.parametrize("runner", ["vllm", pytest.param("vllm_v2", marks=pytest.mark.nightly)])
def test_student_and_teacher_on_vllm(
    runner: str, request: pytest.FixtureRequest, models: TinyModels, problems: Path, tmp_path: Path
) -> None:
    launch: LaunchSettings = request.getfixturevalue(f"{runner}_launch")
    started = {"kind": "vllm", "launch": launch.model_dump()}
    rows = train(tmp_path, models, problems, started, started)
    check(rows)
    assert max(abs(row["train/mismatch_max"]) for row in rows) < PARITY_NATS


@pytest.mark.nightly
@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_a_control_on_a_served_student_records_what_the_score_has_where_it_probes(
    server: str, request: pytest.FixtureRequest, models: TinyModels, problems: Path, tmp_path: Path
) -> None:
    started = {"kind": server, "launch": request.getfixturevalue(f"{server}_launch").model_dump()}
    config = write_config(tmp_path, models, problems, started, {"kind": "local"})
    run("train", str(config), "policy.selection=random", "evaluation=null", "training.iterations=2")
    samples = read_lines(tmp_path / "run" / "samples.jsonl")
    branches = [branch for sample in samples for branch in sample["branches"]]
    assert len(branches) > 2 * BATCH
    for branch in branches:
        parts = branch["score_parts"]
        assert parts["score"] == pytest.approx(parts["entropy"] * parts["mass"] * parts["gap"], abs=1e-5)
        assert 0 <= sum(candidate["student"] for candidate in branch["candidates"]) <= parts["coverage"] + 1e-5
    assert any(branch["score_parts"]["coverage"] > 0 for branch in branches)  # the models are random
    assert all("acquisition_score" not in sample and "gap" not in sample for sample in samples)


@pytest.mark.nightly
def test_a_student_is_compared_on_its_own_top_k_with_what_vllm_says_of_these_tokens(
    vllm_v2_launch: LaunchSettings, models: TinyModels, problems: Path, tmp_path: Path
) -> None:
    started = {"kind": "vllm", "launch": vllm_v2_launch.model_dump()}
    config = write_config(tmp_path, models, problems, started, started)
    policy = "policy={kind: distill, divergence: reverse_kl, support: student, top_k: 8}"
    run("train", str(config), policy, "evaluation=null", "sampling.max_response_tokens=16")
    rows = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == ITERATIONS
    for row in rows:
        assert row["stage/score/requests"] == 2 * BATCH  # a score, and one request about all chosen tokens
        # Random models: the teacher finds the student's likeliest tokens unlikely, so most is in its tail.
        assert 0 < row["train/teacher_mass"] < row["train/student_mass"] < 1
        assert row["train/kl_to_teacher"] > 0


def test_student_and_teacher_on_sglang(
    sglang_launch: LaunchSettings, models: TinyModels, problems: Path, tmp_path: Path
) -> None:
    started = {"kind": "sglang", "launch": sglang_launch.model_dump()}
    check(train(tmp_path, models, problems, started, started))


def test_student_on_vllm_and_a_teacher_behind_an_openai_compatible_endpoint(
    vllm_launch: LaunchSettings, start_vllm: StartServer, models: TinyModels, problems: Path, tmp_path: Path
) -> None:
    with start_vllm(models.teacher, takes_weights=False) as teacher:
        student = {"kind": "vllm", "launch": vllm_launch.model_dump()}
        check(train(tmp_path, models, problems, student, {"kind": "openai", "url": teacher.url}))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_student_teaches_itself_behind_the_solution(
    kind: str, request: pytest.FixtureRequest, models: TinyModels, tmp_path: Path
) -> None:
    solved = [
        {"problem": f"{i} + {i} =", "answer": str(2 * i), "solution": f"{i} + {i} equals {2 * i}"} for i in range(24)
    ]
    (tmp_path / "solved.jsonl").write_text("".join(json.dumps(row) + "\n" for row in solved))
    served = {"kind": kind, "launch": request.getfixturevalue(f"{kind}_launch").model_dump()}
    config = write_config(tmp_path, models, tmp_path / "solved.jsonl", served, served)
    own = "prompt.teacher={text: '{problem} {instruction} {solution}', max_tokens: 256}"
    policy = "policy={kind: distill, pull: 1.0, divergence: jsd, top_k: 8}"
    run("train", str(config), f"teacher.model={models.student}", policy, "evaluation=null", own)
    for row in read_lines(tmp_path / "run" / "metrics.jsonl"):
        assert 0 < row["train/teacher_mass"] < 1  # the rest is compared as a tail
        assert 0 < row["train/student_mass"] < 1
    tokenizer = Vocabulary.load(models.student).tokenizer
    for sample in read_lines(tmp_path / "run" / "samples.jsonl")[:BATCH]:  # of the weights that teach
        response, read = np.array(sample["response_ids"]), sample["teacher_prompt"]
        solution = next(row["solution"] for row in solved if row["problem"] == sample["problem"])
        assert read.endswith(f" {solution}<|im_end|>\n<|im_start|>assistant\n")
        for text, given in ((read, "teacher_logprobs"), (read.replace(f" {solution}", ""), "behavior_logprobs")):
            prompt = np.array(tokenizer(text, add_special_tokens=False).input_ids)
            expected = dense_logprobs(models.student, prompt, response)[np.arange(len(response)), response]
            np.testing.assert_allclose(sample[given], expected, atol=PARITY_NATS)


@pytest.mark.nightly
def test_student_on_the_local_engine_and_a_teacher_on_sglang(
    sglang_launch: LaunchSettings, models: TinyModels, problems: Path, tmp_path: Path
) -> None:
    started = {"kind": "sglang", "launch": sglang_launch.model_dump()}
    check(train(tmp_path, models, problems, {"kind": "local"}, started))


@pytest.mark.nightly
@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_fifty_versions_of_an_adapter(
    kind: str, max_staleness: int, request: Any, models: TinyModels, problems: Path, tmp_path: Path
) -> None:
    launch: LaunchSettings = request.getfixturevalue(f"{kind}_launch")
    flags = ["--lora-backend", "torch_native"] if kind == "sglang" else []
    launch = launch.model_copy(update={"arguments": [*launch.arguments, *flags]})
    student = {"kind": kind, "launch": launch.model_dump(), "weights": {"transport": "adapter"}}
    config = write_config(tmp_path, models, problems, student, {"kind": "local"})
    lora = ("training.lora.rank=8", "training.lora.targets=all", "training.learning_rate=0.002")
    length = (
        "training.iterations=50",
        "sampling.max_response_tokens=16",
        "evaluation=null",
        "training.keep_weights=60",
    )
    run("train", str(config), f"max_staleness={max_staleness}", *length, *lora)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 50
    check(rows, may_be_stale=max_staleness > 0)
    samples = read_lines(tmp_path / "run" / "samples.jsonl")
    behind = [number // BATCH - int(sample["version"].partition(".")[2]) for number, sample in enumerate(samples)]
    assert set(behind) <= set(range(max_staleness + 1))
    assert largest_difference_nats(tmp_path / "run", samples) < 2e-5
    assert largest_difference_nats(tmp_path / "run", samples, behind=1) > 0.1
    said = [json.loads(line)["event"] for line in (tmp_path / "run" / "logs" / "run.jsonl").read_text().splitlines()]
    assert "an adapter stays loaded" not in said


def test_a_slope_with_a_student_on_vllm_that_shows_only_the_top_of_its_distributions(
    vllm_launch: LaunchSettings, models: TinyModels, problems: Path, tmp_path: Path
) -> None:
    started = {"kind": "vllm", "launch": vllm_launch.model_dump()}
    config = write_config(tmp_path, models, problems, started, {"kind": "local"})
    found = json.loads(run("check", str(config), "--slope", "6", "--json"))["slope"]
    assert (found["problems"], found["rollouts_per_problem"], found["probes_per_rollout"]) == (6, 4, 16)
    assert {"teacher/opd_gain", "reward_variance", "tilt", "tilt_standard_error"} <= found["figures"].keys()
    assert not any("left out" in line for line in found["notes"])
