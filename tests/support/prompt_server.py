"""Uvicorn on a thread of a test."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import uvicorn


class PromptServer(uvicorn.Server):
    """One that ends as soon as it is told to, where the base looks ten times a second whether it was, and is done."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ended = threading.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none: signals belong to the test's own process."""
        yield

    def end(self) -> None:
        self._ended.set()

    async def main_loop(self) -> None:
        await self.on_tick(0)  # sets the headers of all replies
        await asyncio.to_thread(self._ended.wait)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for each in (*self.servers, *(sockets or [])):
            each.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110 - nobody is told of their ends
            await asyncio.sleep(0.001)
