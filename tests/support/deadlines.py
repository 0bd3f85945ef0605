"""Deadlines for requests of tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


def soon(seconds: float = 60.0) -> float:
    """Return a deadline that only what hangs passes, unless a test says otherwise."""
    return asyncio.get_running_loop().time() + seconds


@contextlib.asynccontextmanager
async def passed_once(reached: asyncio.Event, seconds: float = 61.0) -> AsyncIterator[None]:
    """Let the deadlines of `soon`, or further ones, pass when an event comes, not by waiting."""
    loop = asyncio.get_running_loop()
    clock = loop.time

    async def pass_on() -> None:
        await reached.wait()
        loop.time = lambda: clock() + seconds  # type: ignore[method-assign] # until the test ends, and its loop

    passing = asyncio.create_task(pass_on())
    try:
        yield
    finally:
        passing.cancel()
