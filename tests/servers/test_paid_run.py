"""Whole runs with a teacher that bills (`paid_endpoint.py`): all processes are real, student and trainer too.

The account agrees with the endpoint's own bill. A budget ends the run with everything saved and exit code 4. A replay
makes no request and trains on the same numbers. A run that is killed pays twice at most for what was running.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from spot_async.run_directory.ledger import Ledger

ROOT = Path(__file__).parents[2]
LIMITS = ("--requests-per-minute", "3000", "--tokens-per-minute", "400000")
DEAREST = 0.0002 + 3.0e-6 * (64 + 160)  # request: the longest prompt and response
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


def command(*given):
    return [sys.executable, "-m", "spot_async", "train", *given]


def arguments(run, url, *overrides):
    backend = {
        "kind": "openai",
        "url": url,
        "requests_per_minute": 3000,
        "tokens_per_minute": 400000,
        "prices": {"prompt": 3.0, "cached_prompt": 0.75, "completion": 12.0, "request": 0.0002},
    }
    teacher = f"teacher.backend={json.dumps(backend)}"
    return command("configs/quickstart.yaml", teacher, f"run.directory={run}", *SMALL, *overrides)


def train(run, url, *overrides):
    return finished(run, arguments(run, url, *overrides))


def resumed(run, *overrides):
    return finished(run, command("--resume", str(run), *overrides))


def finished(run, given):
    done = subprocess.run(given, cwd=ROOT, capture_output=True, text=True)
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


@pytest.mark.nightly
def test_a_budget_ends_the_run_with_everything_saved_and_a_higher_one_goes_on(paid, tmp_path):
    budget = 0.6 * float(paid.bill["money"])
    with paid_endpoint("--vocabulary", "48", *LIMITS) as url:
        run = train(tmp_path / "run", url, f"teacher.backend.budget={budget}")
        bill = float(bill_of(url)["money"])
        check_saved(run, bill, budget)
        go_on_with_more_money(run.path, run.summary["iterations"], budget)


def check_saved(run, bill, budget):
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


def go_on_with_more_money(run, iterations, budget):
    """A resumed run has the budget of all of its parts. With more it comes to its end."""
    spent = json.loads((run / "summary.json").read_text())["spending"]["teacher"]["money"]
    done = {each: resumed(run, f"teacher.backend.budget={each}") for each in (budget, 10 * budget)}
    assert done[budget].code == 4
    assert done[budget].summary["iterations"] == iterations
    assert spent <= done[budget].summary["spending"]["teacher"]["money"] <= budget
    assert done[10 * budget].code == 0, done[10 * budget].err
    assert done[10 * budget].summary["prompts"]["trained"] == 5 * 16
    assert [row["iteration"] for row in done[10 * budget].metrics] == [1, 2, 3, 4, 5]


@pytest.mark.nightly
def test_three_kills_cost_no_more_than_what_was_running(tmp_path):
    run, every = tmp_path / "run", "training.checkpoint_every=1"
    with paid_endpoint("--vocabulary", "48", *LIMITS, "--latency-s", "0.1") as url:
        running = killed_amid_requests(arguments(run, url, every), url, run, after=1)
        for iterations in (2, 3):
            running += killed_amid_requests(command("--resume", str(run)), url, run, after=iterations)
        done = resumed(run)
        assert done.code == 0, done.err
        bill = bill_of(url)
    spent = done.summary["spending"]["teacher"]
    start = rows(run / "spending.jsonl")[0]
    assert running > 0
    # opd asks once for each prompt
    assert bill["answered"] - 4 * start["answered"] - 5 * 16 <= running
    forgotten = bill["answered"] - spent["answered"]
    assert 0 <= forgotten <= running
    assert spent["unknown"] <= running
    assert 0 <= float(bill["money"]) - spent["money"] <= forgotten * DEAREST


def killed_amid_requests(given, url, run, after):
    """Kill a run while prompts of the iteration after this one are asked about. Return how many are running."""
    process = subprocess.Popen(given, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: (run / "checkpoints" / f"step-{after:06d}" / "manifest.json").exists())
    before = bill_of(url)["answered"]
    wait_until(lambda: bill_of(url)["answered"] > before + 6)
    process.kill()
    process.wait()
    with closing(Ledger.open(run)) as ledger:
        return sum(row.state == "running" for row in ledger.prompts())


def wait_until(is_so):
    end = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)
