"""Sends throttled requests again outside of stages, as in discovery. `shared/failures.py` says which are throttled."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from spot_async.base.retry import RetryPolicy
from spot_async.base.tasks import sent_again

T = TypeVar("T")
THROTTLED_ONLY = RetryPolicy(attempts=1)  # throttled requests have no limit but the deadline


async def when_free(ask: Callable[[], Awaitable[T]], deadline: float) -> T:
    """Return what `ask` gives once the endpoint no longer throttles. Raises other failures at once."""
    return await sent_again(ask, THROTTLED_ONLY, deadline, jitter=random.random, what="start")
