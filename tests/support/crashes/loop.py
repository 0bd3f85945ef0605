"""An event loop on virtual time in which the process may end at any step of any task.

Nothing that waits continues then: no `finally` of it does more than the frozen disk lets it.
"""

from __future__ import annotations

import asyncio
import warnings
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ready_order import ShufflingLoop

T = TypeVar("T")

MOST_AWAITS = 20  # of a task that is torn down


class CrashingLoop(ShufflingLoop):
    """Calls `crash` before the step `crash_at`, if that is not None. `crash` raises a KeyboardInterrupt."""

    def __init__(self, ready_order: int, crash: Callable[[], None]) -> None:
        super().__init__(ready_order)
        self.crash_at: int | None = None  # of `steps`
        self.steps = 0
        self._crash = crash

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, or to a crash, which is raised. The loop is closed then."""
        try:
            return self.run_until_complete(main)
        finally:
            self.set_exception_handler(lambda loop, context: None)
            with warnings.catch_warnings(action="ignore"):  # that something was never awaited
                for task in asyncio.all_tasks(self):
                    _abandon(task)
            self.close()

    def _run_once(self) -> None:
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        left = None if self.crash_at is None else self.crash_at - self.steps
        self.steps += len(ready)
        if left is not None and 0 <= left <= len(ready):
            ready.insert(left, asyncio.Handle(self._crash, (), self))
            self.crash_at = None
        super()._run_once()


def _abandon(task: asyncio.Task[Any]) -> None:
    """Tear a task down now, rather than whenever its memory is freed."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine: Any = task.get_coro()
    for _ in range(MOST_AWAITS):  # it may wait for something else as it is torn down
        try:
            coroutine.close()
        except BaseException:  # noqa: BLE001 - whatever its process would not have come to
            continue
        return
