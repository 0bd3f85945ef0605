"""A server of a few lines on a socket of this process, for tests of what comes over the wire."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from spot_async.backends.shared.http import HttpEndpoint

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def listening(serve: Serve) -> AsyncIterator[str]:
    """Serve each connection by `serve`. The value is the server's address."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    with contextlib.closing(server):
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@contextlib.asynccontextmanager
async def endpoint_of(serve: Serve) -> AsyncIterator[HttpEndpoint]:
    """A teacher's endpoint at such a server."""
    async with listening(serve) as url, HttpEndpoint("teacher", url) as endpoint:
        yield endpoint
