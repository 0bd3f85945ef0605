"""Runs one foreign program, and lets nothing of it outlive the program's end, a stop, or our parent's death.

    python -I -S guard.py GRACE_S COMMAND [ARGUMENT]...

Inference servers start processes of their own, some in sessions of their own, and leave them behind when they are
killed; they cannot be asked to die with the orchestrator either. The guard can: the kernel sends it SIGTERM when
the orchestrator dies, however it dies, and hands it every orphan of the program. It ends as the program ended.
A file of its own without an import of ours: it starts in milliseconds and reads nothing of the environment, which is
the program's. What only Linux has (both of the above) is left out elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

LEFTOVER_GRACE_S = 5.0  # how long what the program left behind gets to remove its shared memory and files
TRACKER_GRACE_S = 1.0
LOG_GRACE_S = 5.0  # for the rest of a log, where not all that might add to it can be seen to have ended
SECRET_VARIABLE = "SPOT_ASYNC_SECRET"  # what the program's log must not show, such as a key that the program prints
REDACTED = b"***"
CORES_VARIABLE = "SPOT_ASYNC_CORES"  # numbers of the cores that our parent wants us on
KILL_INTERVAL_S = 0.05  # pause between two looks for processes that were started while others were killed

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STOP = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_AWAITED = {*_STOP, signal.SIGCHLD}


class Guard:
    """One program and everything below it."""

    def __init__(self, command: list[str]) -> None:
        prctl = _prctl()
        signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)  # they wait until they are asked for
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.environ.pop("SPOT_ASYNC_PARENT", str(os.getppid())) != str(os.getppid()):
            raise SystemExit("the orchestrator died before its server was started")
        secret = os.environ.pop(SECRET_VARIABLE, None)
        take_given_cores()  # before there is anything that would not follow

        def before_exec() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # should the guard itself be killed

        said, output = os.pipe() if secret else (None, None)
        # Kept: when deleted it would wait by itself.
        self._program = subprocess.Popen(command, preexec_fn=before_exec, stdout=output, stderr=output)
        self._log: threading.Thread | None = None
        if secret and said is not None and output is not None:
            os.close(output)  # the program's; what it says ends with the last process that has it
            self._log = threading.Thread(target=_copy_without, args=(secret.encode(), said), daemon=True)
            self._log.start()
        self.status: int | None = None  # of the program, once it ended
        self._has_children = True

    def run(self, grace_s: float) -> int:
        """Wait for the program, or for a signal to stop it; returns its wait status when nothing is left."""
        if self._wait(lambda: self.status is not None, math.inf) in _STOP:
            self._signal_program(signal.SIGTERM)
            self._wait(lambda: self.status is not None, grace_s)
        if self.status is not None:
            self._signal_tree(signal.SIGTERM)
            self._wait(lambda: not self._has_children, LEFTOVER_GRACE_S)
        if self._has_children:
            # Python's own processes that free what others leave in /dev/shm: they end by themselves after all others.
            self._signal_tree(signal.SIGKILL, spared="multiprocessing.resource_tracker")
            self._wait(lambda: not self._has_children, TRACKER_GRACE_S)
        while self._has_children:
            self._signal_tree(signal.SIGKILL)
            self._wait(lambda: not self._has_children, KILL_INTERVAL_S)
        assert self.status is not None
        if self._log is not None:
            self._log.join(LOG_GRACE_S)
        return self.status

    def _wait(self, done: Callable[[], bool], timeout_s: float) -> int | None:
        """Until `done`, a time-out, or the first stop signal of an unlimited wait, which is returned."""
        deadline = time.monotonic() + timeout_s
        self._reap()
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            if math.isinf(left):
                received = signal.sigwait(_AWAITED)
                if received in _STOP:
                    return received
            else:
                signal.sigtimedwait(_AWAITED, left)  # asked to stop once more: it is under way
            self._reap()
        return None

    def _reap(self) -> None:
        """Take note of every child that ended. Orphans of the program are children too."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._program.pid:
                    self.status = ended[1]
        except ChildProcessError:
            self._has_children = False

    def _signal_program(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._program.pid, number)

    def _signal_tree(self, number: int, spared: str | None = None) -> None:
        """To everything below but what has `spared` in its command line."""
        for pid in process_tree(os.getpid()).keys() - {os.getpid()}:
            with contextlib.suppress(OSError):  # it ended meanwhile
                if spared is None or spared.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, number)


def _copy_without(secret: bytes, source: int) -> None:
    """Write what is said to our own output, line by line. What cannot be written is lost: no reason to hold it up."""
    with open(source, "rb") as lines:
        for line in lines:
            with contextlib.suppress(OSError):
                os.write(sys.stdout.fileno(), line.replace(secret, REDACTED))


def take_given_cores() -> None:
    """Use the cores that our parent gave, if any. Where the system has taken them away since, go on with all."""
    given = os.environ.pop(CORES_VARIABLE, None)
    if given is not None:
        try:
            os.sched_setaffinity(0, {int(core) for core in given.split(",")})
        except OSError as error:
            sys.stderr.write(f"cannot be bound to cores {given}: {error.strerror}\n")


def process_tree(root: int) -> dict[int, list[str]]:
    """A process and its living descendants, each with its fields of /proc/PID/stat from the state on.

    Empty when it is gone, or where there is no /proc.
    """
    stat: dict[int, list[str]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            stat[int(entry.name)] = (entry / "stat").read_text().rpartition(")")[2].split()
    tree, found = {root} & stat.keys(), 0
    while len(tree) > found:
        found = len(tree)
        tree |= {pid for pid, fields in stat.items() if int(fields[1]) in tree}
    return {pid: stat[pid] for pid in tree}


def _prctl() -> Callable[[int, int], object]:
    """The system call, looked up before any fork; nothing where there is none."""
    if sys.platform != "linux":
        return lambda option, value: None
    call: Callable[[int, int], object] = ctypes.CDLL(None).prctl
    return call


def end_as(status: int) -> NoReturn:
    """Exit with the program's code, or die by the signal that it died by."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program left the core
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    end_as(Guard(sys.argv[2:]).run(float(sys.argv[1])))
