"""A run whose trainer is killed continues by itself, with the same servers and to the same weights."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from kill_drill import ROOT, SHORT, command, descendants, weights
from problem_files import FEW

import spot_async
from spot_async.run_directory.reading import RunFiles

ITERATIONS = 8
KEYS = (FEW, *SHORT, f"training.iterations={ITERATIONS}", "training.checkpoint_every=2", "evaluation=null")
NURSERY = "base.processes.nursery"
SHARDED = ("training.ranks=2", "training.sharding=fsdp2")


def train(run: Path, *keys: str) -> list[str]:
    return command("train", str(ROOT / "configs/quickstart.yaml"), f"run.directory={run}", *KEYS, *keys)


def rows(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    return [json.loads(line)["iteration"] for line in path.read_text().splitlines()] if path.exists() else []


def processes(run: subprocess.Popen[str], kind: str) -> list[int]:
    return [pid for pid, line in descendants(run.pid) if f"spot_async.{kind} " in line]


def kill_after(
    directory: Path, keys: Sequence[str], kills: Sequence[tuple[int, str]], rng: random.Random
) -> tuple[subprocess.Popen[str], str, list[list[int]]]:
    """Run to its end, and kill a process of this kind some time after each of these iterations.

    Return the run, what it said, and its servers' processes before each kill and after the last iteration but one.
    """
    run = subprocess.Popen(
        train(directory, *keys), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    servers = []
    for iteration, kind in (*kills, (ITERATIONS - 1, "")):
        while run.poll() is None and iteration not in rows(directory):
            time.sleep(0.02)
        servers.append(processes(run, "serving"))
        if kind:
            time.sleep(rng.uniform(0.0, 0.3))
            ranks = processes(run, "trainer")
            os.kill(rng.choice(processes(run, kind)), signal.SIGKILL)
            while run.poll() is None and {*processes(run, "trainer")} <= {*ranks}:  # the next one starts
                time.sleep(0.02)
    said, _ = run.communicate(timeout=120)
    return run, said, servers


@pytest.fixture(scope="module")
def whole(tmp_path_factory, servers_on_threads):
    """Return the weights that a run ends with which nobody disturbs, by the keys it is given.

    Its servers are threads: they have the same bits.
    """

    @functools.cache
    def train_undisturbed(keys: tuple[str, ...]) -> str:
        directory = tmp_path_factory.mktemp("whole") / "run"
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(ROOT)
            spot_async.run("configs/quickstart.yaml", [f"run.directory={directory}", *KEYS, *keys])
        return weights(directory)

    return train_undisturbed


def check_run(directory: Path) -> None:
    """Every iteration has one row, and every prompt was trained once."""
    assert rows(directory) == list(range(1, ITERATIONS + 1))
    checked = subprocess.run(command("verify-run", str(directory)), cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    "keys", [(), pytest.param(SHARDED, marks=pytest.mark.nightly)], ids=["one rank", "two sharded"]
)
def test_a_strict_run_whose_trainer_is_killed_ends_by_itself_with_the_same_bits(tmp_path, whole, keys):
    directory, rng = tmp_path / "run", random.Random(f"{keys}")
    run, said, servers = kill_after(directory, keys, [(1, "trainer"), (4, "trainer")], rng)
    assert run.returncode == 0, said
    assert "trainer restarts: 2" in said
    assert json.loads((directory / "summary.json").read_text())["trainer_restarts"] == 2
    assert "was killed by SIGKILL" in (directory / "logs" / "trainer.log").read_text()
    assert len(RunFiles(directory).interruptions()) == 2
    assert len(servers[0]) == 2
    assert all(each == servers[0] for each in servers)
    check_run(directory)
    assert weights(directory) == whole(keys)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked elsewhere")
def test_a_strict_run_whose_nursery_is_killed_goes_on_without_it_to_the_same_bits(tmp_path, whole):
    """Servers and trainer end with it. They are started anew, by themselves."""
    directory = tmp_path / "run"
    run, said, servers = kill_after(directory, (), [(2, NURSERY)], random.Random(0))
    assert run.returncode == 0, said
    assert "trainer restarts: 1" in said
    assert len(servers[0]) == len(servers[1]) == 2
    assert not {*servers[0]} & {*servers[1]}
    assert not processes(run, NURSERY)
    check_run(directory)
    assert weights(directory) == whole(())


@pytest.mark.long
@pytest.mark.nightly
def test_a_run_whose_trainer_is_lost_too_often_ends_with_a_line_and_can_be_resumed(tmp_path, whole):
    directory = tmp_path / "run"
    kills = [(1, "trainer"), (5, "trainer")]
    run, said, _ = kill_after(directory, ("training.restarts=1",), kills, random.Random(0))
    assert run.returncode == 1, said
    assert "was killed by SIGKILL (log: " in said
    assert "; it was restarted 1 time (training.restarts)" in said
    assert f"spot-async train --resume {directory}" in said
    subprocess.run(command("train", "--resume", str(directory)), check=True, cwd=ROOT, capture_output=True)
    check_run(directory)
    assert weights(directory) == whole(())
