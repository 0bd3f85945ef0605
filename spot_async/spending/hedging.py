"""A second request for one that is slow: the first answer counts, and the other is given up.

Where a few answers take far longer than the rest, this buys a shorter wait with a few more requests. Knows nothing of
stages and servers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from spot_async.base.concurrency import first_error
from spot_async.errors import BudgetSpentError, RequestError

T = TypeVar("T")
WasSent = Callable[[float], None]


def hedge_delay_s(after_s: float, remaining_s: float) -> float | None:
    """Seconds from a request's sending to that of its second; None when its deadline leaves no time for one. Pure."""
    return after_s if after_s < remaining_s else None


async def hedged(first: Callable[[WasSent], Awaitable[T]], second: Callable[[], Awaitable[T]], after_s: float) -> T:
    """The first answer of the two.

    `first` calls what it is given once it is sent, with the seconds that it may take. A failure before the second is
    asked for is raised at once; after that both must fail, and the failure that came first is raised.
    """
    race: _Race[T] = _Race()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(race.run(first(race.was_sent)))]
            await race.until(lambda: race.remaining_s is not None or race.is_over(1))
            delay_s = None if race.remaining_s is None else hedge_delay_s(after_s, race.remaining_s)
            await race.until(lambda: race.is_over(1), timeout_s=delay_s)
            if not race.is_over(1):
                tasks.append(group.create_task(race.run(second())))
                await race.until(lambda: race.is_over(2))
            for each in tasks:
                each.cancel()
    except BaseExceptionGroup as failures:
        raise first_error(failures) from None
    return race.answer()


class _Race(Generic[T]):
    """How requests for the same answer stand."""

    def __init__(self) -> None:
        self.remaining_s: float | None = None  # for the first; None until it is sent
        self._answers: list[T] = []
        self._failures: list[RequestError | BudgetSpentError] = []
        self._changed = asyncio.Event()

    async def run(self, request: Awaitable[T]) -> None:
        try:
            self._answers.append(await request)
        except (RequestError, BudgetSpentError) as error:
            self._failures.append(error)
        self._changed.set()

    def was_sent(self, remaining_s: float) -> None:
        self.remaining_s = remaining_s
        self._changed.set()

    def is_over(self, entrants: int) -> bool:
        """Whether there is an answer, or nobody left who could give one."""
        return bool(self._answers) or len(self._failures) == entrants

    async def until(self, is_reached: Callable[[], bool], *, timeout_s: float | None = None) -> None:
        """Returns then, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not is_reached():
                    self._changed.clear()
                    await self._changed.wait()

    def answer(self) -> T:
        if self._answers:
            return self._answers[0]
        raise self._failures[0]
