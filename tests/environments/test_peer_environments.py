"""Environments of other programs: the same class of tools in TRL's trainer and in a run, and a gym of SkyRL's.

`make test-peers` runs these, and prints what the class notes first here and there. SPOT_PEERS_PYTHON is the interpreter
of an environment with trl, all that it needs, and skyrl-gym.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import played_worlds
import pytest
from deadlines import soon
from transformers import AutoTokenizer

import spot_async
from spot_async.models.bridges import Bridges
from spot_async.models.episodes import Call, Observation, Step
from spot_async.models.vocabulary import Vocabulary
from spot_async.types import Problem

PYTHON = os.environ.get("SPOT_PEERS_PYTHON", "")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON, reason="SPOT_PEERS_PYTHON names no interpreter with the peers"),
]
LOGGER = logging.getLogger(__name__)
SUPPORT = Path(played_worlds.__file__).parent
EXAMPLES = SUPPORT.parents[1] / "examples"
MODEL = EXAMPLES / "calculator" / "teacher"
ROWS = [
    {**row, "problem": re.split("[+-]", row["problem"])[0]}  # `reset` says the rest
    for row in map(json.loads, (EXAMPLES / "calculator/data/train.jsonl").read_text().splitlines()[:8])
    if row["tier"] == "two"
][:4]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{SUPPORT}:{EXAMPLES / 'calculator'}")


@pytest.fixture
def train(tmp_path: Path, servers_on_threads: None, trainer_on_thread: None) -> Any:
    """Runs an iteration of a model as its own teacher; returns its samples and metrics."""

    async def run(model: Path, problems: Path, tokens: int, **environment: Any) -> tuple[list[Any], dict[str, float]]:
        await spot_async.run_async(
            {
                "student": {"model": str(model)},
                "teacher": {"model": str(model)},
                "data": {"train": str(problems)},
                "environment": {"judge": "environment", **environment},
                "prompt": {"instruction": ""},
                "sampling": {"max_prompt_tokens": 64, "max_response_tokens": tokens},
                "policy": {"kind": "opd"},
                "training": {"iterations": 1, "batch_size": 4, "mini_batch_size": 4},
                "run": {"directory": str(tmp_path / "run")},
            }
        )
        samples = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
        return [json.loads(line) for line in samples], json.loads((tmp_path / "run" / "metrics.jsonl").read_text())

    return run


@pytest.fixture(scope="module")
def of_trl(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `trl_run.py` finds on `ROWS`, and the lines that the class notes."""
    directory = tmp_path_factory.mktemp("trl")
    given, found, log = (directory / name for name in ("given.json", "found.json", "log.jsonl"))
    given.write_text(json.dumps({"model": str(MODEL), "rows": ROWS, "log": str(log)}))
    paths = {"PYTHONPATH": str(EXAMPLES / "calculator"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([PYTHON, SUPPORT / "trl_run.py", given, found], env=os.environ | paths, check=True)
    return {**json.loads(found.read_text()), "noted": log.read_text().splitlines()}


async def test_a_class_of_tools_plays_in_a_run_as_it_does_in_trls_trainer(
    of_trl: dict[str, Any], tmp_path: Path, train: Any
) -> None:
    """It gets the same rows. The model is so sure of itself that most episodes are the same, token for token."""
    log, rows = tmp_path / "log.jsonl", tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    keys = {"object": "noted_sums:Sums", "arguments": {"log": str(log)}, "sandbox": "none"}
    samples, metrics = await train(MODEL, rows, 96, **keys)
    for where, lines in ("TRL", of_trl["noted"]), ("here", log.read_text().splitlines()):
        noted = [json.loads(line) for line in lines]
        asked = [each for each in noted if isinstance(each, str)]
        LOGGER.info("%s: %s, %s", where, noted[0], asked[:2])
        assert sorted({str(each) for each in noted if each not in asked}) == sorted(map(str, ROWS))
        assert asked
    theirs = [(each["id"], each["ids"], each["reward"]) for each in of_trl["episodes"]]
    ours = [(each["problem_id"], each["response_ids"], each["metrics"]["environment/reward"]) for each in samples]
    assert sum(each in theirs for each in ours) > len(ours) / 2
    assert metrics["environment/turns"] > 2


async def test_an_episode_of_trls_is_answered_here_as_it_was_and_reads_the_same_tokens(
    of_trl: dict[str, Any], tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    bridges = Bridges(Vocabulary(tokenizer, (tokenizer.eos_token_id,)), {}, of_trl["tools"])
    settings = {"object": "noted_sums:Sums", "arguments": {"log": str(tmp_path / "log")}, "sandbox": "none"}
    rows = {row["id"]: Problem(**{"text" if key == "problem" else key: row[key] for key in row}) for row in ROWS}
    async with played_worlds.opened(**settings) as environment:
        assert environment.tools() == of_trl["tools"]
        for episode in of_trl["episodes"]:
            problem, ids, said = rows[episode["id"]], episode["ids"], episode["said"]
            steps: list[Step] = []
            for turn, seen in zip(said[:-1:2], said[1::2], strict=True):
                calls = [Call(**each["function"]) for each in turn["tool_calls"]]
                answered = await played_worlds.play(environment, steps, *calls, problem=problem)
                assert answered == Observation(texts=(seen["content"],))
                bridge = bridges.between([seen["content"]]).tolist()
                ids = ids[ids.index(bridges.turn_end) + 1 :]
                assert ids[: len(bridge)] == bridge
            assert len(steps) > 0
            assert await environment.reward(problem, steps, seed=1, deadline=soon()) == episode["reward"]


async def test_an_environment_of_skyrls_gym_is_played_as_it_is_by_its_own_interpreter(train: Any) -> None:
    """Its `step` returns a mapping, with messages."""
    settings = {"object": "skyrl_sums:GradeSchool", "python": PYTHON}
    problem = Problem(id="p", text="2+2", answer="4")
    async with played_worlds.opened(**settings) as environment:
        steps: list[Step] = []
        for text, part, reward in (
            ("Let me see.", "Please provide your step-by-step reasoning.*", 0.0),
            ("So #### 5", "Now provide only the final numeric answer.*", 0.2 / 3),
            ("#### 4", "", 1.0),
        ):
            seen = await played_worlds.play(environment, steps, text=text, problem=problem)
            assert re.fullmatch(part, seen.texts[0])
            assert (seen.kind, seen.is_done, seen.reward) == ("answer", reward == 1.0, pytest.approx(reward))
    problems = EXAMPLES / "running_sum/data/heldout.jsonl"
    _, metrics = await train(EXAMPLES / "running_sum/student", problems, 400, **settings)
    assert (metrics["environment/calls"], metrics["environment/errors"]) == (1.0, 0.0)
