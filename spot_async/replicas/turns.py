"""Lets processes that share devices start one after another, since each looks at what is free while it starts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable, Mapping, Set
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any


class Turns:
    """Gives the turns in which servers and trainer start, and start again.

    The first time they come in the order of `devices`, which has the devices of each by its name. Later whoever comes
    first starts first. Who shares no device with others, or is not named, never waits.
    """

    def __init__(self, devices: Mapping[str, Set[Hashable]] | None = None) -> None:
        self._devices = dict(devices or {})
        self._started: set[str] = set()  # also those that failed to
        self._starting: set[Hashable] = set()  # devices on which something starts now
        self._ended = asyncio.Event()  # set whenever a turn ends

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """Wait until `name` may start. Inside, nothing else starts on its devices."""
        own = self._devices.get(name, frozenset())
        while not self._may_start(name, own):
            self._ended.clear()
            await self._ended.wait()
        self._starting |= own
        try:
            yield
        finally:
            self._starting -= own
            self._started.add(name)
            self._ended.set()

    def _may_start(self, name: str, own: Set[Hashable]) -> bool:
        if not own.isdisjoint(self._starting):
            return False
        for other, devices in self._devices.items():
            if other == name:
                return True
            if other not in self._started and not own.isdisjoint(devices):
                return False
        return True


class InTurn(AbstractAsyncContextManager[Any]):
    """Enters a context when it is the turn of its name. It is left at any time."""

    def __init__(self, turns: Turns, name: str, context: AbstractAsyncContextManager[Any]) -> None:
        self._turns = turns
        self._name = name
        self._context = context

    async def __aenter__(self) -> Any:
        async with self._turns.turn(self._name):
            return await self._context.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._context.__aexit__(kind, error, trace)
