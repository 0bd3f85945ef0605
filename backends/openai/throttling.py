"""Requests outside a stage, such as those of the start: no stage sends them again when an endpoint is busy."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from spot_async.base.concurrency import sent_again
from spot_async.base.retry import RetryPolicy

T = TypeVar("T")
THROTTLED_ONLY = RetryPolicy(attempts=1)  # which only the deadline ends


async def when_free(ask: Callable[[], Awaitable[T]], deadline: float) -> T:
    """What `ask` gives, once the endpoint no longer asks to be left alone. Other failures are raised at once."""
    return await sent_again(ask, THROTTLED_ONLY, deadline, jitter=random.random, what="start")
