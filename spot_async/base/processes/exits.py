"""How processes of ours that another of ours has started begin and end, and what they are called.

This imports little, because it is the first thing that each of them does.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from spot_async.base.processes import guard

# Of the environment of a Python program that we start: a `random.py` in the working directory is not Python's own then.
# Python 3.11 and later heed it, and so does all Python that the program starts. Older ones ignore it.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}

_PR_SET_PDEATHSIG = 1


def exit_at_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the trace and exit: a `sys.excepthook` for a process whose interpreter might hang on its way out."""
    sys.__excepthook__(kind, error, trace)
    sys.stderr.flush()
    os._exit(1)


def exit_with_parent() -> None:
    """Make this child die with its parent, however the parent dies, and bind it to the cores that the parent gave.

    SIGUSR1 is ignored from now on: schedulers send it to all processes of a job, and it is for the parent. The first
    thing that a child of `ChildProcess` calls. Linux only; a no-op elsewhere, and in a process that a person started.
    """
    guard.take_given_cores()
    expected_parent = os.environ.get("SPOT_ASYNC_PARENT")
    if expected_parent is None or sys.platform != "linux":
        return
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(expected_parent):
        os._exit(1)  # the parent died before we asked


def answer_lines(load: Callable[[], Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """Be a worker (`worker_pool.py`): answer each JSON line of the input with one, by what `load` returns.

    The command's first argument limits the address space, in bytes, where the system can (macOS cannot). There are no
    core dumps. What `load` takes to import counts for no request, and what it and its answers print is not seen.
    """
    exit_with_parent()
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    answer = load()
    replies.write('{"ready": true}\n')
    for line in sys.stdin:
        replies.write(json.dumps(answer(json.loads(line))) + "\n")


def show_rank() -> None:
    """Call this process by its rank, as torch numbers the processes of one program. Stall reports show it."""
    with contextlib.suppress(OSError):  # elsewhere than on Linux
        Path("/proc/self/comm").write_text(f"rank {os.environ['RANK']}")
