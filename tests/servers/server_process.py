"""Runs an inference server for a test: starts it, waits for it, and ends it with its whole process group."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from spot_async.base.processes.guard import process_tree

START_TIMEOUT_S = 300.0
STOP_GRACE_S = 20.0
WAIT_S = 120.0  # for a state of a server that comes within a second on a machine that does nothing else


@dataclass(frozen=True)
class RunningServer:
    url: str
    model: Path
    log_path: Path
    process: subprocess.Popen[bytes]

    def signal_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def command_line(pid: int) -> list[str]:
    """Its words; one empty word where it has none or has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return [""]


def name_of(pid: int) -> str:
    """By which a process goes, whichever way it was given one; empty where it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_text() + command_line(pid)[0]
    return ""


def expect_gone(pids: Collection[int]) -> None:
    """Wait for the end of processes that are nobody's child here, wherever they are in the tree: nobody tells us."""
    give_up = time.monotonic() + WAIT_S
    while left := [pid for pid in pids if process_tree(pid)]:
        if time.monotonic() > give_up:
            pytest.fail(f"after {WAIT_S:g} s there are still {', '.join(f'{pid} {name_of(pid)!r}' for pid in left)}")
        time.sleep(0.05)


@contextmanager
def run_server(
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    port: int,
    model: Path,
    log_path: Path,
    ready_path: str = "/health",
) -> Iterator[RunningServer]:
    """A server that answers `ready_path`; fails with the end of its log when it does not get so far."""
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    server = RunningServer(f"http://127.0.0.1:{port}", model, log_path, process)
    try:
        _wait_until_ready(server, ready_path)
        yield server
    finally:
        server.signal_group(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_GRACE_S)
        server.signal_group(signal.SIGKILL)  # also what the server left behind
        process.wait()


def _wait_until_ready(server: RunningServer, ready_path: str) -> None:
    give_up = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up and server.process.poll() is None:
        with suppress(httpx.TransportError):
            if httpx.get(server.url + ready_path, timeout=10.0).is_success:
                return
        time.sleep(0.2)
    tail = "\n".join(server.log_path.read_text(errors="replace").splitlines()[-30:])
    raise RuntimeError(f"the server did not answer (exit code {server.process.returncode}):\n{tail}")
