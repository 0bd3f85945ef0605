"""Does several jobs at once at a rate that depends on their number, as an inference server does. For virtual time."""

from __future__ import annotations

import asyncio
import copy
import heapq
from collections.abc import Callable
from typing import NamedTuple

ROUNDING = 1e-6  # of amounts


class _Job(NamedTuple):
    done: asyncio.Future[None]
    shares: int


class SharedProcessor:
    """Does several jobs at once. A job has one share or several, and each share moves at `rate(number of shares)`.

    Nothing moves while it is paused. All shares move at the same speed. So a job is done when the amount that any share
    would have got since the start has reached that job's end, and a heap of ends is enough.
    """

    def __init__(self, rate: Callable[[int], float]) -> None:
        self._rate = rate
        self._jobs: dict[int, _Job] = {}
        self._shares = 0  # of all jobs together
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
        """How much any share would have got since the start."""
        self._advance()
        return self._each_got

    async def do(self, amount: float, shares: int = 1) -> None:
        """Do a job: as much on all of its shares together."""
        self._advance()
        number, done = self._started, asyncio.get_running_loop().create_future()
        self._started += 1
        self._jobs[number] = _Job(done, shares)
        self._shares += shares
        heapq.heappush(self._ends, (self._each_got + amount / shares, number))
        self._plan()
        try:
            await done
        finally:
            self._advance()
            self._take(number)
            self._plan()

    def pause(self, paused: bool, why: str = "frozen") -> None:
        """Pause it for this reason, or end that pause. It continues once no reason is left."""
        self._advance()
        if paused:
            self._pauses.add(why)
        else:
            self._pauses.discard(why)
        self._plan()

    def fail(self, error: Exception) -> None:
        """End all jobs with an `error` of their own."""
        for number in list(self._jobs):
            job = self._take(number)
            if job is not None and not job.done.done():
                job.done.set_exception(copy.copy(error))
        self._plan()

    def _take(self, number: int) -> _Job | None:
        """Take a job out, unless it is out already."""
        job = self._jobs.pop(number, None)
        if job is not None:
            self._shares -= job.shares
        return job

    def _advance(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._jobs and not self._pauses:
            self._each_got += self._rate(self._shares) * (now_s - self._until_s)
        self._until_s = now_s

    def _plan(self) -> None:
        while self._ends and self._ends[0][1] not in self._jobs:
            heapq.heappop(self._ends)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends and not self._pauses:
            left = max(0.0, self._ends[0][0] - self._each_got)
            self._timer = asyncio.get_running_loop().call_later(left / self._rate(self._shares), self._finish)

    def _finish(self) -> None:
        self._timer = None
        self._advance()
        reached = max(self._each_got + ROUNDING, self._ends[0][0])  # the first job is due, whatever rounding says
        while self._ends and self._ends[0][0] <= reached:
            job = self._take(heapq.heappop(self._ends)[1])
            if job is not None and not job.done.done():
                job.done.set_result(None)
        self._plan()
