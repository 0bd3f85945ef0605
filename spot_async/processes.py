"""Child processes that are supervised: own process group, log file, and no way to outlive their parent.

A child that ends by itself raises `ProcessDiedError` from `watch`, naming the signal or exit code and
the last lines of its log. `stop` ends the whole group: SIGTERM, a grace period, SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import structlog

from spot_async.errors import ProcessDiedError, StorageError

LOG_TAIL_BYTES = 4096
STOP_GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1


class ChildProcess:
    """One running child. Made by `start`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._process = process
        self._stopping = False

    @classmethod
    async def start(
        cls, name: str, argv: Sequence[str], *, log_path: Path, environment: Mapping[str, str] | None = None
    ) -> ChildProcess:
        """Start `argv` in a session of its own; stdout and stderr go to `log_path`."""
        with _open_log(log_path) as log:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(environment or {}), "SPOT_ASYNC_PARENT": str(os.getpid())},
                start_new_session=True,
            )
        return cls(name, process, log_path)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def watch(self) -> None:
        """Return when the child was stopped on purpose; raise `ProcessDiedError` when it ended by itself."""
        code = await self._process.wait()
        if not self._stopping:
            raise ProcessDiedError(self.describe_end(code))

    def describe_end(self, code: int) -> str:
        """One line: who ended, how, and the log's last line."""
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        tail = self.log_tail().strip().splitlines()
        last = f": {tail[-1].strip()}" if tail and code >= 0 else ""
        return f"{self.name} (pid {self.pid}) {how}{last} (log: {self.log_path})"

    def log_tail(self) -> str:
        """The end of the child's log."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End the child and everything in its group; returns when it is gone. Idempotent."""
        self._stopping = True
        cpu_s = tree_cpu_s(self.pid)
        try:
            if self._process.returncode is None:
                self._signal_group(signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(grace_s):
                        await self._process.wait()
        finally:
            self._signal_group(signal.SIGKILL)
            await self._process.wait()
        structlog.get_logger().info("stopped", process=self.name, pid=self.pid, cpu_s=cpu_s)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def _open_log(path: Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from None


def tree_cpu_s(root: int) -> float:
    """CPU seconds that a process and its living descendants have used; NaN where there is no /proc."""
    parent_of: dict[int, int] = {}
    ticks_of: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            parent_of[int(entry.name)] = int(fields[1])
            ticks_of[int(entry.name)] = sum(map(int, fields[11:15]))  # user and system, reaped children included
    if root not in parent_of:
        return math.nan
    tree, found = {root}, 0
    while len(tree) > found:
        found = len(tree)
        tree |= {pid for pid, parent in parent_of.items() if parent in tree}
    return sum(ticks_of[pid] for pid in tree) / os.sysconf("SC_CLK_TCK")


def exit_with_parent() -> None:
    """In a child of `ChildProcess`: be killed when the parent dies, however it dies.

    Linux only; elsewhere, and in a process that a person started, a no-op.
    """
    expected_parent = os.environ.get("SPOT_ASYNC_PARENT")
    if expected_parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(expected_parent):
        os._exit(1)  # it died before we asked
