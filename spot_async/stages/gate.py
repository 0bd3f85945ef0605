"""Holds requests back while a server that cannot do both loads weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Lets requests through to a role's servers, except while somebody has drained them."""

    def __init__(self) -> None:
        self._inside = 0
        self._opened = asyncio.Event()
        self._opened.set()
        self._emptied = asyncio.Event()
        self._emptied.set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    async def enter(self) -> None:
        """Wait until the gate is open, and go in. Every request that went in must `leave`."""
        while not self.is_open:  # it may be closed again before this task runs
            await self._opened.wait()
        self._inside += 1
        self._emptied.clear()

    def leave(self) -> None:
        self._inside -= 1
        if not self._inside:
            self._emptied.set()

    @asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """Close the gate, wait until all have left, and open it again after the block."""
        self._opened.clear()
        try:
            await self._emptied.wait()
            yield
        finally:
            self._opened.set()
