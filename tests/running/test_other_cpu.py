"""A run that continues on a CPU of another type says once that its numbers will differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from problem_files import FEW
from typer.testing import CliRunner

from spot_async.base.processes.resources import cpu_type
from spot_async.cli import app

ROOT = Path(__file__).parents[2]
SET = torch.backends.cpu.get_cpu_capability()
OWN = f"{cpu_type()}, {SET}"
LINE = "from here on the numbers differ in their last bits"


@pytest.fixture
def run(tmp_path, monkeypatch, servers_on_threads, trainer_on_thread):
    """A run of one iteration that came to its end."""
    monkeypatch.chdir(ROOT)
    keys = ("policy=opd", "training.iterations=1", "training.batch_size=4", "training.mini_batch_size=4")
    train("configs/quickstart.yaml", f"run.directory={tmp_path / 'run'}", FEW, "evaluation=null", *keys)
    return tmp_path / "run"


def train(*arguments):
    """Return what the command says."""
    done = CliRunner().invoke(app, ["train", *arguments, "training.checkpoint_every=1", "training.warmup_iterations=0"])
    assert done.exit_code == 0, done.output
    return done.output


def written(run, **changes):
    """Change `run.json`, and return it."""
    tree = {key: value for key, value in {**json.loads((run / "run.json").read_text()), **changes}.items() if value}
    (run / "run.json").write_text(json.dumps(tree))
    return tree


@pytest.mark.long
def test_a_run_that_continues_on_another_cpu_says_so_once(run):
    made = written(run)
    assert made["cpu"] == OWN
    for iterations, other in ((2, f"Another, {SET}"), (4, f"{cpu_type()}, ANOTHER")):
        written(run, cpu=other)
        said = train("--resume", str(run), f"training.iterations={iterations}")
        assert f"warning: trained on {other} so far, and now on {OWN}: {LINE}" in said
        assert said.count(LINE) == 1
        assert written(run) == made
        assert LINE not in train("--resume", str(run), f"training.iterations={iterations + 1}")  # the same CPU again
    assert (run / "logs" / "run.jsonl").read_text().count(LINE) == 2

    written(run, cpu=None)  # as on GPUs
    assert LINE not in train("--resume", str(run), "training.iterations=6")
    assert written(run) == made
