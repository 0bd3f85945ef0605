"""Whether a server lives, by questions that cost next to nothing, do not wait behind its work, and do not lie.

Servers answer from a process of their own in front of the engine, so most routes answer although the engine is frozen.
What has to ask the engine itself is answered between two of its steps, however many requests wait: `vllm_health` and
`sglang_health` know the routes. While an engine loads weights it answers nothing; then only the process in front is
asked (`Standstill`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator

from spot_async.errors import RequestError

Question = Callable[[], Awaitable[object]]


class Standstill:
    """When an engine is not to be asked, because its server loads weights or sleeps on our behalf."""

    def __init__(self) -> None:
        self._under_way = 0
        self._asleep = False
        self._changes = 0

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Around an update of weights."""
        self._under_way += 1
        self._changes += 1
        try:
            yield
        finally:
            self._under_way -= 1

    def sleeping(self, asleep: bool) -> None:
        """To be said before the server is sent to sleep, and once it is awake."""
        self._asleep = asleep
        self._changes += 1

    async def ping(self, engine: Question, process: Question) -> None:
        """Ask the engine, or while it stands still the process in front of it. Raises what the question raises."""
        changes = self._changes
        if self._under_way or self._asleep:
            await process()
            return
        try:
            await engine()
        except RequestError:
            if changes == self._changes:  # else it began to stand still meanwhile
                raise
