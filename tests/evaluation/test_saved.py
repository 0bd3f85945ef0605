"""Evaluations without sections of training, without a configuration file, and of saved responses."""

from __future__ import annotations

import json
import runpy
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
import yaml
from huggingface_hub.repocard_data import model_index_to_eval_results
from typer.testing import CliRunner

from spot_async.checks.plan import plan_evaluation
from spot_async.cli import app
from spot_async.config.loading import evaluation_from
from spot_async.evaluation.response_log import JudgedResponse, ResponseLog, identity_of
from spot_async.evaluation.runner import collected
from spot_async.models.files import read_model
from spot_async.run_directory.layout import RunDirectory
from spot_async.running.measuring import Occasion, write_files
from spot_async.types import Verdict

ROOT = Path(__file__).parents[2]
STUDENT = "examples/running_sum/student"
PROBLEMS = [
    {"id": "half", "problem": "a1+0b", "answer": "0.5", "tier": "easy"},
    {"id": "two", "problem": "a2+0b", "answer": "2", "tier": "hard"},
]
RESPONSES = {"half": (r"\boxed{\frac12}", "no box"), "two": (r"\boxed{2}", r"\boxed{3}")}


@pytest.fixture
def command(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "300")

    def run(*words):
        return CliRunner().invoke(app, ["eval", *map(str, words)])

    return run


@pytest.fixture
def evaluated(command, tmp_path):
    """A complete evaluation by `math_verify`, as its files."""
    problems = tmp_path / "sums.jsonl"
    problems.write_text("".join(json.dumps(each) + "\n" for each in PROBLEMS))
    config = evaluation_from(
        {
            "student": {"model": STUDENT},
            "evaluation": {
                "benchmarks": {"sums": str(problems)}, "samples": 2, "max_response_tokens": 9,
                "verifier": "math_verify",
            },
        },
        ["prompt.instruction="],
    )  # fmt: skip
    student = read_model("student", STUDENT)
    planned = plan_evaluation(config, student)
    verdicts = iter([Verdict.CORRECT, Verdict.NO_ANSWER, Verdict.CORRECT, Verdict.WRONG])
    judged = [
        JudgedResponse(
            benchmark="sums", problem_id=source.problem.id, sample=i, verdict=next(verdicts), tokens=4,
            finish_reason="stop", response=text, problem=source.problem.text, gold=source.problem.answer,
            tier=source.problem.tier, extracted=text[7:-1] if "{" in text else None, seed=i,
        )
        for source in planned[0].sources
        for i, text in enumerate(RESPONSES[source.problem.id])
    ]  # fmt: skip
    directory = RunDirectory.create(tmp_path / "run", config, "eval")
    log = ResponseLog(directory, "evaluation.jsonl", identity_of(config, planned, student.directory))
    result = collected(planned, {each.key: each for each in judged}, ())
    write_files(Occasion(directory, student.directory), result, log, planned, seconds=2.5)
    problems.unlink()
    return directory.path


def test_saved_responses_are_judged_by_another_verifier_without_model_or_problem_files(command, evaluated, tmp_path):
    done = command("--judge", evaluated, "--verifier", "boxed_match", f"run.directory={tmp_path / 'again'}")
    assert done.exit_code == 0, done.output
    before, after = (
        msgspec.json.decode((each / "evaluation.json").read_bytes()) for each in (evaluated, tmp_path / "again")
    )
    counts = [each["benchmarks"]["sums"]["correct"] for each in (before, after)]
    assert counts == [{"half": 1, "two": 1}, {"half": 0, "two": 1}]  # 1/2 is 0.5 by Math-Verify alone
    assert after["settings"]["evaluation.benchmarks.sums.verifier"] == {"kind": "boxed_match"}
    assert after["model_fingerprint"] == before["model_fingerprint"]
    rows = [json.loads(line) for line in (tmp_path / "again" / "evaluation.jsonl").read_text().splitlines()]
    assert [row["verdict"] for row in rows] == ["wrong", "no_answer", "correct", "wrong"]
    assert rows[0]["template"].startswith("{%- for message")
    assert [row["template"] for row in rows[1:]] == [None] * 3


def test_judged_again_by_the_same_verifier_all_files_are_the_same_bytes(command, evaluated, tmp_path):
    keys = [f"run.directory={tmp_path / 'again'}", "evaluation.verifier.timeout_s=30"]
    again = command("--judge", evaluated, *keys)
    assert again.exit_code == 0
    assert "Pass@1" not in again.output
    assert pass_at(tmp_path / "again") == pass_at(evaluated) == ["2"]
    assert (tmp_path / "again" / "evaluation.jsonl").read_bytes() == (evaluated / "evaluation.jsonl").read_bytes()


def test_judged_again_it_has_the_pass_at_k_that_are_asked_for_now(command, evaluated, tmp_path):
    keys = ["evaluation.pass_k=[1]", f"run.directory={tmp_path / 'again'}"]
    again = command("--judge", evaluated, "--verifier", "boxed_match", *keys)
    assert pass_at(tmp_path / "again") == ["1", "2"], again.output


