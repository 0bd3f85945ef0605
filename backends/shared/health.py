"""Health checks that are cheap, bypass the request queue, and fail on a hung server.

A process in front of the engine answers HTTP, so most routes answer even if the engine is frozen. The backends'
`health.py` know the routes that ask the engine itself, which answers between two of its steps however many requests
wait. While an engine loads weights or sleeps it answers nothing. Then only the process in front is asked
(`Standstill`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator

from spot_async.errors import RequestError

Question = Callable[[], Awaitable[object]]


class Standstill:
    """Knows when not to ask an engine, because its server is loading weights or sleeping for us."""

    def __init__(self) -> None:
        self._under_way = 0
        self._asleep = False
        self._changes = 0

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Note that an update of weights is under way during the `with` block."""
        self._under_way += 1
        self._changes += 1
        try:
            yield
        finally:
            self._under_way -= 1

    def sleeping(self, asleep: bool) -> None:
        """Note that the server sleeps. Call this before sending it to sleep, and again once it is awake."""
        self._asleep = asleep
        self._changes += 1

    async def ping(self, engine: Question, process: Question) -> None:
        """Ask the engine, or the process in front of it while the engine stands still. Raises what was raised."""
        changes = self._changes
        if self._under_way or self._asleep:
            await process()
            return
        try:
            await engine()
        except RequestError:
            if changes == self._changes:  # otherwise the engine began to stand still while it was being asked
                raise
