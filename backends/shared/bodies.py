"""Receives bodies of replies within a limit of size, and reads large ones, without holding up the event loop.

A server may send without end, and a mebibyte of gzip may stand for a gibibyte. So a body is inflated in steps, and its
size is counted on the way. The event loop has its turn between two steps, so that deadlines work.

A large body is read in a thread, or on the loop itself in steps. A thread is good for arrays, whose checks release the
interpreter's lock. For text that is read row by row it is good only if there are few threads, because each can keep the
loop waiting for 5 ms, until the interpreter switches. It is no use if a single call decodes a whole text, because that
never releases the lock. Steps run one at a time, one in each turn of the loop, however many replies there are. With
eight scores at once, each 5 MB of JSON, the loop waited 4 ms at a time with steps, 20 ms with threads, and over 100 ms
with neither.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Generator
from typing import TypeVar

import aiohttp

ERROR_BYTES = 1 << 16  # read of a refusal
ANSWER_BYTES = 1 << 22  # allowed without tokens: a list of models, a server's settings or its metrics
PART_BYTES = 1 << 14  # read at a time, of what has arrived
TOKEN_BYTES = 512  # allowed for each token: its text, its id, and what else servers say about it
LOGPROB_BYTES = 256  # allowed for each log-probability; vLLM, the wordiest server, writes 81 on average
STEP_BYTES = 1 << 18  # inflated in one step, in less than a millisecond
ROWS_PER_STEP = 256  # these take half a millisecond with 16 log-probabilities per row
IDENTITY = "identity"
WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
RAW_WINDOW_BITS = -15
LARGE_REPLY_BYTES = 1 << 18  # JSON of this size takes some milliseconds
ZLIB_METHOD = 8  # in the low bits of a zlib header's first byte; some servers send `deflate` without that header

T = TypeVar("T")

Steps = Generator[None, None, T]  # yields between its steps and returns the result


class BadBodyError(Exception):
    """The body is not what its headers say, or larger than it may be."""


def largest_reply_bytes(tokens: int = 0, logprobs: int = 0) -> int:
    """Return the largest body allowed for a reply of so many tokens, with so many log-probabilities in all."""
    return ANSWER_BYTES + tokens * TOKEN_BYTES + logprobs * LOGPROB_BYTES


def header(response: aiohttp.ClientResponse, name: str, missing: str = "") -> str:
    """Return a header's value, of all its lines together."""
    return ", ".join(response.headers.getall(name, (missing,)))


def stated_length(response: aiohttp.ClientResponse) -> int:
    """Return the `Content-Length`; 0 if it is missing or unreadable, such as a number of 5,000 digits."""
    try:
        return int(header(response, "Content-Length", "0"))
    except ValueError:
        return 0


def parts_of(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the inflated body part by part. Raises `BadBodyError` if it cannot be inflated."""
    parts, named = response.content.iter_chunked(PART_BYTES), header(response, "Content-Encoding", IDENTITY)
    encoding = named.strip().lower()
    if encoding == IDENTITY:
        return parts
    if encoding not in WINDOW_BITS:
        raise BadBodyError(f"its Content-Encoding {named!r} was not asked for")
    return _inflated(parts, encoding)


async def _inflated(parts: AsyncIterator[bytes], encoding: str) -> AsyncIterator[bytes]:
    decoder = None
    async for part in parts:
        if not part:
            continue
        if decoder is None:
            is_raw = encoding == "deflate" and part[0] & 15 != ZLIB_METHOD
            decoder = zlib.decompressobj(RAW_WINDOW_BITS if is_raw else WINDOW_BITS[encoding])
        rest = part
        while True:
            try:
                inflated = decoder.decompress(rest, STEP_BYTES)
            except zlib.error as error:
                raise BadBodyError(f"it is no {encoding}: {error}") from None
            if inflated:
                yield inflated
            rest = decoder.unconsumed_tail
            if not rest and len(inflated) < STEP_BYTES:
                break
            await asyncio.sleep(0)
    if decoder is not None and not decoder.eof:
        raise BadBodyError(f"its {encoding} ends in the middle")


async def run_in_turn(busy: asyncio.Lock, steps: Steps[T]) -> T:
    """Run all steps, each in a turn of its own, and return the result. Of one lock, only one computation runs."""
    async with busy:
        while True:
            await asyncio.sleep(0)
            try:
                next(steps)
            except StopIteration as done:
                result: T = done.value
                return result


async def read_aside(reply: bytes, decode: Callable[[bytes], T]) -> T:
    """Return what `decode` makes of a reply. A large reply is decoded in a thread."""
    return await asyncio.to_thread(decode, reply) if len(reply) > LARGE_REPLY_BYTES else decode(reply)


def run_at_once(steps: Steps[T]) -> T:
    """Run all steps without pause, for a computation that is short, and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