def pass_at(run):
    return [*json.loads((run / "evaluation.json").read_text())["benchmarks"]["sums"]["pass_at"]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--judge", "{run}", "--resume", "{run}"], "--judge RUN takes RUN's configuration"),
        (["--judge", "{run}", "evaluation.samples=3"], "evaluation.jsonl: lacks responses, or their problems"),
        (["--model", STUDENT], "give a CONFIG, or in its place both --model PATH and --benchmark FILE"),
        (["configs/quickstart.yaml", "--model", STUDENT], "give a CONFIG, or in its place both"),
        (["--model", STUDENT, "--benchmark", "a/x.json", "--benchmark", "b/x.csv"], "two sets have the same name"),
    ],
)  # fmt: skip
def test_what_cannot_be_judged_or_evaluated_is_one_line(command, evaluated, words, message):
    done = command(*(word.format(run=evaluated) for word in words))
    (line,) = done.stderr.splitlines()
    assert (done.exit_code, message in line) == (2, True), line


def test_responses_of_before_they_named_their_problems_are_refused(command, evaluated):
    file = evaluated / "evaluation.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row | {"problem": ""}) + "\n" for row in rows))
    assert "their problems, as older versions wrote it" in command("--judge", evaluated).stderr


def test_other_tools_files_have_the_same_figures(evaluated, tmp_path):
    example = runpy.run_path(str(ROOT / "examples" / "results_for_others.py"))
    example["main"]([str(evaluated), "-o", str(tmp_path)])
    figures = json.loads((evaluated / "evaluation.json").read_text())["benchmarks"]["sums"]
    task = json.loads((tmp_path / "results_lm_eval.json").read_text())["results"]["sums"]
    written = json.loads((evaluated / "evaluation.json").read_text())
    assert (written["dtype"], written["seconds"]) == ("float32", 2.5)
    assert abs(datetime.fromisoformat(written["date"]) - datetime.now(UTC)) < timedelta(hours=1)
    assert json.loads((tmp_path / "results_lm_eval.json").read_text())["total_evaluation_time_seconds"] == "2.5"
    assert [task["avg@2,none"], task["avg@2_stderr,none"]] == [*figures["avg"].values()]
    row = json.loads((tmp_path / "results_lighteval.json").read_text())["results"]["sums|0"]
    assert row["pass@k:k=2&n=2_stderr"] == figures["pass_at"]["2"]["standard_error"]
    assert json.loads((tmp_path / "results_lm_eval.json").read_text())["n-shot"] == {"sums": 0}
    written["benchmarks"]["sums"]["note"] = "only its first 3 problems; worked examples (2)"
    (tmp_path / "evaluation.json").write_text(json.dumps(written))
    example["main"]([str(tmp_path / "evaluation.json"), "-o", str(tmp_path / "shots")])
    assert json.loads((tmp_path / "shots" / "results_lm_eval.json").read_text())["n-shot"] == {"sums": 2}
    assert "sums|2" in json.loads((tmp_path / "shots" / "results_lighteval.json").read_text())["results"]
    index = yaml.safe_load((tmp_path / "model_index.yaml").read_text())["model-index"]
    _, found = model_index_to_eval_results(index)
    assert {each.metric_name: each.metric_value for each in found} == {"avg@2": 50.0, "pass@2": 100.0, "maj@2": 75.0}


def test_a_model_and_a_benchmark_are_enough(command, tmp_path):
    problems = "examples/running_sum/data/heldout.jsonl"
    words = ["--model", STUDENT, "--benchmark", f"sums={problems}", "--benchmark", problems]
    keys = ["evaluation.max_response_tokens=9", "evaluation.benchmarks.sums.samples=2"]
    shown = command(*words, "--dry-run", *keys)
    assert shown.exit_code == 0, shown.output
    assert "sums: 180 problems x 2 responses" in shown.output
    assert "heldout: 180 problems x 8 responses" in shown.output
    assert "into runs/student-eval/" in shown.output
    few = command(
        *words, "--dry-run", "evaluation.max_response_tokens=9", "evaluation.limit=3", "evaluation.temperature=0"
    )
    assert "heldout: 3 problems x 8 responses" in few.output
    same = "with evaluation.temperature=0 all 8 responses to a problem are the same: set samples to 1"
    assert f"evaluation.benchmarks.sums: {same}" in few.output
    told = command(
        *words, "--dry-run", "evaluation.max_response_tokens=9", "evaluation.system=3+4", "prompt.instruction="
    )
    assert "3+4<|user|>" in told.output
    config = tmp_path / "alone.yaml"
    config.write_text(f"student: {{model: {STUDENT}}}\nevaluation: {{problems: {problems}, max_response_tokens: 9}}\n")
    assert command(config, "--dry-run", "--brief").exit_code == 0
