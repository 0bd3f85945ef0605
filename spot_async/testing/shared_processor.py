"""Does several jobs at once at a rate that depends on their number, as an inference server does. For virtual time."""

from __future__ import annotations

import asyncio
import copy
import heapq
from collections.abc import Callable

ROUNDING = 1e-6  # of amounts


class SharedProcessor:
    """Does several jobs at once, each at `rate(number of jobs)`. Nothing moves while it is paused.

    All jobs move at the same speed. So a job is done when the amount that any job would have got since the start has
    reached that job's end, and a heap of ends is enough.
    """

    def __init__(self, rate: Callable[[int], float]) -> None:
        self._rate = rate
        self._jobs: dict[int, asyncio.Future[None]] = {}
        self._ends: list[tuple[float, int]] = []  # a heap of (`_each_got` at the job's end, job)
        self._each_got = 0.0
        self._until_s = 0.0  # `_each_got` is counted up to here
        self._started = 0
        self._timer: asyncio.TimerHandle | None = None
        self._pauses: set[str] = set()  # why it is paused

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def each_got(self) -> float:
        """How much any job would have got since the start."""
        self._advance()
        return self._each_got

    async def do(self, amount: float) -> None:
        self._advance()
        number, done = self._started, asyncio.get_running_loop().create_future()
        self._started += 1
        self._jobs[number] = done
        heapq.heappush(self._ends, (self._each_got + amount, number))
        self._plan()
        try:
            await done
        finally:
            self._advance()
            self._jobs.pop(number, None)
            self._plan()

    def pause(self, paused: bool, why: str = "frozen") -> None:
        """Pause it for this reason, or end that pause. It goes on once no reason is left."""
        self._advance()
        if paused:
            self._pauses.add(why)
        else:
            self._pauses.discard(why)
        self._plan()

    def fail(self, error: Exception) -> None:
        """End all jobs with an `error` of their own."""
        for done in self._jobs.values():
            if not done.done():
                done.set_exception(copy.copy(error))
        self._jobs.clear()
        self._plan()

    def _advance(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._jobs and not self._pauses:
            self._each_got += self._rate(len(self._jobs)) * (now_s - self._until_s)
        self._until_s = now_s

    def _plan(self) -> None:
        while self._ends and self._ends[0][1] not in self._jobs:
            heapq.heappop(self._ends)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends and not self._pauses:
            left = max(0.0, self._ends[0][0] - self._each_got)
            self._timer = asyncio.get_running_loop().call_later(left / self._rate(len(self._jobs)), self._finish)

    def _finish(self) -> None:
        self._timer = None
        self._advance()
        while self._ends and self._ends[0][0] <= self._each_got + ROUNDING:
            done = self._jobs.pop(heapq.heappop(self._ends)[1], None)
            if done is not None and not done.done():
                done.set_result(None)
        self._plan()
