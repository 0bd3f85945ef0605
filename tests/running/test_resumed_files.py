"""A run that was killed at an awkward moment continues: nothing in its directory is missing, nothing is there twice."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from event_files import shown_steps
from problem_files import FEW, FOUR, write

import spot_async
from spot_async.evaluation.metrics import read_figures
from spot_async.run_directory.dead_letters import DeadLetter
from spot_async.run_directory.layout import RunDirectory
from spot_async.run_directory.reading import RunFiles

ROOT = Path(__file__).parents[2]
BATCH = 4  # as FOUR says


@pytest.fixture
def begun(tmp_path, monkeypatch, servers_on_threads, trainer_on_thread):
    """A run of two iterations that came to its end."""
    monkeypatch.chdir(ROOT)
    held_out = (ROOT / "examples/running_sum/data/heldout.jsonl").read_text().splitlines()[:6]
    evaluation = {
        "problems": write(tmp_path, map(json.loads, held_out)),
        "samples": 2,
        "eval_every": 2,
        "max_response_tokens": 40,
        "verifier": "boxed_match",
    }
    overrides = [
        FEW,
        *FOUR,
        f"run.directory={tmp_path / 'run'}",
        "policy=opd",
        "training.iterations=2",
        "training.checkpoint_every=2",
        "training.learning_rate=1e-3",
        f"evaluation={json.dumps(evaluation)}",
        "telemetry.tensorboard=true",
    ]
    return spot_async.run("configs/quickstart.yaml", overrides).directory


@pytest.mark.long
def test_a_run_that_is_killed_in_its_third_iteration_goes_on_from_its_second(begun):
    before = (begun / "evaluation-before.jsonl").read_bytes()
    kill_in_the_third(begun)
    outcome = spot_async.resume(begun, ["training.iterations=3"])
    files = RunFiles(begun)
    assert [row["iteration"] for row in files.metrics()] == [1, 2, 3]
    assert Counter(each.iteration for each in files.samples.read()) == dict.fromkeys((1, 2, 3), BATCH)
    assert files.dead_letters() == []
    assert shown_steps(begun / "tensorboard", "train/loss") == [1, 2, 3]
    assert files.early_end() is None
    assert files.interruptions() == ["The run was resumed after iteration 2"]
    # evaluations
    assert (begun / "evaluation-before.jsonl").read_bytes() == before
    assert (begun / "rolled-back" / "evaluation-000003.json").exists()
    evaluations = [read_figures(begun / f"evaluation-{when}.json") for when in ("000002", "after")]
    assert [Path(each.model).name for each in evaluations] == ["step-000002", "step-000003"]
    # the best student, of the first of those that are equal
    found = [each.benchmarks["problems"].avg.value for each in evaluations]
    assert outcome.best.value == max(found)
    assert outcome.best.iteration == 2 + found.index(max(found))
    assert (begun / "best").resolve().name == f"best-{outcome.best.iteration:06d}"
    assert sorted(each.name for each in begun.glob("weights/*best*")) == [f"best-{outcome.best.iteration:06d}"]
    assert (begun / "student").resolve().name == "step-000003"


def kill_in_the_third(run):
    """Leave what a kill may leave behind, while the third iteration's best student is copied."""
    (run / "summary.json").unlink()
    for name in ("metrics.jsonl", "samples.jsonl"):
        whole = (run / name).read_bytes()
        last = json.loads(whole.splitlines()[-1]) | {"iteration": 3}
        (run / name).write_bytes(whole + json.dumps(last).encode() + b'\n{"iteration": 3, "ti')
    RunDirectory(run).append("dead_letters.jsonl", [DeadLetter(ordinal=2 * BATCH, problem_id="p")])
    weights = run / "weights"
    shutil.copytree(weights / "step-000002", weights / "step-000003")
    (weights / ".best-000003").mkdir()
    (weights / ".best-000003" / "model.safetensors").write_bytes(b"half")
    for each in run.glob("evaluation-000002*"):
        shutil.copy(each, run / each.name.replace("000002", "000003"))
    from tensorboardX import SummaryWriter

    (first,) = (run / "tensorboard").iterdir()
    with SummaryWriter(str(run / "tensorboard"), filename_suffix=".killed") as writer:
        writer.add_scalar("train/loss", 9.0, 3)
    (killed,) = (run / "tensorboard").glob("*.killed")
    killed.rename(first.with_name(f"{first.name}.killed"))  # files are read in the order of their names
