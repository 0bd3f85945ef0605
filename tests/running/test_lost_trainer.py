"""A run whose trainer is killed goes on by itself, with the same servers and to the same weights."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ITERATIONS = 6
KEYS = (
    f"training.iterations={ITERATIONS}",
    "training.checkpoint_every=2",
    "training.batch_size=8",
    "training.mini_batch_size=8",
    "training.warmup_iterations=0",
    "sampling.max_response_tokens=64",
    "evaluation=null",
)
SHARDED = ("training.ranks=2", "training.sharding=fsdp2")


def command(*given: str) -> list[str]:
    return [sys.executable, "-m", "spot_async", *given]


def train(run: Path, *keys: str) -> list[str]:
    return command("train", str(ROOT / "configs/quickstart.yaml"), f"run.directory={run}", *KEYS, *keys)


def rows(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    return [json.loads(line)["iteration"] for line in path.read_text().splitlines()] if path.exists() else []


def weights(run: Path) -> str:
    return hashlib.sha256((run / "student" / "model.safetensors").read_bytes()).hexdigest()


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """The living processes below one, each with its command line."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            yield child, Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            yield from descendants(child)


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
            time.sleep(rng.uniform(0.0, 0.5))
            os.kill(rng.choice(processes(run, kind)), signal.SIGKILL)
            while run.poll() is None and not processes(run, "trainer.launcher"):
                time.sleep(0.02)
    said, _ = run.communicate(timeout=120)
    return run, said, servers


@pytest.mark.long
@pytest.mark.parametrize("keys", [(), SHARDED], ids=["one rank", "two sharded"])
def test_a_strict_run_whose_trainer_is_killed_ends_by_itself_with_the_same_bits(tmp_path, keys):
    subprocess.run(train(tmp_path / "whole", *keys), check=True, cwd=ROOT, capture_output=True)
    directory, rng = tmp_path / "killed", random.Random(f"{keys}")
    kills = [(1, "trainer"), (4, "trainer.launcher")]
    run, said, servers = kill_after(directory, keys, kills, rng)
    assert run.returncode == 0, said
    assert "trainer restarts: 2" in said
    assert "was killed by SIGKILL" in said
    assert len(servers[0]) == 2
    assert all(each == servers[0] for each in servers)
    assert rows(directory) == list(range(1, ITERATIONS + 1))
    checked = subprocess.run(command("verify-run", str(directory)), cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    assert weights(directory) == weights(tmp_path / "whole")
