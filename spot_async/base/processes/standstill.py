"""Says in words what the kernel knows of something that stands still: a process, or a thread in a system call."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from spot_async.base.processes import guard

STATES = {"T": "STOPPED by a signal", "Z": "ended", "D": "waits for a disk", "R": "runs", "S": "sleeps"}
STANDING = "TD"
# Of system calls on an open file: read, write, pwrite64, writev, flock, fsync, fdatasync, ftruncate.
ON_FILES = {
    "x86_64": {0, 1, 18, 20, 73, 74, 75, 77},
    "aarch64": {63, 64, 68, 66, 32, 82, 83, 46},
}.get(platform.machine(), set())


def standing_still(root: int) -> Iterator[str]:
    """Yield each living process below `root` that was stopped, or waits for a disk."""
    for pid, fields in sorted(guard.process_tree(root).items()):
        if pid != root and fields[0] in STANDING:
            yield f"{_name(pid)} (pid {pid}) {'is ' if fields[0] == 'T' else ''}{STATES[fields[0]]}"


def _name(pid: int) -> str:
    with suppress(OSError):  # the process ended meanwhile
        if (rank := re.search(rb"(?:^|\0)RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_bytes())) is not None:
            return f"rank {rank[1].decode()}"  # as torch numbers the processes of one program
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        if "-m" in arguments[:-1]:
            return arguments[arguments.index("-m") + 1]
        return Path(arguments[0]).name
    return "a process"


def opened_by_call(thread: int) -> str | None:
    """Return the file that a thread of this process, by its native id, reads or writes now; None if that is unknown."""
    with suppress(OSError, ValueError):
        number, descriptor, *_ = Path(f"/proc/self/task/{thread}/syscall").read_text().split()
        if int(number) in ON_FILES:
            path = str(Path(f"/proc/self/fd/{int(descriptor, 16)}").readlink())
            return "the screen" if int(descriptor, 16) in (1, 2) or path.startswith(("/dev/pts/", "/dev/tty")) else path
    return None
