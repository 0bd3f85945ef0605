"""One inference server as a test needs it: started, waited for, and gone with its whole process group at the end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

START_TIMEOUT_S = 300.0
STOP_GRACE_S = 20.0


@dataclass(frozen=True)
class RunningServer:
    url: str
    model: Path
    log_path: Path
    process: subprocess.Popen[bytes]

    def signal_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


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
