"""Reads bodies of requests within limits. A body that is too large is refused before it is in memory as a whole."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request

from spot_async.errors import RequestTooLargeError, ThrottledError

MIB = 1 << 20
# Limits of one body, and of all bodies together that have not been decoded yet.
MAX_BYTES, MAX_HELD_BYTES = 64 * MIB, 256 * MIB  # for our own messages, with many prompts or candidates
MAX_JSON_BYTES, MAX_HELD_JSON_BYTES = 8 * MIB, 128 * MIB  # lower, since JSON grows up to 25 times as Python objects
LARGE_SHARE = 1 / 8  # bodies above this share of the limit are large, and are decoded one at a time
OTHERS_TURN_S = 0.02  # all other requests have their turn this long before a large body, which may take half a second

# What decoding raises for a body that is not a request. RecursionError: it is nested too deep.
UNREADABLE = (msgspec.DecodeError, ValueError, TypeError, RecursionError)


class Bodies:
    """Counts the bytes of bodies being read, and hands out large bodies one at a time."""

    def __init__(self, max_bytes: int, max_held_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0
        self._large = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[memoryview]:
        """Read the request's body. Its bytes count until the `with` block ends.

        Raises `RequestTooLargeError` if it is too large, and `ThrottledError` if all bodies together are.
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
                    raise ThrottledError("the bodies of other requests take all the room there is: try again later")
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
