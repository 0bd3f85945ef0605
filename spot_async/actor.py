"""A stage: one kind of request, with a bounded mailbox, its own concurrency and its own counters.

The request runs in the asker's task once a slot is free, oldest prompt first. So cancelling the asker
cancels the request, nothing is fire-and-forget, and there is no worker that could die unnoticed.
What a request does is none of a stage's business; failing requests are retried by class within one
absolute deadline.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog

from spot_async.errors import DeadlineExceededError, RequestError, ThrottledError
from spot_async.retry import RetryPolicy
from spot_async.timeline import OpenRequest, RequestSpan, Timeline, Timelines

T = TypeVar("T")
Priority = tuple[int, ...]  # smaller goes first; starts with the prompt's ordinal


class Mailbox:
    """The waiting room as a pure state machine: a bounded priority queue whose entries may leave early."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._heap: list[tuple[Priority, int]] = []
        self._waiting: set[int] = set()
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, priority: Priority) -> int:
        """Enter; returns a ticket. Admission bounds the entries, so a full mailbox is a bug."""
        if len(self._waiting) >= self._capacity:
            raise OverflowError(f"mailbox holds {self._capacity} requests already: admission let in too many")
        ticket = self._arrivals
        self._arrivals += 1
        heapq.heappush(self._heap, (priority, ticket))
        self._waiting.add(ticket)
        return ticket

    def discard(self, ticket: int) -> None:
        """Leave without being served."""
        self._waiting.discard(ticket)

    def pop(self) -> int | None:
        """The ticket to serve next: smallest priority, then earliest arrival; None when empty."""
        while self._heap:
            _, ticket = heapq.heappop(self._heap)
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                return ticket
        return None


@dataclass
class StageCounters:
    """What a stage has done so far."""

    completed: int = 0
    failed: int = 0
    retried: int = 0
    busy_s: float = 0.0  # summed over requests: mean in flight = busy_s / elapsed
    waited_s: float = 0.0  # summed time in the mailbox


class Stage:
    """Admits requests by priority, at most `concurrency` at once, each with `timeout_s` for all its attempts.

    Waiting for a turn does not count: it is back-pressure, and as long as it is meant to be.
    """

    def __init__(
        self,
        name: str,
        *,
        concurrency: int,
        timeout_s: float,
        retry: RetryPolicy,
        mailbox_capacity: int,
        jitter: Callable[[], float],
    ) -> None:
        self.name = name
        self.concurrency = concurrency
        self.counters = StageCounters()
        self.in_flight = 0
        self.timeline: Timeline = Timelines()
        self.open: set[OpenRequest] = set()  # waiting or in flight
        self._askers: Counter[int] = Counter()  # requests here, by prompt
        self._timeout_s = timeout_s
        self._retry = retry
        self._jitter = jitter
        self._mailbox = Mailbox(mailbox_capacity)
        self._turns: dict[int, asyncio.Future[None]] = {}

    @property
    def waiting(self) -> int:
        return len(self._mailbox)

    @property
    def prompts(self) -> int:
        """How many different prompts have a request here, waiting or in flight."""
        return len(self._askers)

    async def ask(self, priority: Priority, request: Callable[[float], Awaitable[T]]) -> T:
        """Run `request(deadline)` when its turn comes.

        Raises what the request raised once retries are used up, `DeadlineExceededError` at the deadline.
        """
        self._askers[priority[0]] += 1
        opened = OpenRequest(priority, asyncio.get_running_loop().time())
        self.open.add(opened)
        try:
            return await self._serve(opened, request)
        finally:
            self.open.remove(opened)
            self._askers[priority[0]] -= 1
            if not self._askers[priority[0]]:
                del self._askers[priority[0]]

    async def _serve(self, opened: OpenRequest, request: Callable[[float], Awaitable[T]]) -> T:
        loop = asyncio.get_running_loop()
        priority, asked = opened.priority, opened.asked_s
        await self._acquire(priority)
        opened.started_s = started = loop.time()
        self.counters.waited_s += started - asked
        deadline = started + self._timeout_s
        outcome = "cancelled"
        try:
            async with asyncio.timeout_at(deadline):
                result = await self._attempt(opened, request, deadline)
            outcome = "done"
        except TimeoutError:
            self.counters.failed += 1
            outcome = DeadlineExceededError.__name__
            raise DeadlineExceededError(f"{self.name}: no answer within {self._timeout_s:g} s") from None
        except RequestError as error:
            self.counters.failed += 1
            outcome = type(error).__name__
            raise
        finally:
            ended = loop.time()
            self.timeline.request_ended(RequestSpan(self.name, priority, asked, started, ended, outcome))
            self._release()
            self.counters.busy_s += ended - started
        self.counters.completed += 1
        return result

    async def _attempt(self, opened: OpenRequest, request: Callable[[float], Awaitable[T]], deadline: float) -> T:
        failures: Counter[bool] = Counter()  # by whether the endpoint asked to wait: that uses up no attempts
        while True:
            opened.attempts += 1
            try:
                return await request(deadline)
            except RequestError as error:
                is_throttled = isinstance(error, ThrottledError)
                failures[is_throttled] += 1
                delay_s = self._retry.delay_s(error, failures[is_throttled], self._jitter())
                if delay_s is None or asyncio.get_running_loop().time() + delay_s >= deadline:
                    raise
                structlog.get_logger().warning("retry", stage=self.name, attempt=failures.total(), error=str(error))
            self.counters.retried += 1
            await asyncio.sleep(delay_s)

    async def _acquire(self, priority: Priority) -> None:
        if self.in_flight < self.concurrency and not self._mailbox:
            self.in_flight += 1
            return
        ticket = self._mailbox.add(priority)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns[ticket] = turn
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release()  # the turn came as we were cancelled: pass it on
            raise
        finally:
            self._mailbox.discard(ticket)
            self._turns.pop(ticket, None)

    def _release(self) -> None:
        self.in_flight -= 1
        while (ticket := self._mailbox.pop()) is not None:
            turn = self._turns[ticket]
            if not turn.done():  # a cancelled asker may not have had the time to leave the mailbox
                self.in_flight += 1
                turn.set_result(None)
                return
