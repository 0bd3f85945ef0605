"""Runs one foreign program and ends its whole process tree when it ends, is stopped, or our parent dies.

    python -I -S guard.py GRACE_S COMMAND [ARGUMENT]...

Inference servers start further processes, some in their own sessions, and leave them behind when killed. Nor can they
be asked to die with the orchestrator. The guard can: the kernel sends it SIGTERM when the orchestrator dies, however
that happens, and makes it the parent of the program's orphans. Only Linux does both; elsewhere they are left out.

A program on another machine has two guards: one here, whose program is what reaches there (`ssh node2`), and one there
(`far_side.py`). They hold on to each other by the far one's standard input. It gets a line break every so often. When
none has come for too long, or the input ends, the far guard stops its program.

The guard exits as the program did. This file imports none of our modules, so it starts in milliseconds and is not
affected by the environment, which is the program's.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NoReturn

LEFTOVER_GRACE_S = 5.0  # processes that the program left behind may remove their shared memory and files this long
TRACKER_GRACE_S = 1.0
LOG_GRACE_S = 5.0  # wait this long for the end of a log, which a process that we cannot see may hold open
# A regular expression of what the log must not show, such as a key that the program prints.
SECRET_VARIABLE = "SPOT_ASYNC_SECRET"
REDACTED = b"***"
# What terminals obey, but for line ends, tabs and colours: escape sequences, control and direction characters in UTF-8.
OBEYED = re.compile(
    rb"\x1b(?!\[[0-9;]*m)|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80[\x8e\x8f\xa8-\xae]|"
    rb"\xe2\x81[\xa6-\xa9]"
)
CORES_VARIABLE = "SPOT_ASYNC_CORES"  # numbers of the cores to use
# Of the guard here: the text that its program reads first, and the seconds between two line breaks after that. The end
# of the input is how this program is told to stop, in place of a signal.
INPUT_VARIABLE = "SPOT_ASYNC_INPUT"
BEAT_VARIABLE = "SPOT_ASYNC_BEAT_S"
# Of the far guard: the longest silence on its own input, and a directory to remove at the end.
SILENCE_VARIABLE = "SPOT_ASYNC_SILENCE_S"
DIRECTORY_VARIABLE = "SPOT_ASYNC_DIRECTORY"
SAY_TIMEOUT_S = 1.0
KILL_INTERVAL_S = 0.05  # pause between two searches for processes that were started while others were killed

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STOP = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_AWAITED = {*_STOP, signal.SIGCHLD, signal.SIGALRM}  # the last ends a wait where there is no `sigtimedwait`


class Guard:
    """One program and everything below it."""

    def __init__(self, command: list[str]) -> None:
        prctl = _prctl()
        signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)  # they stay pending until `_wait` takes them
        # Schedulers send it to all processes of a job, and it is for the orchestrator. The program ignores it too.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
        silence_s = os.environ.pop(SILENCE_VARIABLE, None)
        self.is_far = silence_s is not None
        # The far guard's parent is not ours, and may be a thread that ends early. Its input tells it of every death.
        prctl(_PR_SET_PDEATHSIG, 0 if self.is_far else signal.SIGTERM)
        if os.environ.pop("SPOT_ASYNC_PARENT", str(os.getppid())) != str(os.getppid()):
            raise SystemExit("the orchestrator died before its server was started")
        secret = os.environ.pop(SECRET_VARIABLE, None)
        text, beat_s = os.environ.pop(INPUT_VARIABLE, None), float(os.environ.pop(BEAT_VARIABLE, "1"))
        self._directory = os.environ.pop(DIRECTORY_VARIABLE, None)
        take_given_cores()  # first, because only threads and processes started later follow

        def before_exec() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # in case the guard itself is killed

        said, output = os.pipe() if secret else (None, None)
        given = subprocess.DEVNULL if text is None else subprocess.PIPE
        # Keep the object: a deleted Popen polls its process, which could take the exit status from `_reap`.
        self._program = subprocess.Popen(command, preexec_fn=before_exec, stdin=given, stdout=output, stderr=output)
        self._log: threading.Thread | None = None
        if secret and said is not None and output is not None:
            os.close(output)  # the pipe ends when the last process below closes it, so ours must not stay open
            self._log = _start_thread(_copy_without, re.compile(secret.encode(), re.IGNORECASE), said)
        self._fed = text is not None
        self._closing = threading.Event()  # set: the program's input should end
        if text is not None and self._program.stdin is not None:
            _start_thread(_feed, self._program.stdin, text.encode(), beat_s, self._closing)
        if silence_s is not None:
            _start_thread(_stop_after_silence, float(silence_s))
        self.status: int | None = None  # the program's wait status, once it has ended
        self._has_children = True

    def run(self, grace_s: float) -> int:
        """Wait for the program, or for a signal to stop it. Return its wait status once no process is left."""
        if self._wait(lambda: self.status is not None, math.inf) in _STOP:
            if self._fed:
                self._closing.set()
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._program.pid, signal.SIGTERM)
            self._wait(lambda: self.status is not None, grace_s)
        if self.status is not None:
            self._signal_tree(signal.SIGTERM)
            self._wait(lambda: not self._has_children, LEFTOVER_GRACE_S)
        if self._has_children:
            # Resource trackers free what others left in /dev/shm, and then end by themselves.
            self._signal_tree(signal.SIGKILL, spared="multiprocessing.resource_tracker")
            self._wait(lambda: not self._has_children, TRACKER_GRACE_S)
        while self._has_children:
            self._signal_tree(signal.SIGKILL)
            self._wait(lambda: not self._has_children, KILL_INTERVAL_S)
        assert self.status is not None
        if self._log is not None:
            self._log.join(LOG_GRACE_S)
        if self._directory is not None:
            import shutil  # here, because it takes longer to import than all the rest

            shutil.rmtree(self._directory, ignore_errors=True)
        return self.status

    def _wait(self, done: Callable[[], bool], timeout_s: float) -> int | None:
        """Wait until `done` or the timeout. An unlimited wait also ends at a stop signal, which is returned."""
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
            elif sys.platform == "linux":
                signal.sigtimedwait(_AWAITED, left)  # further stop signals change nothing: we are stopping
            else:
                signal.setitimer(signal.ITIMER_REAL, left)
                signal.sigwait(_AWAITED)
                signal.setitimer(signal.ITIMER_REAL, 0)
            self._reap()
        return None

    def _reap(self) -> None:
        """Collect every child that has ended. The program's orphans are our children too."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._program.pid:
                    self.status = ended[1]
        except ChildProcessError:
            self._has_children = False

    def _signal_tree(self, number: int, spared: str | None = None) -> None:
        """Signal everything below, or all that is known, except processes with `spared` in their command line."""
        below = process_tree(os.getpid()).keys() - {os.getpid()}
        if sys.platform != "linux" and self.status is None:  # without /proc
            below = {self._program.pid}
        for pid in below:
            with contextlib.suppress(OSError):  # it ended meanwhile
                if spared is None or spared.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, number)


