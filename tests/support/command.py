"""Runs `spot-async` as users do: as a process whose descendants can be found, or in this process if it starts none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from problem_files import FEW
from typer.testing import CliRunner, Result

from spot_async.cli import app

ROOT = Path(__file__).resolve().parents[2]
QUICK = [
    "training.iterations=2",
    "training.batch_size=8",
    "training.mini_batch_size=4",
    "training.warmup_iterations=0",
    "evaluation=null",
]
PAPERS = ("configs/running_sum/spot.yaml", "policy.gamma=1.0")  # the paper's target, at its gamma
START_TIMEOUT_S = 300


def marked_processes(marker: str, but: int) -> dict[int, str]:
    """Return the command lines of all living processes with the marker in their environment, but one."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == but:
            continue
        try:
            if marker.encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, PermissionError):
            continue
    return {pid: line for pid, line in found.items() if line}


def assert_nothing_left(marker: str, but: int) -> None:
    end = time.monotonic() + 60
    while marked_processes(marker, but) and time.monotonic() < end:
        time.sleep(0.05)
    assert marked_processes(marker, but) == {}


class Command:
    """A running `spot-async`; everything it starts carries its marker, workers too, which get few variables."""

    def __init__(self, *arguments: str) -> None:
        scratch = tempfile.mkdtemp(prefix="spot-test-")  # what a killed owner leaves is swept up by `finish`
        self.marker = f"TMPDIR={scratch}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "spot_async", *arguments],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": scratch},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.scratch = scratch
        self.started = time.monotonic()

    def finish(self, timeout_s: float = START_TIMEOUT_S) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout_s)
        shutil.rmtree(self.scratch, ignore_errors=True)
        return self.process.returncode, out, err

    def processes(self) -> dict[int, str]:
        """Return the command lines of the processes that it started."""
        return marked_processes(self.marker, but=self.process.pid)

    def wait_for(self, path: Path) -> None:
        """Wait until `path` exists, so that the run has come that far. Its time is kept in `start_s`."""
        end = time.monotonic() + START_TIMEOUT_S
        while not path.exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end, f"{path} never came"
            time.sleep(0.05)
        self.start_s = time.monotonic() - self.started

    def assert_nothing_left(self) -> None:
        assert_nothing_left(self.marker, but=self.process.pid)


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """Make a disk at `path` that holds so much. Skips the test where this user may not."""
    path.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path]).returncode:
        pytest.skip("cannot mount a small file system here")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def arguments(run: Path, *overrides: str) -> list[str]:
    return ["train", "configs/quickstart.yaml", f"run.directory={run}", FEW, *QUICK, *overrides]


def train(run: Path, *overrides: str) -> Command:
    return Command(*arguments(run, *overrides))


def error_lines(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("error:")]


def invoke(monkeypatch: pytest.MonkeyPatch, *words: str) -> Result:
    """Run the command in this process, for what it does before it starts any other process."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "200")
    return CliRunner().invoke(app, words)


def assert_refused(result: Result, *expected: str) -> None:
    """Check that there is one line on stderr, and exit code 2."""
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    for each in expected:
        assert each in line
