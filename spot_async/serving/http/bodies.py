"""Bodies of requests, read within bounds: one that is too large is refused before it is held, or read to its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request

from spot_async.errors import RequestTooLargeError, ThrottledError

MIB = 1 << 20
# Of one body, and of all that are not read to their end, or not understood yet.
MAX_BYTES, MAX_HELD_BYTES = 64 * MIB, 256 * MIB  # of the server's own messages: many prompts, many candidates
MAX_JSON_BYTES, MAX_HELD_JSON_BYTES = 8 * MIB, 128 * MIB  # as Python's objects JSON takes up to 25 times its size
LARGE_SHARE = 1 / 8  # of what a body may have
OTHERS_TURN_S = 0.02  # for all other requests, between two large bodies: to understand one takes up to half a second

# What decoding raises for a body that is no request. Recursion: one that is nested too deep.
UNREADABLE = (msgspec.DecodeError, ValueError, TypeError, RecursionError)


class Bodies:
    """Counts what the bodies take that are being read, and hands out large ones one at a time."""

    def __init__(self, max_bytes: int, max_held_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0
        self._large = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[memoryview]:
        """The request's body, which counts until the block is left.

        Raises `RequestTooLargeError` where it has too many bytes, and `ThrottledError` where all together have.
        """
        max_bytes = self._max_bytes
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > max_bytes:
            raise _too_large(max_bytes)
        body = bytearray()
        try:
            async for part in request.stream():
                if len(body) + len(part) > max_bytes:
                    raise _too_large(max_bytes)
                if self._held_bytes + len(part) > self._max_held_bytes:
                    raise ThrottledError("other requests' bodies take all room that there is for them: try again later")
                body += part
                self._held_bytes += len(part)
            if len(body) < LARGE_SHARE * max_bytes:
                yield memoryview(body)
            else:
                async with self._large:
                    await asyncio.sleep(OTHERS_TURN_S)
                    yield memoryview(body)
        finally:
            self._held_bytes -= len(body)


def _too_large(max_bytes: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"the request has more than {max_bytes // MIB} MiB: send fewer prompts at a time")