def _start_thread(work: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def _feed(program_input: BinaryIO, text: bytes, beat_s: float, closing: threading.Event) -> None:
    """Write `text`, then a line break every `beat_s`, until `closing` is set or nobody reads any more."""
    with contextlib.suppress(OSError), program_input:
        while True:
            program_input.write(text)
            program_input.flush()
            if closing.wait(beat_s):
                return
            text = b"\n"


def _stop_after_silence(longest_s: float) -> None:
    """Stop this process when its input ends, or when nothing comes for so long."""
    while (came := select.select([0], [], [], longest_s)[0]) and os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    if not came:
        _say(f"stopping: nothing heard from the run for {longest_s:g} s")


def _say(line: str) -> None:
    """Write a line to the log, unless that is full or gone: it is on the other machine, which may be out of reach."""
    with contextlib.suppress(OSError):
        if select.select([], [2], [], SAY_TIMEOUT_S)[1]:
            os.write(2, f"{line}\n".encode())


def _copy_without(secret: re.Pattern[bytes], source: int) -> None:
    """Copy lines from `source` to our output, with asterisks for what `secret` finds.

    Of what terminals obey, colours are left.
    Lines that cannot be written are lost: a full disk must not stop the program.
    """
    with open(source, "rb") as lines:
        for line in lines:
            with contextlib.suppress(OSError):
                os.write(sys.stdout.fileno(), OBEYED.sub(b"\xef\xbf\xbd", secret.sub(REDACTED, line)))


def take_given_cores() -> None:
    """Bind this process to the cores that our parent gave, if any. Use all if those are no longer available."""
    given = os.environ.pop(CORES_VARIABLE, None)
    if sys.platform == "linux" and given is not None:
        try:
            os.sched_setaffinity(0, {int(core) for core in given.split(",")})
        except OSError as error:
            sys.stderr.write(f"cannot be bound to cores {given}: {error.strerror}\n")


def process_tree(root: int) -> dict[int, list[str]]:
    """Return a process and its living descendants by pid, each with its fields of /proc/PID/stat from the state on.

    Empty when the process is gone, or where there is no /proc.
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
    """Return the prctl system call, looked up before any fork. Elsewhere than on Linux it does nothing."""
    if sys.platform != "linux":
        return lambda option, value: None
    call: Callable[[int, int], object] = ctypes.CDLL(None).prctl
    return call


def end_as(status: int) -> NoReturn:
    """Exit with the program's code, or die by the signal that it died by."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has left its core dump already
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def end_far(status: int) -> NoReturn:
    """Exit with the program's code, or as shells do for a signal. What reaches here may not pass a signal on."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        _say(f"error: the server was killed by {signal.Signals(-code).name}")
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    guard = Guard(sys.argv[2:])
    ended = guard.run(float(sys.argv[1]))
    end_far(ended) if guard.is_far else end_as(ended)
