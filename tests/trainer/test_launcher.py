"""What the launcher gives its ranks that no other process has, and what it says when they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from spot_async.trainer.settings import TrainerSettings

# A shell script stands for the interpreter that ranks run in.
LAUNCHER = """
import sys
from spot_async.trainer import launcher
sys.executable = sys.argv[1]
launched = launcher.main(sys.argv[2:])
assert not {"torch", "transformers", "numpy.testing"} & set(sys.modules)
sys.exit(launched)
"""
Launch = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def launch(tmp_path: Path, trainer_settings: Callable[..., TrainerSettings]) -> Launch:
    """Start a launcher whose ranks run this shell script, in `tmp_path`."""

    def start(script: str, variables: Mapping[str, str] | None = None, **training: int) -> subprocess.Popen[str]:
        rank = tmp_path / "rank"
        rank.write_text(f"#!/bin/sh\ncd {tmp_path}\n{script}\n")
        rank.chmod(0o700)
        settings = trainer_settings(tmp_path, tmp_path, **training).save()
        words = [sys.executable, "-c", LAUNCHER, str(rank), str(settings), str(tmp_path)]
        free = {name: value for name, value in os.environ.items() if not name.startswith("PYTORCH_")}
        return subprocess.Popen(words, env={**free, **(variables or {})}, stderr=subprocess.PIPE, text=True)

    return start


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, "max_split_size_mb:512"),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, None),  # the newer name is the user's word as well
    ],
)
def test_ranks_get_segments_that_grow_unless_the_user_has_decided(
    given: dict[str, str], expected: str | None, launch: Launch, tmp_path: Path
) -> None:
    launcher = launch("env > seen; exit 3", given)
    said = launcher.communicate()[1]
    seen = dict(line.split("=", 1) for line in (tmp_path / "seen").read_text().splitlines() if "=" in line)
    assert seen.get("PYTORCH_CUDA_ALLOC_CONF") == expected
    assert {name: seen[name] for name in given} == given
    assert launcher.returncode == 1
    assert said.startswith("rank 0 (pid ")
    assert said.endswith(") exited with code 3: its last words are above\n")


def test_a_launcher_that_somebody_stopped_says_so_and_ends_its_ranks(launch: Launch, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "begun")
    launcher = launch("echo $$ > begun; exec sleep 600", ranks=2)
    ranks = [int((tmp_path / "begun").read_text().split()[0])]
    launcher.send_signal(signal.SIGTERM)
    assert launcher.communicate()[1] == "stopped by SIGTERM\n"
    assert launcher.returncode == 143
    assert not Path(f"/proc/{ranks[0]}").exists()


def test_a_killed_rank_is_named_and_ends_the_others(launch: Launch, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "other")
    dies = "[ $RANK = 1 ] && read line < other && kill -9 $$"
    launcher = launch(f"echo $$ > rank-$RANK; {dies}; echo begun > other; exec sleep 600", ranks=2)
    said = launcher.communicate()[1]
    first, second = ((tmp_path / f"rank-{rank}").read_text().strip() for rank in range(2))
    assert said == f"rank 1 (pid {second}) was killed by SIGKILL\n"
    assert launcher.returncode == 1
    assert not Path(f"/proc/{first}").exists()


def test_a_frozen_rank_is_ended_too(launch: Launch, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "other")
    dies = "[ $RANK = 1 ] && read line < other && exit 3"
    freezes = "echo begun > other & kill -STOP $$"
    launcher = launch(f"{dies}; {freezes}", ranks=2)
    assert " exited with code 3: " in launcher.communicate(timeout=60)[1]
