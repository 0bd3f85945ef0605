"""A policy that observes knows after a kill what it knew when the weights were saved, and is told the rest again.

The policy here decides by what it was told, and kills its own run, or the trainer, between a report and the checkpoint.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kill_drill import ROOT, SHORT, command, weights
from problem_files import FEW
from small_runs import rows

import spot_async
from spot_async.run_directory.manifest import committed
from spot_async.running.checkpoints import POLICY_FILE
from spot_async.running.resuming import open_run

POLICY = """
import json, os, pathlib, signal
import numpy as np
import kill_drill
import spot_async as spot


def strike(moment):
    if os.environ.get("STRIKE") != moment or (done := pathlib.Path(os.environ["TOLD"] + ".struck")).exists():
        return
    done.touch()
    killed = os.getpid()
    if moment == "trainer":
        killed = next(pid for pid, line in kill_drill.descendants(killed) if "spot_async.trainer " in line)
    os.kill(killed, signal.SIGKILL)


class Switches:
    Settings = spot.PluginSettings

    def __init__(self, settings, context):
        self.seen, self.batch_size = [], context.training.batch_size
        self.needs = spot.PolicyNeeds(teacher_top_k=1, asked_top_k=0)

    async def supervise(self, prompt, stages):
        rollout = await stages.rollout()
        scores = await stages.score(rollout.token_ids, top_k=0)
        pulls = (spot.pull(scores, 1 + prompt.progress),)
        terms = {"advantages": np.full_like(scores.logprobs, 0.1), "pulls": pulls}
        return [spot.student_sample(prompt, stages, rollout, await stages.verify(rollout.token_ids), scores, **terms)]

    def revise(self, batch):
        assert len(self.seen) == batch.iteration, "there are as many reports as iterations before"
        if batch.iteration == 3:
            strike("look")
        is_odd = sum(self.seen) % 2
        dropped = {"pulls": ()} if is_odd else {"advantages": None}
        revised = [spot.revised(each, {"switches/is_odd": float(is_odd)}, **dropped) for each in batch.samples]
        if batch.iteration == 3:
            strike("revise")
        return revised

    def observe(self, report):
        self.seen.append(round(self.batch_size * report.metrics["rollout/accuracy"]))
        with open(os.environ["TOLD"], "a") as told:
            print(json.dumps([report.iteration, report.metrics, report.evaluation]), file=told)
        if report.iteration == 3:
            strike("observe")
            strike("trainer")

    def state_dict(self):
        if len(self.seen) == 4:
            strike("state_dict")
        return {"seen": [*self.seen]}

    def load_state_dict(self, state):
        self.seen = state["seen"]
"""
KEYS = (
    FEW,
    *SHORT,
    "policy={kind: 'switches:Switches'}",
    "run.rehearsal=false",  # it writes down what it is told
    "training.iterations=6",
    "training.checkpoint_every=2",
    "evaluation.eval_every=1",
    "evaluation.samples=1",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the policy lies, and a few problems to evaluate with."""
    directory = tmp_path_factory.mktemp("policy")
    (directory / "switches.py").write_text(POLICY)
    lines = (ROOT / "examples/running_sum/data/heldout.jsonl").read_text().splitlines(keepends=True)
    (directory / "few.jsonl").write_text("".join(lines[:6]))
    return directory


@pytest.fixture(scope="module")
def whole(place: Path, servers_on_threads: None, trainer_on_thread: None) -> Path:
    """A run that nobody kills."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.syspath_prepend(str(place))
        patch.setenv("TOLD", str(place / "whole.told"))
        keys = [f"run.directory={place}/whole", f"evaluation.problems={place}/few.jsonl", *KEYS]
        spot_async.run("configs/quickstart.yaml", keys)
    metrics = rows(place / "whole" / "metrics.jsonl")
    assert {row["switches/is_odd"] for row in metrics} == {0.0, 1.0}, "what it was told decides something"
    return place / "whole"


def told(path: Path) -> list[tuple[int, str]]:
    return [(json.loads(line)[0], line) for line in path.read_text().splitlines()]


def state(run: Path) -> Any:
    return json.loads((committed(run)[0] / POLICY_FILE).read_text())


@pytest.mark.long
@pytest.mark.parametrize("moment", ["look", "revise", "observe", "state_dict", "trainer"])
def test_a_run_killed_between_a_look_and_its_checkpoint_ends_with_the_same_weights_and_state(
    place: Path, whole: Path, tmp_path: Path, moment: str
) -> None:
    run = tmp_path / "run"
    keys = [f"run.directory={run}", f"evaluation.problems={place}/few.jsonl", *KEYS]
    paths = os.pathsep.join(map(str, [place, ROOT / "tests" / "support", ROOT]))
    given = {**os.environ, "PYTHONPATH": paths, "TOLD": f"{tmp_path}/told", "STRIKE": moment}
    start: Callable[..., Any] = lambda *words: subprocess.run(  # noqa: E731
        command("train", *words), cwd=ROOT, env=given, capture_output=True, text=True
    )
    first = start("configs/quickstart.yaml", *keys)
    if moment == "trainer":  # the run goes on by itself, with the policy that was told already
        assert first.returncode == 0, first.stdout + first.stderr
    else:
        assert first.returncode == -9, first.stdout + first.stderr
        again = start("--resume", str(run))
        assert again.returncode == 0, again.stdout + again.stderr
    assert state(run) == state(whole)
    assert len(state(run)["seen"]) == 6
    assert weights(run) == weights(whole)
    reports, undisturbed = told(tmp_path / "told"), dict(told(place / "whole.told"))
    before = [0, 1, 2] if moment in ("look", "revise") else [0, 1, 2, 3]
    assert [iteration for iteration, _ in reports] == [*before, 2, 3, 4, 5]
    assert all(line == undisturbed[iteration] for iteration, line in reports)
    figures = [json.loads(line)[2] for _, line in reports]
    assert [bool(each) for each in figures] == [iteration > 0 for iteration, _ in reports]
    assert len({json.dumps(each) for each in figures}) > 2


@pytest.mark.long
def test_a_run_that_goes_on_further_says_that_the_policys_progress_bends(whole: Path, place: Path) -> None:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.syspath_prepend(str(place))
        open_run(whole, ["training.iterations=8"], said.append, weights=())
    assert any(line.endswith("; progress after iteration 6: 0.75 in place of 1") for line in said), said
