"""The same evaluation by every backend, and one that is killed with SIGKILL at random moments and continued."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import StartServer
from parity import Dense
from wider_heads import with_wider_heads

from spot_async.config import Config
from spot_async.config.loading import load_config
from spot_async.evaluation.benchmarks import plan_benchmarks
from spot_async.evaluation.results import EvaluationResult
from spot_async.evaluation.runner import ResponseSampler, evaluate
from spot_async.models.files import read_model
from spot_async.run_directory.layout import RunDirectory
from spot_async.running.services import open_services
from spot_async.types import Generation, IntArray, SamplingSettings, Verdict
from spot_async.verification import BoxedMatch

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
EXAMPLE = ROOT / "examples" / "running_sum"
NEAR_TIE_NATS = 1e-4  # between the two likeliest tokens: rounding may decide there
PROBLEMS = 60


@dataclass
class Recorder:
    """A generator that remembers what it was asked and what it answered."""

    generator: Any
    found: dict[bytes, IntArray] = field(default_factory=dict)  # token ids by prompt

    async def generate(self, prompt_ids: IntArray, sampling: SamplingSettings, **rest: Any) -> Generation:
        assert sampling.temperature == 0 or dict(sampling.further)["top_k"] == 1
        generation: Generation = await self.generator.generate(prompt_ids, sampling, **rest)
        self.found[prompt_ids.astype(np.int32).tobytes()] = generation.token_ids
        return generation


def greedy_config(folder: Path, backend: Any, model: Path, keys: Sequence[str]) -> Config:
    folder.mkdir()
    rows = (EXAMPLE / "data" / "heldout.jsonl").read_text().splitlines()
    (folder / "few.jsonl").write_text("\n".join(rows[:: len(rows) // PROBLEMS][:PROBLEMS]) + "\n")
    return load_config(
        QUICKSTART,
        [
            f"student={json.dumps({'model': str(model), 'backend': backend})}",
            f"evaluation.problems={folder / 'few.jsonl'}",
            *("evaluation.temperature=0", "evaluation.samples=1", "evaluation.concurrency=16"),
            *keys,
        ],
    )


async def evaluated(
    folder: Path, backend: Any, model: Path = EXAMPLE / "student", *keys: str
) -> tuple[EvaluationResult, Recorder]:
    config = greedy_config(folder, backend, model, keys)
    student = read_model("student", config.student.model)
    directory = RunDirectory.create(folder / "run", config)
    assert config.evaluation is not None
    async with open_services({"student": config.student}, directory.path, is_used=False, directly=True) as services:
        recorder = Recorder(services.backends["student"])
        result = await evaluate(
            ResponseSampler(
                plan_benchmarks(config, student),
                config.evaluation,
                generator=recorder,
                verifiers={"problems": BoxedMatch(BoxedMatch.Settings())},
                vocabulary=student.vocabulary,
            )
        )
    return result, recorder


def near_ties(one: Recorder, other: Recorder, dense: Dense) -> list[str]:
    """Where the two differ first, for each problem; fails where the model itself was not undecided there."""
    found = []
    for prompt, ours in one.found.items():
        theirs, prompt_ids = other.found[prompt], np.frombuffer(prompt, np.int32)
        shared = min(len(ours), len(theirs))
        differ = np.flatnonzero(ours[:shared] != theirs[:shared])
        assert differ.size or len(ours) == len(theirs), "the shorter one ended without an end token"
        if differ.size:
            at = int(differ[0])
            second, first = np.sort(dense(EXAMPLE / "student", [*prompt_ids, *ours[:at]])[-1])[-2:]
            line = f"token {at}: {ours[at]} or {theirs[at]}, margin {first - second:.2e} nats"
            assert first - second < NEAR_TIE_NATS, line
            found.append(line)
    return found


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_greedy_evaluation_gives_the_verdicts_of_our_own_engine(
    kind: str, request: pytest.FixtureRequest, dense_logprobs: Dense, tmp_path: Path
) -> None:
    ours, recorded = await evaluated(tmp_path / "local", {"kind": "local"})
    start: StartServer = request.getfixturevalue(f"start_{kind}")
    longest = {"vllm": "--max-model-len", "sglang": "--context-length"}[kind]
    model = with_wider_heads(EXAMPLE / "student", tmp_path / "model") if kind == "vllm" else EXAMPLE / "student"
    with start(model, longest, "512") as server:
        theirs, others = await evaluated(tmp_path / kind, {"kind": kind, "url": server.url}, model)
        one_of_one = ["evaluation.temperature=1", "evaluation.top_k=1", "evaluation.presence_penalty=0.0"]
        _, sampled = await evaluated(tmp_path / "top-1", {"kind": kind, "url": server.url}, model, *one_of_one)
    near_ties(others, sampled, dense_logprobs)
    assert len(recorded.found) == PROBLEMS
    assert 0 < sum(each.verdict is Verdict.CORRECT for each in ours.responses) < PROBLEMS
    listed = near_ties(recorded, others, dense_logprobs)
    if listed:
        warnings.warn("\n".join([f"{kind} and local differ at near ties:", *listed]), stacklevel=1)
    different = sum(a.verdict is not b.verdict for a, b in zip(ours.responses, theirs.responses, strict=True))
    assert different <= len(listed)


def eval_command(run: Path, problems: Path, *options: str) -> list[str]:
    overrides = ["evaluation.samples=4", "evaluation.concurrency=2", f"evaluation.problems={problems}"]
    overrides += ["evaluation.limit=20", "evaluation.stop=[' so ', two]", "evaluation.pass_k=[2]"]
    overrides += ["evaluation.thinking=null", "evaluation.thinking_tokens=9"]
    overrides += ["evaluation.system=add", "evaluation.template=plain"]
    command = [sys.executable, "-m", "spot_async", "eval", str(QUICKSTART), *overrides]
    return [*command, *(options or (f"run.directory={run}",))]


def evaluate_until(run: Path, problems: Path, kept: int, options: Sequence[str]) -> None:
    """Killed as soon as so many responses are kept. It is nice, so that whoever kills it comes first on a busy machine:
    a response takes it 15 ms."""
    command = ["nice", "-n", "19", *eval_command(run, problems, *options)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    partial = run / "evaluation.jsonl.partial"
    while not (partial.exists() and partial.read_bytes().count(b"\n") > kept):
        assert process.poll() is None, f"it ended before it was seen to have kept {kept} responses"
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL, f"it ended by itself when it had kept {kept} responses"


@pytest.mark.nightly
def test_killed_at_random_moments_and_continued_it_writes_the_same_file(tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_text("\n".join((EXAMPLE / "data" / "heldout.jsonl").read_text().splitlines()[:20]) + "\n")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert subprocess.run(eval_command(whole, problems), cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0
    options: tuple[str, ...] = (f"run.directory={parts}",)
    for kept in sorted(random.Random().choices(range(40), k=3)):  # of 80
        evaluate_until(parts, problems, kept, options)
        options = ("--resume", str(parts))
    assert not (parts / "evaluation.json").exists()
    with (parts / "evaluation.jsonl.partial").open("ab") as file:
        file.write(b'{"benchmark":"pro')
    ended = subprocess.run(eval_command(parts, problems, *options), cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert (parts / "evaluation.jsonl").read_bytes() == (whole / "evaluation.jsonl").read_bytes()
    ours, theirs = (json.loads((each / "evaluation.json").read_text()) for each in (parts, whole))
    assert all(each.pop("date") and each.pop("seconds") for each in (ours, theirs))
    assert list(ours.items()) == list(theirs.items())
    assert not (parts / "evaluation.jsonl.partial").exists()
