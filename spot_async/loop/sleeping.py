"""Has the student's servers sleep while the trainer, on the same devices, trains, and wakes them with new weights.

They wake in this order: memory for weights, new weights, the rest. So the old weights and the cache of keys and values
never lie beside what an update needs, and no request is answered by weights that are about to be replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from spot_async.base.tasks import gather
from spot_async.errors import RequestError
from spot_async.protocols import Sleeper

LAST_WAKE_TIMEOUT_S = 30.0  # after a failure, which must not wait long to be told


class SleepingServers:
    """The servers of a run that share the trainer's devices. There may be none."""

    def __init__(self, sleepers: Sequence[Sleeper], timeout_s: float) -> None:
        """`timeout_s` is for one step: to sleep, or to wake a part."""
        self._sleepers = sleepers
        self._timeout_s = timeout_s
        self._are_asleep = False

    def __bool__(self) -> bool:
        return bool(self._sleepers)

    async def sleep(self) -> None:
        self._are_asleep = True
        await gather(each.sleep(deadline=self._deadline()) for each in self._sleepers)

    @asynccontextmanager
    async def updated(self) -> AsyncIterator[None]:
        """Wake what an update of weights needs. It is made inside; the rest wakes after it."""
        if self._are_asleep:
            await gather(each.wake_weights(deadline=self._deadline()) for each in self._sleepers)
        yield
        if self._are_asleep:
            await gather(each.wake(deadline=self._deadline()) for each in self._sleepers)
            self._are_asleep = False

    async def end(self) -> None:
        """Wake what still sleeps at the end of a run, since servers that are not ours outlive it.

        A server that ended needs no waking, and must not hide what failed first.
        """
        if self._are_asleep:
            deadline = asyncio.get_running_loop().time() + LAST_WAKE_TIMEOUT_S
            with contextlib.suppress(RequestError):
                await gather(each.wake(deadline=deadline) for each in self._sleepers)

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout_s
