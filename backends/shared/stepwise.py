"""Reads large replies without holding up the event loop: in a thread, or on the loop itself in steps.

A thread is good for arrays, whose checks release the interpreter's lock. For text that is read row by row it is good
only if there are few threads, because each can keep the loop waiting for 5 ms, until the interpreter switches. It is no
use if a single call decodes a whole text, because that never releases the lock.

Steps run one at a time, one in each turn of the loop, however many replies there are. With eight scores at once, each
5 MB of JSON, the loop waited 4 ms at a time with steps, 20 ms with threads, and over 100 ms with neither.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import TypeVar

LARGE_REPLY_BYTES = 1 << 18  # JSON of this size takes some milliseconds

T = TypeVar("T")

Steps = Generator[None, None, T]  # yields between its steps and returns the result


class StepRunner:
    """Runs computations in order of arrival, one at a time."""

    def __init__(self) -> None:
        self._busy = asyncio.Lock()

    async def run(self, steps: Steps[T]) -> T:
        async with self._busy:
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
