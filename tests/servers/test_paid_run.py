"""Whole runs with a teacher that bills (`paid_endpoint.py`): all processes are real, student and trainer too.

The account agrees with the endpoint's own bill. A budget ends the run with everything saved and exit code 4. A replay
makes no request and trains on the same numbers.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
LIMITS = ("--requests-per-minute", "3000", "--tokens-per-minute", "400000")
SMALL = [
    "policy=opd",
    "training.batch_size=16",
    "training.mini_batch_size=8",
    "training.warmup_iterations=0",
    "training.iterations=5",
    "evaluation=null",
]


@contextlib.contextmanager
def paid_endpoint(*options):
    """Its URL while it runs."""
    command = [sys.executable, str(ROOT / "tests" / "paid_endpoint.py"), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def bill_of(url):
    with urllib.request.urlopen(f"{url}/bill") as reply:
        return json.load(reply)


def train(run, url, *overrides):
    backend = {
        "kind": "openai",
        "url": url,
        "requests_per_minute": 3000,
        "tokens_per_minute": 400000,
        "prices": {"prompt": 3.0, "cached_prompt": 0.75, "completion": 12.0, "request": 0.0002},
    }
    command = ["train", "configs/quickstart.yaml", f"run.directory={run}", *SMALL, *overrides]
    command.insert(3, f"teacher.backend={json.dumps(backend)}")
    done = subprocess.run([sys.executable, "-m", "spot_async", *command], cwd=ROOT, capture_output=True, text=True)
    read = SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr, path=run)
    if (run / "summary.json").exists():
        read.summary = json.loads((run / "summary.json").read_text())
        read.metrics = rows(run / "metrics.jsonl")
        read.spending = rows(run / "spending.jsonl") if (run / "spending.jsonl").exists() else []
    return read


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def paid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("paid")
    with paid_endpoint("--vocabulary", "48", *LIMITS) as url:
        run = train(folder / "run", url, f"teacher.cache={folder / 'scores.sqlite'}")
        assert run.code == 0, run.err
        yield SimpleNamespace(url=url, run=run, bill=bill_of(url), cache=folder / "scores.sqlite")


def test_every_file_agrees_with_the_bill(paid):
    bill, spent = float(paid.bill["money"]), paid.run.summary["spending"]["teacher"]
    assert spent["money"] == pytest.approx(bill, rel=0.01)
    assert spent["answered"] == paid.bill["answered"]
    assert paid.run.spending[-1]["money"] == pytest.approx(bill, rel=0.01)
    assert paid.run.metrics[-1]["spending/teacher/total_money"] == pytest.approx(bill, rel=0.01)
    assert f"teacher spent: {spent['money']:.6g} USD" in paid.run.out
    assert "requests" in paid.run.out
    assert "half of sampling.max_response_tokens=160" in paid.run.out  # the estimate before


def test_a_replay_makes_no_request_and_gives_the_same_losses(paid, tmp_path):
    again = train(tmp_path / "run", "http://127.0.0.1:9", f"teacher.cache={paid.cache}", "teacher.replay=true")
    assert again.code == 0, again.err
    assert bill_of(paid.url) == paid.bill
    losses = [[row["train/loss"] for row in run.metrics] for run in (paid.run, again)]
    assert losses[0] == losses[1]
    assert again.summary["score_cache"]["misses"] == 0
    assert "spending" not in again.summary


def test_a_budget_ends_the_run_with_everything_saved(paid, tmp_path):
    budget = 0.6 * float(paid.bill["money"])
    with paid_endpoint("--vocabulary", "48", *LIMITS) as url:
        run = train(tmp_path / "run", url, f"teacher.backend.budget={budget}")
        bill = float(bill_of(url)["money"])
    assert run.code == 4, run.err
    assert 0.9 * budget < bill <= budget
    assert run.summary["spending"]["teacher"]["money"] == pytest.approx(bill, rel=0.01)
    assert "teacher.backend.budget=" in run.summary["ended_early"]
    assert "teacher.backend.budget=" in run.err
    assert "saved: step-" in run.err
    iterations = run.summary["iterations"]
    assert 0 < iterations < 5
    assert run.summary["prompts"]["trained"] == 16 * iterations
    assert run.summary["prompts"]["unpaid"] > 0
    assert (run.path / "student" / "model.safetensors").exists()
