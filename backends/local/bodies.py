"""What requests and replies have in common: their times, their sizes, and the frames of several replies."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator

from spot_async.errors import PoisonedReplyError
from spot_async.serving import api

from ..shared.bodies import largest_reply_bytes


def largest_generation(request: api.GenerateRequest) -> int:
    """Return how many bytes the reply can have."""
    tokens = request.sampling.max_tokens
    return largest_reply_bytes(tokens, tokens * (1 + request.top_k))


def take_frames(received: bytearray) -> Iterator[bytes]:
    """Cut whole frames off the front of `received` and yield them."""
    header = api.FRAME_HEADER
    while len(received) >= header.size:
        length, checksum = header.unpack_from(received)
        end = header.size + length
        if len(received) < end:
            return
        frame = bytes(memoryview(received)[header.size : end])
        if zlib.crc32(frame) != checksum:
            raise PoisonedReplyError("a reply changed on its way")
        yield frame
        del received[:end]


def time_left(deadline: float) -> float:
    """Return the seconds until a deadline on the running loop's clock."""
    return max(0.0, deadline - asyncio.get_running_loop().time())
