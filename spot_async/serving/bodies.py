"""Bodies of requests, read within bounds: one that is too large is refused before it is held, or read to its end."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request

from spot_async.errors import RequestTooLargeError, ThrottledError

MIB = 1 << 20
MAX_BYTES = 64 * MIB  # of the server's own messages: the candidates of a long response, many prompts at once
MAX_JSON_BYTES = 8 * MIB  # as Python's objects JSON takes up to 25 times its size
MAX_HELD_BYTES = 256 * MIB  # of all bodies that are not read to their end, or not understood yet

# What decoding raises for a body that is no request. Recursion: one that is nested too deep.
UNREADABLE = (msgspec.DecodeError, ValueError, TypeError, RecursionError)


class Bodies:
    """Counts what the bodies take that are being read."""

    def __init__(self, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request, max_bytes: int) -> AsyncIterator[memoryview]:
        """The request's body, which counts until the block is left.

        Raises `RequestTooLargeError` where it has more than `max_bytes`, and `ThrottledError` where all together have
        too many.
        """
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
            yield memoryview(body)
        finally:
            self._held_bytes -= len(body)


def _too_large(max_bytes: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"the request has more than {max_bytes // MIB} MiB: send fewer prompts at a time")
