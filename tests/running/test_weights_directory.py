"""Runs that publish their weights outside of the run directory, such as in memory: what is left of them, and when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kill_drill import ROOT, command
from problem_files import FEW, FOUR

import spot_async
from spot_async.models.weight_files import SINGLE_FILE
from spot_async.trainer.handle import TrainerProcess
from spot_async.trainer.settings import TrainerSettings

KEYS = (
    FEW,
    *FOUR,
    "training.iterations=3",
    "training.checkpoint_every=2",
    "training.schedule=constant",
    "training.learning_rate=1e-3",
    "sampling.max_response_tokens=32",
    "evaluation=null",
)
CONFIG = "configs/running_sum/opd.yaml"
ADAPTERS = ("training.lora={rank: 4, targets: all}", "student.backend.weights={transport: adapter}")
OWNER = """
import pathlib, sys
from spot_async.base.processes.private_directory import private_directory

with private_directory("spot-weights-", pathlib.Path(sys.argv[1])) as path:
    (path / "step-000002").mkdir()
    print(path, flush=True)
    input()
"""

on_threads = pytest.mark.usefixtures("servers_on_threads", "trainer_on_thread")


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    directory = tmp_path / "memory"
    directory.mkdir()
    return directory


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Run in a directory of this name, and return it."""
    monkeypatch.chdir(ROOT)

    def make(name: str, *keys: str) -> Path:
        spot_async.run(CONFIG, [*KEYS, f"run.directory={tmp_path / name}", *keys])
        return tmp_path / name

    return make


def abandoned(memory: Path) -> Path:
    """Return a directory of weights whose process was killed."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(memory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        owner.kill()
    assert (left / "step-000002").is_dir()
    return left


def student(run: Path) -> bytes:
    return (run / "student" / SINGLE_FILE).read_bytes()


def kept(run: Path) -> list[str]:
    return sorted(each.name for each in (run / "weights").iterdir() if not each.name.startswith("zero"))


@on_threads
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param((), id="strict"),
        pytest.param(("max_staleness=1",), id="beside", marks=pytest.mark.long),
        pytest.param(ADAPTERS, id="adapters", marks=pytest.mark.long),
    ],
)
def test_a_run_keeps_the_student_of_its_newest_checkpoint_and_nothing_elsewhere(
    run: Callable[..., Path], memory: Path, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...]
) -> None:
    where: list[tuple[Path, int]] = []
    make = TrainerProcess._make_ranks

    def noted(trainer: TrainerProcess, channel_directory: str) -> object:
        place = trainer.settings.weights_directory
        where.append((place.parent, place.stat().st_mode & 0o777))
        return make(trainer, channel_directory)

    with monkeypatch.context() as patch:
        patch.setattr(TrainerProcess, "_make_ranks", noted)
        elsewhere = run("elsewhere", f"training.weights_directory={memory}", *keys)
    assert where == [(memory, 0o700)]
    assert not list(memory.iterdir())
    assert kept(elsewhere) == ["step-000003"]
    assert (elsewhere / "student").resolve() == elsewhere / "weights" / "step-000003"
    if "max_staleness=1" not in keys:  # timing decides there
        assert student(elsewhere) == student(run("here", *keys))


@pytest.mark.long
@on_threads
def test_a_resumed_run_publishes_again_what_is_gone_and_says_so(
    run: Callable[..., Path], memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"training.weights_directory={memory}"
    straight = run("straight", place, "training.iterations=5")
    resumed = run("resumed", place)
    abandoned(memory)
    (memory / "spot-weights-planted").symlink_to(resumed)
    capsys.readouterr()
    spot_async.resume(resumed, ["training.iterations=5"], progress=True)
    assert "weights of iteration 3 are published again, from its checkpoint, to " in capsys.readouterr().out
    assert [each.name for each in memory.iterdir()] == ["spot-weights-planted"]
    assert kept(resumed) == ["step-000005"]
    assert student(resumed) == student(straight)
    # It continues as well with weights in its own directory, and back.
    settings = TrainerSettings.load(str(resumed / "trainer.json"))
    settings.model_copy(update={"publishes_to": str(abandoned(memory))}).save()
    spot_async.resume(resumed, ["training.iterations=6", "training.weights_directory=null"])
    assert [each.name for each in memory.iterdir()] == ["spot-weights-planted"]
    assert "step-000006" in kept(resumed)
    spot_async.resume(resumed, ["training.iterations=7", place])
    assert kept(resumed) == ["step-000007"]


@pytest.mark.long
@on_threads
def test_the_best_student_is_kept_in_the_run_directory(run: Callable[..., Path], memory: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(Path(FEW.partition("=")[2]).read_text().splitlines(keepends=True)[:4]))
    evaluation = f"evaluation={{problems: {few}, eval_every: 1, samples: 1, max_response_tokens: 32}}"
    made = run("run", f"training.weights_directory={memory}", evaluation)
    best = (made / "best").resolve()
    assert kept(made) == [best.name, "step-000003"]
    assert best.parent == made / "weights"
    assert (best / SINGLE_FILE).is_file()


@pytest.mark.long
@pytest.mark.nightly
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="has no memory with a name")
def test_a_killed_run_goes_on_and_removes_what_it_left_in_memory(tmp_path: Path, run: Callable[..., Path]) -> None:
    keys = (*KEYS, "training.iterations=6", "training.weights_directory=/dev/shm")
    killed = tmp_path / "killed"
    with subprocess.Popen(command("train", CONFIG, f"run.directory={killed}", *keys), cwd=ROOT) as process:
        while process.poll() is None and not (killed / "student").exists():
            time.sleep(0.02)
        left = TrainerSettings.load(str(killed / "trainer.json")).weights_directory
        assert left.parent == Path("/dev/shm")
        os.kill(process.pid, signal.SIGKILL)
    assert left.is_dir()
    with subprocess.Popen(command("train", "--resume", str(killed)), cwd=ROOT) as process:
        assert process.wait() == 0
    assert not left.exists()
    assert not TrainerSettings.load(str(killed / "trainer.json")).weights_directory.exists()
    assert student(killed) == student(run("straight", "training.iterations=6", "training.ranks=1"))
