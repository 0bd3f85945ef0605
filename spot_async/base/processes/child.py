"""Child processes with their own process group and log file, which cannot outlive their parent.

`watch` raises `ProcessDiedError` when a child ends by itself. The error names the signal or exit code, and an error
from the end of the log. `stop` ends the child and everything below it: SIGTERM, a grace period, SIGKILL. A foreign
program cannot call `exit_with_parent` (`exits.py`), so it runs under our guard (`guard.py`). On another machine it runs
under two (`far_side.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import BinaryIO

import structlog

from spot_async.base.files import writing
from spot_async.base.processes import guard
from spot_async.base.processes.exits import SAFE_PATH
from spot_async.base.processes.far_side import FarPlace
from spot_async.base.processes.last_words import headline, how_it_ended, readable
from spot_async.base.processes.nursery import NURSERY, ForkedProcess
from spot_async.base.secrets import SECRETS, pattern
from spot_async.errors import ProcessDiedError

LOG_TAIL_BYTES = 4096
LOG_SEARCH_BYTES = 1 << 16  # the end of a log that is searched for earlier errors
STOP_GRACE_S = 5.0
FOREIGN_GRACE_S = 15.0  # inference servers stop slowly, and leave shared memory behind when killed
GUARD_MARGIN_S = 5.0  # a guard gets this much longer to stop than its program
STATES = {  # of processes, as the kernel writes them
    "T": "STOPPED by a signal",
    "Z": "ended",
    "D": "waits for a disk",
    "R": "runs",
    "S": "sleeps",
}
STANDING = "TD"
OF_OUR_ENVIRONMENT = ("PYTHONPATH", "PYTHONHOME")  # they mislead the interpreter of another environment


@dataclass(eq=False)
class ChildProcess:
    """One running child. Made by `start` or `start_foreign`."""

    name: str
    process: asyncio.subprocess.Process | ForkedProcess
    log_path: Path
    _: KW_ONLY
    guard_grace_s: float | None = None  # how long the child's guard takes at most to stop; None: it has no guard
    _stopping: bool = field(default=False, init=False)

    @classmethod
    async def start(
        cls,
        name: str,
        argv: Sequence[str],
        *,
        log_path: Path,
        environment: Mapping[str, str] | None = None,
        cores: Collection[int] | None = None,
    ) -> ChildProcess:
        """Start `argv` in a session of its own, with stdout and stderr in `log_path`.

        It gets our environment without keys, and `environment`. With `cores` it is bound to those, else it shares ours.
        If it is a program of the nursery's (`nursery.py`), that forks it.
        """
        own = {**(environment or {}), **_given_cores(cores)}
        whole = {**SECRETS.without_keys(os.environ), **SAFE_PATH, **own}
        with _open_log(log_path) as log:
            forked = await NURSERY.fork(argv, own, whole, log)
        return cls(name, forked or await _spawn(argv, log_path, whole), log_path)

    @classmethod
    async def start_foreign(
        cls,
        name: str,
        argv: Sequence[str],
        *,
        log_path: Path,
        environment: Mapping[str, str] | None = None,
        cores: Collection[int] | None = None,
        secrets: Collection[str] = (),
        far: FarPlace | None = None,
    ) -> ChildProcess:
        """Start a program of others under a guard: no process of it outlives its own end, `stop` or our death.

        `pid` is the guard's. The program gets our environment, but keys, PYTHONPATH and PYTHONHOME only from
        `environment`; in a `far` place it gets nothing but that. What was cut off from us there ends by itself.
        The log shows asterisks in place of `secrets`, and symbols for characters that terminals obey.
        """
        own = dict(environment or {})
        if far is None:
            grace_s = FOREIGN_GRACE_S
            guarded = [sys.executable, "-I", "-S", guard.__file__, str(grace_s), *argv]
            own |= _given_cores(cores)
        else:
            grace_s = FOREIGN_GRACE_S + GUARD_MARGIN_S  # the far guard has the program's own, and then some to kill
            guarded, own = far.guarded(argv, own, grace_s, far_grace_s=FOREIGN_GRACE_S)
        hidden = {guard.SECRET_VARIABLE: pattern(secrets)} if secrets else {}
        process = await _spawn(guarded, log_path, foreign_environment({**own, **hidden}))
        return cls(name, process, log_path, guard_grace_s=grace_s + GUARD_MARGIN_S)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        """Return the exit code, as `wait` does; None while the child lives."""
        return self.process.returncode

    async def wait(self) -> int:
        """Return the exit code once the child has ended; below 0: the signal that killed it."""
        return await self.process.wait()

    async def watch(self) -> None:
        """Return when the child was stopped on purpose. Raises `ProcessDiedError` when it ended by itself."""
        code = await self.wait()
        if not self._stopping:
            raise ProcessDiedError(self.describe_end(code))

    def describe_end(self, code: int, reason: str | None = None) -> str:
        """Say in one line which child ended, how, and why: by default by the line of its log that says it."""
        how = how_it_ended(code, reason or headline(readable(self.log_tail(LOG_SEARCH_BYTES))))
        return f"{self.name} (pid {self.pid}) {how} (log: {self.log_path})"

    def log_tail(self, size: int = LOG_TAIL_BYTES) -> str:
        """Return the end of the child's log. An unreadable log gives "": it must not hide how the child ended."""
        with contextlib.suppress(OSError):
            return _tail(self.log_path, size)
        return ""

    async def stop(self, grace_s: float | None = None) -> None:
        """End the child and everything below it; return when it is gone. Idempotent."""
        self._stopping = True
        if grace_s is None:
            grace_s = STOP_GRACE_S if self.guard_grace_s is None else self.guard_grace_s
        cpu_s = tree_cpu_s(self.pid)
        try:
            if self.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    if self.guard_grace_s is not None:
                        os.kill(self.pid, signal.SIGTERM)  # the guard: it stops the program and whatever that leaves
                    else:
                        os.killpg(self.pid, signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(grace_s):
                        await self.process.wait()
        finally:
            self._kill()
            await self.process.wait()
        structlog.get_logger().info("stopped", process=self.name, pid=self.pid, cpu_s=cpu_s)

    def _kill(self) -> None:
        below = guard.process_tree(self.pid) if self.process.returncode is None else {}
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for pid in below:  # also those in their own sessions
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def log_lines(path: Path, count: int) -> list[str]:
    """Return a log's last `count` lines, as `readable` does. Raises OSError."""
    return readable(_tail(path, LOG_TAIL_BYTES))[-count:]


def _tail(path: Path, size: int) -> str:
    with path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - size))
        return log.read().decode(errors="replace")


