"""What ranks get that no other process has, and what is said when they end."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from process_trees import is_alive

from spot_async.errors import ProcessDiedError
from spot_async.trainer.rank_processes import RankProcesses
from spot_async.trainer.settings import TrainerSettings

Make = Callable[..., RankProcesses]


@pytest.fixture
def ranks_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer_settings: Callable[..., TrainerSettings]) -> Make:
    """Make ranks that run this shell script, in `tmp_path`: it stands for their interpreter."""

    def make(script: str, **training: int) -> RankProcesses:
        rank = tmp_path / "rank"
        rank.write_text(f"#!/bin/sh\ncd {tmp_path}\n{script}\n")
        rank.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(rank))
        settings = trainer_settings(tmp_path, tmp_path, **training)
        return RankProcesses(settings, settings.save(), str(tmp_path), tmp_path / "logs" / "trainer.log")

    for name in [each for each in os.environ if each.startswith("PYTORCH_")]:
        monkeypatch.delenv(name)
    return make


async def end_of(ranks: RankProcesses) -> str:
    """Return what is said of their end, which the log says too, as often as somebody asks."""
    async with asyncio.timeout(60), ranks:
        said = []
        for _ in range(2):
            with pytest.raises(ProcessDiedError) as died:
                await ranks.watch()
            said.append(str(died.value))
    assert said[0] == said[1] == ranks.log_path.read_text().splitlines()[-1]
    return said[0]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, "max_split_size_mb:512"),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, None),  # the newer name is the user's word as well
    ],
)
async def test_ranks_get_segments_that_grow_unless_the_user_has_decided(
    given: dict[str, str], expected: str | None, ranks_of: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    said = await end_of(ranks_of("env > seen; echo its last words; exit 3"))
    seen = dict(line.split("=", 1) for line in (tmp_path / "seen").read_text().splitlines() if "=" in line)
    assert seen.get("PYTORCH_CUDA_ALLOC_CONF") == expected
    assert {name: seen[name] for name in given} == given
    assert said.startswith("rank 0 (pid ")
    assert f") exited with code 3: its last words (log: {tmp_path}" in said


async def test_a_killed_rank_is_named_and_ends_the_others(ranks_of: Make, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "other")
    dies = "[ $RANK = 1 ] && read line < other && kill -9 $$"
    said = await end_of(ranks_of(f"echo $$ > rank-$RANK; {dies}; echo begun > other; exec sleep 600", ranks=2))
    first, second = ((tmp_path / f"rank-{rank}").read_text().strip() for rank in range(2))
    assert said.startswith(f"rank 1 (pid {second}) was killed by SIGKILL (log: ")
    assert not is_alive(int(first))


async def test_a_frozen_rank_is_ended_too(ranks_of: Make, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "other")
    raises = """echo '{"message": {"message": "MemoryError: of rank 1"}}' > $TORCHELASTIC_ERROR_FILE"""
    dies = f"[ $RANK = 1 ] && read line < other && {raises} && echo of another && exit 3"
    freezes = "echo begun > other & kill -STOP $$"
    said = await end_of(ranks_of(f"{dies}; {freezes}", ranks=2))
    assert " exited with code 3: MemoryError: of rank 1 (log: " in said
