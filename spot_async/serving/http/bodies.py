"""Reads bodies of requests within limits. A body that is too large is refused before it is in memory as a whole."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request

from spot_async.errors import RequestTooLargeError, ThrottledError

MIB = 1 << 20
# Limits of one of our own messages, with many prompts or candidates, and of all that have not been decoded yet.
MAX_BYTES, MAX_HELD_BYTES = 64 * MIB, 256 * MIB
LARGE_SHARE = 1 / 8  # bodies above this share of the limit are large, and are decoded one at a time
LONGEST_S = 300.0  # that a body may take
SAFE_S = 5.0  # so long it is given up for no other
OTHERS_TURN_S = 0.02  # all other requests have their turn this long before a large body, which may take half a second

# What decoding raises for a body that is not a request. RecursionError: it is nested too deep.
UNREADABLE = (msgspec.DecodeError, ValueError, TypeError, RecursionError)


class _Reading:
    """A body that is on its way."""

    def __init__(self, began_s: float, limit: asyncio.Timeout) -> None:
        self.began_s = began_s
        self.limit = limit
        self.body = bytearray()
        self.held_bytes = 0


class Bodies:
    """Counts the bytes of bodies being read, and hands out large bodies one at a time.

    A body that comes slowly, or never whole, must not keep others out: where there is no room for another one, that
    which has been on its way for longest is given up.
    """

    def __init__(self, max_bytes: int, max_held_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0
        self._coming: list[_Reading] = []  # the oldest first
        self._large = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[memoryview]:
        """Read the request's body. Its bytes count until the `with` block ends.

        Raises `RequestTooLargeError` if it is too large, and `ThrottledError` if all bodies together are or if it comes
        too slowly.
        """
        max_bytes = self._max_bytes
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > max_bytes:
            raise _too_large(max_bytes)
        now_s = asyncio.get_running_loop().time()
        reading = _Reading(now_s, asyncio.timeout_at(now_s + LONGEST_S))
        try:
            await self._read(request, reading)
            if len(reading.body) < LARGE_SHARE * max_bytes:
                yield memoryview(reading.body)
            else:
                async with self._large:
                    await asyncio.sleep(OTHERS_TURN_S)
                    yield memoryview(reading.body)
        finally:
            self._held_bytes -= reading.held_bytes

    async def _read(self, request: Request, reading: _Reading) -> None:
        self._coming.append(reading)
        try:
            async with reading.limit:
                async for part in request.stream():
                    if len(reading.body) + len(part) > self._max_bytes:
                        raise _too_large(self._max_bytes)
                    self._make_room(len(part), reading)
                    reading.body += part
                    reading.held_bytes += len(part)
                    self._held_bytes += len(part)
        except TimeoutError:
            raise ThrottledError("the request's body came too slowly: try again later") from None
        finally:
            self._coming.remove(reading)

    def _make_room(self, size: int, reading: _Reading) -> None:
        """Make room for a part of one body. Raises `ThrottledError` if there is none to be had."""
        now_s = asyncio.get_running_loop().time()
        for other in self._coming:
            if self._held_bytes + size <= self._max_held_bytes:
                return
            if other is not reading and other.held_bytes and now_s - other.began_s > SAFE_S:
                self._held_bytes -= other.held_bytes
                other.held_bytes = 0
                other.body.clear()
                other.limit.reschedule(now_s)
        if self._held_bytes + size > self._max_held_bytes:
            raise ThrottledError("the bodies of other requests take all the room there is: try again later")


def _too_large(max_bytes: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"the request has more than {max_bytes // MIB} MiB: send fewer prompts at a time")
