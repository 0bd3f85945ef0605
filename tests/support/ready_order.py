"""An event loop on virtual time that shuffles the tasks that are ready at the same moment, by a seed."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from spot_async.testing.virtual_time import VirtualTimeLoop

T = TypeVar("T")


class ShufflingLoop(VirtualTimeLoop):
    """Plain callbacks (`call_soon`) keep their order, which asyncio promises. Without a seed tasks do so too."""

    def __init__(self, ready_order: int | None) -> None:
        self._shuffled = None if ready_order is None else random.Random(ready_order)
        super().__init__()

    def _run_once(self) -> None:
        # asyncio has no hook for the order of what is ready, so this uses the queue that `call_soon` fills.
        if self._shuffled is not None:
            ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
            places = [i for i, handle in enumerate(ready) if _is_task_step(handle)]
            steps = [ready[i] for i in places]
            self._shuffled.shuffle(steps)
            for i, step in zip(places, steps, strict=True):
                ready[i] = step
        super()._run_once()


def _is_task_step(handle: asyncio.Handle) -> bool:
    return isinstance(getattr(handle._callback, "__self__", None), asyncio.Task)  # type: ignore[attr-defined]


def run_shuffled(main: Coroutine[Any, Any, T], ready_order: int | None) -> T:
    """Run a coroutine as `run_on_virtual_time` does, on a `ShufflingLoop`."""
    with asyncio.Runner(loop_factory=partial(ShufflingLoop, ready_order)) as runner:
        return runner.run(main)
