"""Reading large replies so that the event loop goes on: in a thread, or on the loop itself, one step a turn.

A thread suits arrays, whose checks let go of the interpreter's lock, and text that is read row by row while few others
are: each such thread keeps the loop from its turn for up to 5 ms, when the interpreter switches. It is no use where one
call decodes a whole text: that lets go of nothing. Steps come one after the other, however many replies there are. Of
eight scores at once, each 5 MB of JSON, the loop waited for 4 ms at a time in steps, for 20 ms in threads, and for more
than 100 ms with neither.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import TypeVar

LARGE_REPLY_BYTES = 1 << 18  # some milliseconds of JSON

T = TypeVar("T")

Steps = Generator[None, None, T]  # yields between its steps and returns the result


class StepRunner:
    """Runs computations in the order they come, one at a time."""

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
    """What `decode` makes of a reply, of a large one in a thread."""
    return await asyncio.to_thread(decode, reply) if len(reply) > LARGE_REPLY_BYTES else decode(reply)


def run_at_once(steps: Steps[T]) -> T:
    """The result of a computation that is short after all."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
