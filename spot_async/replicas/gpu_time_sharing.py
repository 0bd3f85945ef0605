"""Shares the time of GPUs among pools of servers: one pool is awake, and the others sleep.

A time slice ends once a request waits for another pool and those that were let in have ended. The next is that of the
oldest prompt that waits. It lets in all that wait for it by then, so nobody starves, and few changes serve many
requests.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

from spot_async.base.retry import WEIGHT_UPDATE_TIMEOUT_S
from spot_async.base.tasks import Opened
from spot_async.base.waiting_room import Priority, WaitingRoom


class Asker(NamedTuple):
    priority: Priority
    role: str


class GpuTimeSharing(Opened):
    """A `Sleeper` of the pools that share GPUs. Entering starts one after the other, while those before it sleep.

    Keep `watch` running: it begins time slices.
    """

    def __init__(self) -> None:
        self.pools: dict[str, Any] = {}  # `ReplicaPool`s by role; all are there before it is entered
        self._awake: str | None = None
        self._admitted: str | None = None  # the role whose requests are let in
        self._in_flight = 0
        self._asking: list[Asker] = []
        self._room: WaitingRoom[Asker, bool] = WaitingRoom(self._admit, self.leave, lets_pass=lambda asker: True)
        self._is_training = False
        self._changing = asyncio.Lock()  # held while servers sleep and wake
        self._moved = asyncio.Event()

    async def _open(self, stack: AsyncExitStack) -> None:
        for pool in self.pools.values():
            await stack.enter_async_context(pool)
            await pool.sleep(deadline=_deadline())

    async def enter(self, role: str, priority: Priority) -> None:
        """Wait until the role's servers are awake for a request of this priority. Whoever entered must `leave`."""
        asker = Asker(priority, role)
        self._asking.append(asker)
        if role != self._admitted:
            self._admitted = None  # who comes from now on waits for another time slice
            self._moved.set()
        try:
            await self._room.enter(asker)
        finally:
            self._asking.remove(asker)

    def leave(self, granted: bool = True) -> None:
        self._in_flight -= 1
        self._moved.set()

    async def watch(self) -> None:
        """Begin time slices until this is cancelled. Raises what servers answer that do not sleep or wake."""
        while True:
            self._moved.clear()
            if self._asking and self._admitted is None and not self._in_flight and not self._is_training:
                await self._begin(min(self._asking).role)
            else:
                await self._moved.wait()

    async def _begin(self, role: str) -> None:
        async with self._changing:
            if role != self._awake:
                await self._put_to_sleep(_deadline())
                await self.pools[role].wake(deadline=_deadline())
                self._awake = role
            self._admitted = role
            self._room.admit()
            if any(each.role != role for each in self._asking):
                self._admitted = None

    async def _put_to_sleep(self, deadline: float) -> None:
        self._admitted = None
        if self._awake is not None:
            await self.pools[self._awake].sleep(deadline=deadline)
            self._awake = None

    @property
    def sleeps_while_training(self) -> bool:
        return any(pool.sleeps_while_training for pool in self.pools.values())

    async def sleep(self, *, deadline: float) -> None:
        self._is_training = True
        async with self._changing:
            await self._put_to_sleep(deadline)

    async def wake_weights(self, *, deadline: float) -> None:
        """Wake nothing: none of these servers takes new weights."""

    async def wake(self, *, deadline: float) -> None:
        """Let requests wake who is asked."""
        self._is_training = False
        self._moved.set()

    def _admit(self, asker: Asker) -> bool | None:
        if asker.role != self._admitted:
            return None
        self._in_flight += 1
        return True


def _deadline() -> float:
    return asyncio.get_running_loop().time() + WEIGHT_UPDATE_TIMEOUT_S
