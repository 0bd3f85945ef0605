"""Requests outside a stage, such as those of the start: no stage sends them again when an endpoint is busy."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from spot_async.errors import ThrottledError
from spot_async.retry import RetryPolicy

T = TypeVar("T")
ATTEMPTS = 6
_retry = RetryPolicy(ATTEMPTS)


async def when_free(ask: Callable[[], Awaitable[T]], deadline: float) -> T:
    """What `ask` gives, once the endpoint no longer asks to be left alone. Other failures are raised at once."""
    attempt = 1
    while True:
        try:
            return await ask()
        except ThrottledError as error:
            delay_s = _retry.delay_s(error, attempt, random.random())
            if delay_s is None or asyncio.get_running_loop().time() + delay_s >= deadline:
                raise
        attempt += 1
        await asyncio.sleep(delay_s)
