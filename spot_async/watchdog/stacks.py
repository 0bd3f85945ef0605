"""Shows where asyncio tasks are, down whole chains of awaits, and where threads are.

`Task.get_stack` shows only the outermost coroutine of a suspended task. So stacks follow the coroutines' own links.
"""

from __future__ import annotations

import asyncio
import platform
import sys
import sysconfig
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

ASYNCIO = sysconfig.get_path("stdlib") + "/asyncio/"
OURS = str(Path(__file__).parents[1])
HELPERS = "asyncio_"  # how asyncio names the threads of `to_thread`
IDLE = "concurrent/futures/thread.py"  # where they wait for work
# Of system calls on an open file: read, write, pwrite64, writev, flock, fsync, fdatasync, ftruncate.
ON_FILES = {
    "x86_64": {0, 1, 18, 20, 73, 74, 75, 77},
    "aarch64": {63, 64, 68, 66, 32, 82, 83, 46},
}.get(platform.machine(), set())


@dataclass(frozen=True)
class TaskView:
    """One task that has not ended."""

    name: str
    stack: tuple[str, ...]  # lines `file:line in function`, the outermost coroutine first
    awaits: str  # what the innermost coroutine waits for

    @property
    def place(self) -> str:
        """The innermost line that is not asyncio's."""
        of_others = [line for line in self.stack if not line.startswith(ASYNCIO)]
        return (of_others or [*self.stack] or ["no line of Python"])[-1]


def task_views(loop: asyncio.AbstractEventLoop) -> list[TaskView]:
    """Return all tasks of a loop, by name. May be called from any thread."""
    views = [TaskView(task.get_name(), *_await_chain(task.get_coro())) for task in asyncio.all_tasks(loop)]
    return sorted(views, key=lambda view: view.name)


def _await_chain(awaitable: object) -> tuple[tuple[str, ...], str]:
    """Return the lines from a coroutine down to the innermost one, and what that one waits for as text."""
    lines: list[str] = []
    while True:
        for kind in ("cr", "gi", "ag"):  # attributes of coroutines, generator-based ones and asynchronous generators
            frame: FrameType | None = getattr(awaitable, f"{kind}_frame", None)
            if frame is not None:
                lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}")
                awaitable = getattr(awaitable, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
                break
        else:
            says_something = awaitable is not None and type(awaitable).__name__ != "FutureIter"
            return tuple(lines), repr(awaitable)[:200] if says_something else ""


def thread_place(ident: int) -> str:
    """Return the line that a thread is at, the line of ours that it was called from, and the file that it waits for.

    While the loop is blocked, its thread is at the line that blocks it.
    """
    frame = sys._current_frames().get(ident)
    if frame is None:
        return "no line of Python"
    places = [f"{line.filename}:{line.lineno} in {line.name}" for line in traceback.extract_stack(frame)]
    ours = [place for place in places if place.startswith(OURS)]
    place = places[-1] if not ours or places[-1] == ours[-1] else f"{places[-1]}, called at {ours[-1]}"
    thread = next((each for each in threading.enumerate() if each.ident == ident), None)
    opened = _opened_by_call(thread.native_id) if thread is not None and thread.native_id is not None else None
    return place if opened is None else f"{place} ({opened} does not answer)"


def _opened_by_call(thread: int) -> str | None:
    """Return the file that a thread of this process, by its native id, reads or writes now; None if that is unknown."""
    with suppress(OSError, ValueError):
        number, descriptor, *_ = Path(f"/proc/self/task/{thread}/syscall").read_text().split()
        if int(number) in ON_FILES:
            path = str(Path(f"/proc/self/fd/{int(descriptor, 16)}").readlink())
            return "the screen" if int(descriptor, 16) in (1, 2) or path.startswith(("/dev/pts/", "/dev/tty")) else path
    return None


def busy_threads() -> list[str]:
    """Return the lines that the event loop's helper threads are at, such as to write a checkpoint."""
    frames = sys._current_frames()
    helpers = [each for each in threading.enumerate() if each.name.startswith(HELPERS) and each.ident in frames]
    return [
        thread_place(each.ident)
        for each in helpers
        if each.ident is not None and not frames[each.ident].f_code.co_filename.endswith(IDLE)
    ]
