"""`inspect` and `report` as typed: options that cannot be meant, and directories that are something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spot_async.cli import app
from spot_async.run_directory.layout import RUN_FORMAT

SAMPLE = {"iteration": 2, "problem_id": "p0", "problem": "1+1", "answer": "2", "verdict": "wrong", "response": "three"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two iterations whose policy recorded a text but no tokens."""
    (tmp_path / "run.json").write_text('{"format": 1, "command": "train"}')
    (tmp_path / "config.yaml").write_text("policy: {kind: mine}\n")
    rows = [{**SAMPLE, "iteration": 1}, SAMPLE]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--verdict", "foo"], "one of correct, wrong, no_answer, timeout, error"),
        (["--iteration", "9"], "the run has 1 to 2"),
        (["--iteration", "0"], "the run has 1 to 2"),
        (["p0", "--verdict", "wrong"], "leave them out to see one sample"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_in_one_line(run: Path, arguments: list[str], said: str) -> None:
    outcome = CliRunner().invoke(app, ["inspect", str(run), *arguments])
    assert outcome.exit_code == 2
    assert said in outcome.output
    assert outcome.output.count("\n") == 1


def test_a_policy_that_records_no_tokens_still_shows_its_response(run: Path) -> None:
    shown = CliRunner().invoke(app, ["inspect", str(run), "1"]).output
    assert "three" in shown
    assert "no tokens recorded" in shown
    assert "three" in (run / "inspect-1.html").read_text()


def test_one_of_a_thing_is_not_spoken_of_in_the_plural(run: Path) -> None:
    listed = CliRunner().invoke(app, ["inspect", str(run), "--iteration", "1"]).output
    assert "retained" not in listed  # whose policy has no positions
    assert listed.startswith("1 sample of iteration 1; the run has 2 iterations")


@pytest.mark.parametrize("command", [["inspect"], ["report"]])
def test_the_directory_of_an_evaluation_is_named_as_such(tmp_path: Path, command: list[str]) -> None:
    """Also of one that still runs or was stopped."""
    (tmp_path / "run.json").write_text('{"format": 1, "command": "eval"}')
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "evaluation.jsonl.partial").write_text("{}\n")
    outcome = CliRunner().invoke(app, [*command, str(tmp_path)])
    assert outcome.exit_code == 2
    assert "is an evaluation's: once it is complete, its figures are in summary.json" in outcome.output


@pytest.mark.parametrize(
    ("every", "arguments", "said"),
    [
        (0, [], "no samples: the run writes none (run.samples_every is 0)"),
        (0, ["p0"], "no samples: the run writes none (run.samples_every is 0)"),
        (1, [], "no samples: they are written as each iteration ends"),
        (3, [], "1 iteration with samples: they are written every 3 iterations (run.samples_every)"),
        (3, ["--iteration", "7"], "--iteration 7: it has no samples: they are written every 3 iterations"),
        (3, ["--iteration", "8"], "the run has 1 to 7"),
        (3, [], "1 sample of iteration 3; the run has 7 iterations"),
    ],
)
def test_a_run_that_writes_few_samples_is_described_as_it_is(
    tmp_path: Path, every: int, arguments: list[str], said: str
) -> None:
    (tmp_path / "run.json").write_text('{"format": 1, "command": "train"}')
    (tmp_path / "config.yaml").write_text(f"run: {{samples_every: {every}}}\n")
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"iteration": {i}}}\n' for i in range(1, 8)))
    if every == 3:
        (tmp_path / "samples.jsonl").write_text(json.dumps({**SAMPLE, "iteration": 3}) + "\n")
    assert said in CliRunner().invoke(app, ["inspect", str(tmp_path), *arguments]).output
    page = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert page.exit_code == 0, page.output
    expected = {0: "There are no samples: the run writes none", 3: "Only 1 of the 7 iterations have samples"}
    assert expected.get(every, "There are no samples") in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("command", [["inspect"], ["inspect", "0"], ["report"], ["compare"]])
def test_a_run_of_a_newer_format_is_refused_in_one_line(run: Path, command: list[str]) -> None:
    (run / "run.json").write_text('{"format": 99}')
    (run / "evaluation-after.json").write_text("{}")
    outcome = CliRunner().invoke(app, [command[0], str(run), *command[1:]])
    assert outcome.exit_code == 2
    assert outcome.output.count("\n") == 1
    assert f"{run} has format 99, newer than this spot-async can read ({RUN_FORMAT})" in outcome.output