def foreign_environment(own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a program of another Python environment: `own` over ours without keys and paths."""
    ours = SECRETS.without_keys(os.environ)
    return {**{name: value for name, value in ours.items() if name not in OF_OUR_ENVIRONMENT}, **own}


def _given_cores(cores: Collection[int] | None) -> dict[str, str]:
    return {guard.CORES_VARIABLE: ",".join(map(str, sorted(cores)))} if cores else {}


async def _spawn(argv: Sequence[str], log_path: Path, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
    with _open_log(log_path) as log:
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**environment, "SPOT_ASYNC_PARENT": str(os.getpid())},
            start_new_session=True,
        )


def _open_log(path: Path) -> BinaryIO:
    with writing(path):
        path.parent.mkdir(exist_ok=True)  # not its parents: a run directory that was removed is not made again
        return path.open("ab")


def tree_cpu_s(root: int) -> float:
    """Return the CPU seconds that a process and its living descendants have used; NaN where there is no /proc."""
    tree = guard.process_tree(root)
    if not tree:
        return math.nan
    ticks = sum(sum(map(int, fields[11:15])) for fields in tree.values())  # user, system, and of reaped children
    return ticks / os.sysconf("SC_CLK_TCK")


def processes_below(root: int) -> Iterator[tuple[str, str]]:
    """Yield a name and the state (of `STATES`) of each living process below `root`. No command line is shown."""
    for pid, fields in sorted(guard.process_tree(root).items()):
        if pid != root:
            yield f"{_name_of(pid)} (pid {pid})", fields[0]


def standing_still(root: int) -> Iterator[str]:
    """Yield each living process below `root` that was stopped, or waits for a disk."""
    for name, state in processes_below(root):
        if state in STANDING:
            yield f"{name} {'is ' if state == 'T' else ''}{STATES[state]}"


def _name_of(pid: int) -> str:
    with contextlib.suppress(OSError):  # the process ended meanwhile
        if (own := Path(f"/proc/{pid}/comm").read_text().strip()).startswith("rank "):
            return own
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        if "-m" in arguments[:-1]:
            return arguments[arguments.index("-m") + 1]
        script = next((each for each in arguments[1:] if each.endswith(".py")), arguments[0])
        return Path(script).name
    return "a process"
