"""Reads calls in turns, which a model wrote, in processes that can be killed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

import spot_async.models
from spot_async.base.processes.worker_pool import Words, WorkerDiedError, WorkerPool
from spot_async.base.tasks import Opened
from spot_async.errors import DeadlineExceededError
from spot_async.models.episodes import Call

MEMORY_LIMIT_BYTES = 2 << 30  # address space of a worker
TIMEOUT_S = 5.0  # of one turn, after which it counts as unreadable
WAIT_S = 600.0  # for a worker
_WORDS = Words("reader of calls", "die at the turns that they read", "`environment.workers`")
_WORKER = Path(spot_async.models.__path__[0]) / "calls_worker.py"


class CallReader(Opened):
    """Reads turns with a few processes, which it starts and ends."""

    def __init__(self, form: Mapping[str, Any], *, workers: int) -> None:
        """`form`: what `models/calls.read_calls` is given beside a turn."""
        self._form = form
        self._pool = WorkerPool(
            (sys.executable, "-P", str(_WORKER), str(MEMORY_LIMIT_BYTES)), size=workers, words=_WORDS
        )

    async def _open(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(self._pool)

    async def read(self, text: str) -> tuple[Call, ...]:
        """Return the calls of a turn, in order. Raises ValueError for one that cannot be read, or not in time."""
        deadline = asyncio.get_running_loop().time() + WAIT_S
        try:
            reply = await self._pool.ask({**self._form, "text": text}, timeout_s=TIMEOUT_S, deadline=deadline)
        except DeadlineExceededError:
            raise
        except (TimeoutError, WorkerDiedError):
            raise ValueError("it takes too long to read") from None
        if "unreadable" in reply:
            raise ValueError(reply["unreadable"])
        return msgspec.convert(reply["calls"], tuple[Call, ...])
