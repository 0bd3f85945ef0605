"""A recipe whose responses two models wrote, or whose batches refill, continues after a kill, to the same bits."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from kill_drill import ROOT, command, kill_when, verified, weights
from problem_files import FEW, write
from recipes import RECIPES
from small_runs import HELD_OUT, rows
from typer.testing import CliRunner

import spot_async
from spot_async.cli import app

KEYS = (
    FEW,
    "training.iterations=6",
    "training.checkpoint_every=2",
    "training.batch_size=8",
    "training.mini_batch_size=4",
    "evaluation=null",
)


@pytest.mark.long
@pytest.mark.parametrize(("name", "own"), [("speculative_kd", []), ("dapo", ["policy.samples=4"])])
def test_real_processes_train_a_recipe_and_continue_to_the_same_bits_after_a_kill(
    name: str,
    own: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    servers_on_threads: None,
    trainer_on_thread: None,
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.setenv("PYTHONPATH", "examples/recipes")
    whole, run = tmp_path / "whole", tmp_path / "run"
    spot_async.run(RECIPES / f"{name}.yaml", [f"run.directory={whole}", *KEYS, *own])  # on threads, undisturbed
    begin = command("train", str(RECIPES / f"{name}.yaml"), f"run.directory={run}", *KEYS, *own)
    kill_when(Path.exists, run, begin)
    subprocess.run(command("train", "--resume", str(run)), check=True, cwd=ROOT, capture_output=True)

    verified(run)
    assert weights(run) == weights(whole)
    names = ("iteration", "problem_id", "response", "left_out")
    samples, _ = both = [rows(path / "samples.jsonl") for path in (run, whole)]
    assert len({str([[each.get(of) for of in names] for each in told]) for told in both}) == 1
    if name == "dapo":
        prompts = json.loads((run / "summary.json").read_text())["prompts"]
        assert (prompts["trained"], prompts["in_vain"] > 6) == (48, True)
    else:
        assert len(samples) == 48
        assert any(None in [version for *_, version in each.get("writers", [])] for each in samples)


def test_problems_that_nobody_solves_end_the_run_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers_on_threads: None, trainer_on_thread: None
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(RECIPES))
    unsolved = write(tmp_path, [row | {"answer": "99"} for row in rows(Path(HELD_OUT))])
    keys = [f"run.directory={tmp_path / 'run'}", *KEYS, f"data.train={unsolved}", "training.refill_at_most=2"]
    done = CliRunner().invoke(app, ["train", str(RECIPES / "dapo.yaml"), *keys, "policy.samples=2"])
    assert done.exit_code != 0
    said = (
        r"error: (\d+) prompts in a row taught nothing \(policy Dapo\), more than training\.refill_at_most=2 batches: "
        r"raise it, or choose problems that are sometimes solved"
    )
    found = re.search(said, " ".join(done.output.split()))
    assert found is not None, done.output
    assert 16 < int(found[1]) <= 24
