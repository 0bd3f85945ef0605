"""Brings ranks of other nodes to the store in which the ranks of a process group find each other.

torch's store asks nobody who they are, so rank 0 has it on loopback alone. On another node the agent listens on
loopback in its place, and carries each connection through node 0's gate to the store.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress

from spot_async.base.addresses import LOOPBACK
from spot_async.base.tasks import while_alive
from spot_async.errors import ConfigError
from spot_async.trainer.nodes.connection import Connection, LostConnectionError
from spot_async.trainer.nodes.gate import UnknownSecretError

STORE_TIMEOUT_S = 600.0  # rank 0 may take long to import torch
CONNECT_EVERY_S = 0.1
PIECE_BYTES = 1 << 16

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def reserve_port() -> socket.socket:
    """Return a socket whose port of loopback nobody else is given, and on which rank 0 can listen while it is open."""
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((LOOPBACK, 0))
    return reserved


@asynccontextmanager
async def tunnel(enter: Callable[[], Awaitable[Connection[bytes]]]) -> AsyncIterator[int]:
    """Listen on loopback for the ranks of this node while inside; yield the port. `enter` reaches node 0.

    A connection that does not get through is closed: torch's client tries again.
    """
    async with asyncio.TaskGroup() as group:
        tasks: set[asyncio.Task[None]] = set()

        async def bring(*local: *Streams) -> None:
            try:
                far = await enter()
            except (OSError, UnknownSecretError, ConfigError):
                local[1].close()
            else:
                await carry(local, far)

        def attend(*local: *Streams) -> None:
            task = group.create_task(bring(*local), name="store tunnel")
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        with closing(await asyncio.start_server(attend, LOOPBACK, 0)) as server:
            try:
                yield server.sockets[0].getsockname()[1]
            finally:
                for task in tasks:
                    task.cancel()


async def bring_to_store(far: Connection[bytes], port: int) -> None:
    """Carry one connection to the store, which may not be there yet."""
    try:
        async with asyncio.timeout(STORE_TIMEOUT_S):
            local = await _connected(port)
    except TimeoutError:
        return
    await carry(local, far)


async def _connected(port: int) -> Streams:
    while True:
        try:
            return await asyncio.open_connection(LOOPBACK, port)
        except ConnectionRefusedError:
            await asyncio.sleep(CONNECT_EVERY_S)


async def carry(local: Streams, far: Connection[bytes]) -> None:
    """Pass on what both ends send until one of them closes. Then close both."""
    reader, writer = local

    async def out() -> None:
        while piece := await reader.read(PIECE_BYTES):
            far.send(piece)
            await far.drain()

    async def back() -> None:
        while True:
            writer.write(await far.receive())
            await writer.drain()

    try:
        with suppress(OSError, LostConnectionError):
            await while_alive(out(), back)
    finally:
        writer.close()
        await far.close()
