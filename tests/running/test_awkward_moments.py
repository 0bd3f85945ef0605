"""A run that is killed while it publishes, evaluates or saves loses nothing, even if a checkpoint is damaged."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from kill_drill import ROOT, command, kill_when, rows, verified, weights

import spot_async
from spot_async.run_directory.manifest import committed

KEYS = (
    "training.iterations=8",
    "training.checkpoint_every=2",
    "training.batch_size=8",
    "training.mini_batch_size=8",
    "evaluation.eval_every=3",
    "evaluation.samples=1",
)
TRAIN = (
    "data.train=[{path: %s, share: 0.7, category: new}, "
    "{path: examples/running_sum/data/heldout.jsonl, share: 0.3, verifier: math_verify}]"
)


def publishing(run: Path) -> bool:
    """Return whether weights are on their way to the student."""
    newest = max((int(each.name.removeprefix("step-")) for each in run.glob("weights/step-*")), default=0)
    return newest > max(rows(run), 2)


def evaluating(run: Path) -> bool:
    return any(not (run / f"{each.stem}.json").exists() for each in run.glob("evaluation-0*.jsonl"))


def saving(run: Path) -> bool:
    """Return whether a checkpoint is being written, with two before it."""
    return len(committed(run)) == 2 and any(
        not (each / "manifest.json").exists() for each in run.glob("checkpoints/step-*")
    )


def damage_the_newest(run: Path) -> None:
    for tensors in committed(run)[0].glob("*.safetensors"):
        with tensors.open("r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)
            file.seek(-1, 2)
            file.write(bytes([last[0] ^ 1]))


@pytest.mark.long
def test_a_strict_run_killed_at_the_most_awkward_moments_ends_with_the_same_bits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    few_problems: Path,
    servers_on_threads: None,
    trainer_on_thread: None,
) -> None:
    monkeypatch.chdir(ROOT)
    few = tmp_path / "few.jsonl"
    lines = (ROOT / "examples/running_sum/data/heldout.jsonl").read_text().splitlines(keepends=True)
    few.write_text("".join(lines[:12]))

    keys = [f"evaluation.problems={few}", TRAIN % few_problems, *KEYS]
    whole, run = tmp_path / "whole", tmp_path / "run"
    spot_async.run("configs/quickstart.yaml", [f"run.directory={whole}", *keys])  # on threads, undisturbed
    again = command("train", "--resume", str(run))
    kill_when(publishing, run, command("train", "configs/quickstart.yaml", f"run.directory={run}", *keys))
    kill_when(evaluating, run, again)
    kill_when(saving, run, again)
    damage_the_newest(run)
    subprocess.run(again, check=True, cwd=ROOT, capture_output=True)

    verified(run)
    assert weights(run) == weights(whole)
    for each in whole.glob("evaluation-*.json"):
        assert answers(run / each.name) == answers(each), each.name


def answers(path: Path) -> list[object]:
    """Return what an evaluation found, without the times it took."""
    return [json.loads(path.read_text())[name] for name in ("model_fingerprint", "macro", "tokens", "verdicts")]
