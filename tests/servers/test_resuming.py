"""A run whose processes are killed for good continues, and ends with the weights of one that nobody killed."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kill_drill import ROOT, again, command, descendants, rows, victim, weights

ITERATIONS = 8
KILLS = 3
KEYS = (f"training.iterations={ITERATIONS}", "training.checkpoint_every=2", "evaluation=null", "training.batch_size=32")
SHARDED = ("training.ranks=2", "training.sharding=fsdp2")


def train(run: Path, *keys: str) -> None:
    given = command("train", str(ROOT / "configs/quickstart.yaml"), f"run.directory={run}", *KEYS, *keys)
    subprocess.run(given, check=True, cwd=ROOT, capture_output=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return the weights of a run with these keys that nobody stopped, made once."""

    @functools.cache
    def made(*keys: str) -> str:
        run = tmp_path_factory.mktemp("whole") / "run"
        train(run, *keys)
        return weights(run)

    return made


def kill_once(run: Path, rng: random.Random, given: list[str]) -> None:
    """Go on with the run, kill one of its processes after an iteration or some, and wait until all are gone.

    A run that outlives the death of a server ends by itself.
    """
    before = rows(run)
    process = subprocess.Popen(given, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wanted = before + rng.randint(1, 3)
    while process.poll() is None and rows(run) < min(wanted, ITERATIONS):
        time.sleep(0.05)
    time.sleep(rng.uniform(0.0, 1.0))
    if process.poll() is None:
        os.kill(victim(process, rng)[1], signal.SIGKILL)
    process.wait(timeout=180)


@pytest.mark.nightly  # `test_awkward_moments.py` kills such a run at chosen moments every time
@pytest.mark.parametrize("keys", [pytest.param((), id="one rank"), pytest.param(SHARDED, id="two sharded")])
def test_a_strict_run_killed_at_random_ends_with_the_same_bits(
    tmp_path: Path, keys: tuple[str, ...], whole: Callable[..., str]
) -> None:
    run, rng = tmp_path / "killed", random.Random(f"{keys}")
    first = command("train", str(ROOT / "configs/quickstart.yaml"), f"run.directory={run}", *KEYS, *keys)
    kill_once(run, rng, first)
    for _ in range(KILLS - 1):
        if rows(run) < ITERATIONS:
            kill_once(run, rng, again(run, first))
    if not (run / "summary.json").exists():
        subprocess.run(again(run, first), check=True, cwd=ROOT, capture_output=True)
    said = subprocess.run(command("verify-run", str(run)), cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout
    assert "no prompt is trained twice, and none is lost" in said.stdout
    assert weights(run) == whole(*keys)


@pytest.mark.parametrize(
    ("number", "keys"),
    [
        pytest.param(signal.SIGUSR1, (), id="SIGUSR1", marks=pytest.mark.nightly),
        pytest.param(signal.SIGUSR1, SHARDED, id="SIGUSR1, two sharded", marks=pytest.mark.nightly),
        pytest.param(signal.SIGTERM, (), id="SIGTERM", marks=pytest.mark.nightly),
    ],
)
def test_a_run_that_a_scheduler_stops_goes_on_from_the_step_it_stood_at(
    tmp_path: Path, number: signal.Signals, keys: tuple[str, ...], whole: Callable[..., str]
) -> None:
    """SIGUSR1 goes to all of the run's processes, as Slurm sends it."""
    run, rng = tmp_path / "stopped", random.Random(f"{number} {keys}")
    given = command("train", str(ROOT / "configs/quickstart.yaml"), f"run.directory={run}", *KEYS, *keys)
    for _ in range(2):
        before = rows(run)
        process = subprocess.Popen(given, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        wait_for(lambda before=before: rows(run) > before, process)
        time.sleep(rng.uniform(0.0, 2.0))
        others = [pid for pid, _ in descendants(process.pid)] if number is signal.SIGUSR1 else []
        for pid in [process.pid, *others]:
            os.kill(pid, number)
        _, said = process.communicate(timeout=180)
        assert process.returncode == 75, said
        assert f"stopped by {number.name}; saved: step-00000{rows(run)} as " in said
        assert said.endswith(f"; to continue: spot-async train --resume {run}\n")
        assert (run / f"checkpoints/step-00000{rows(run)}/manifest.json").exists(), "a step would be made twice"
        given = command("train", "--resume", str(run))
    subprocess.run(given, check=True, cwd=ROOT, capture_output=True)
    said = subprocess.run(command("verify-run", str(run)), cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout
    assert weights(run) == whole(*keys)


def test_a_second_signal_ends_a_run_at_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    keys = (*KEYS, "training.checkpoint_every=100")
    given = command("train", str(ROOT / "configs/quickstart.yaml"), f"run.directory={run}", *keys)
    process = subprocess.Popen(given, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: rows(run) > 0, process)
    below = list(descendants(process.pid))
    for pid, line in below:
        if "spot_async.trainer" in line:
            os.kill(pid, signal.SIGSTOP)  # so that nothing is ever saved
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    while "stopping after the step under way, with a checkpoint" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "stopped at once by SIGTERM\nsaved: step-" in said
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid, _ in below))


def wait_for(happened: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + 600  # a busy machine is slow to start servers
    while not happened():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, "the run ended first"
        time.sleep(0.02)
