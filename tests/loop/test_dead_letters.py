"""What a prompt that is given up leaves: in the error, in the file, and for people."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from typer.testing import CliRunner

from spot_async.cli import app
from spot_async.errors import Exchange, PoisonedReplyError, TransientError
from spot_async.loop.admission import PromptState
from spot_async.loop.events import PromptEnded
from spot_async.run_directory.layout import RunDirectory
from spot_async.stages.stage import StageCounters
from spot_async.telemetry.run_log import RunLog
from spot_async.types import Problem, Prompt


def prompt(ordinal: int) -> Prompt:
    problem = Problem(id=f"p{ordinal}", text="1+1", answer="2")
    return Prompt(ordinal=ordinal, problem=problem, token_ids=np.arange(3, dtype=np.int32))


def test_a_prompt_given_up_leaves_its_request_its_reply_and_the_reason(tmp_path: Path) -> None:
    stages = cast(
        Any, SimpleNamespace(all=(SimpleNamespace(name="score", counters=StageCounters()),), tokens_generated=0)
    )
    log = RunLog(RunDirectory(tmp_path), stages)
    error = PoisonedReplyError("teacher/x: logprobs hold NaN")
    error.stage, error.attempts = "score", 2
    sent = {"input_ids": [1, 2, "... 900 in all"], "sampling_params": {"temperature": 1.0}}
    error.exchange = Exchange("http://h:1", "POST", "/x", 4711, sent, 200, '{"logprobs": [NaN')
    for ordinal, failure in ((5, error), (6, TransientError("never got that far"))):
        log.on(PromptEnded(prompt(ordinal), PromptState.DEAD, 0.0, 1.0, failure))
    first, second = [json.loads(line) for line in (tmp_path / "dead_letters.jsonl").read_text().splitlines()]
    assert first == {
        "ordinal": 5,
        "problem_id": "p5",
        "stage": "score",
        "failure": "poisoned",
        "error": "PoisonedReplyError",
        "reason": "teacher/x: logprobs hold NaN",
        "attempts": 2,
        "endpoint": "http://h:1",
        "request": {"method": "POST", "path": "/x", "bytes": 4711, "body": sent},
        "reply": {"status": 200, "head": '{"logprobs": [NaN'},
    }
    assert (second["failure"], second["request"], second["reply"]) == ("transient", None, None)

    (tmp_path / "run.json").write_text('{"format": 1, "command": "train"}')
    (tmp_path / "config.yaml").write_text("policy: {kind: opd}\n")
    sample = {"iteration": 1, "problem_id": "p0", "verdict": "wrong"}
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    listed = CliRunner().invoke(app, ["inspect", str(tmp_path)]).output
    said = "2 prompts given up (1 over poisoned failures at score, 1 over transient): dead_letters.jsonl"
    assert said in " ".join(listed.split())
    assert CliRunner().invoke(app, ["report", str(tmp_path)]).exit_code == 0
    assert "2 prompts given up (1 over poisoned failures at score" in (tmp_path / "report.html").read_text()
