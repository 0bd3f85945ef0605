"""Does what may hang, such as writing to a disk or a screen, for so long and no longer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def in_time(work: Callable[[], T], seconds: float) -> T | None:
    """Return what `work` returns, which is done in a thread; None if that takes longer, or the system refuses it.

    The thread is then left alone: nothing can end it, and it does not keep the process from its end.
    """
    results: list[T] = []

    def run() -> None:
        with suppress(OSError):
            results.append(work())

    thread = threading.Thread(target=run, name="in time", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
