"""A stage: one kind of request, with a bounded mailbox, its own concurrency and its own counters.

The request runs in the asker's task once a slot is free, oldest prompt first, and once its role's pool
has leased it a server. So cancelling the asker cancels the request, nothing is fire-and-forget, and there
is no worker that could die unnoticed. What a request does is none of a stage's business; failing requests
are retried by class until their deadline, on another server where there is one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import structlog

from spot_async.base.retry import RETRY_AFTER_SPREAD, RetryPolicy
from spot_async.base.waiting_room import Mailbox, Priority
from spot_async.errors import LONGEST_PAUSE_S, DeadlineExceededError, FailureClass, RequestError, ThrottledError
from spot_async.replicas.service_pool import Errand, Lease, ServicePool
from spot_async.spending.hedging import WasSent, hedged
from spot_async.stages.timeline import RequestSpan, Timeline, Timelines

S = TypeVar("S")
T = TypeVar("T")


@dataclass
class StageCounters:
    """What a stage has done so far."""

    completed: int = 0
    failed: int = 0
    retried: int = 0
    hedged: int = 0  # sent a second time because they were slow
    ended: int = 0  # completed, failed or cancelled once their turn had come
    busy_s: float = 0.0  # summed over `ended`: mean in flight = busy_s / elapsed
    waited_s: float = 0.0  # summed time in the mailbox, and until a server could be had
    permanent: int = 0  # attempts that failed, by class
    throttled: int = 0
    transient: int = 0
    poisoned: int = 0

    def count_failure(self, error: RequestError) -> None:
        setattr(self, error.failure_class, getattr(self, error.failure_class) + 1)


@dataclass(eq=False)
class OpenRequest:
    """One request that a stage holds. The watchdog reads these to say what a run waits for.

    Times are in seconds on the event loop's clock.
    """

    errand: Errand
    asked_s: float
    work: Callable[[Any], int] | None = None  # tokens that a result amounts to
    started_s: float | None = None  # when its first lease was granted
    deadline: float = 0.0
    longest_retry_after_s: float = 0.0  # that an endpoint has asked for
    paused_s: float = 0.0  # altogether, since it was asked to
    attempts: int = 0  # so far
    replica: str | None = None  # the one that has it: None while it waits for one, empty where the role has only one

    @property
    def priority(self) -> Priority:
        return self.errand.priority


class Stage(Generic[S]):
    """Admits requests by priority, at most `concurrency` at once, each with `timeout_s` for all its attempts.

    `timeout_s` does not count the time that a request waits: for its turn, for a server, or because an endpoint asked
    for a pause (Retry-After). Waiting is back-pressure, and takes as long as it must; pauses no more than a day.
    """

    def __init__(
        self,
        name: str,
        pool: ServicePool[S],
        *,
        concurrency: int,
        timeout_s: float,
        retry: RetryPolicy,
        mailbox_capacity: int,
        jitter: Callable[[], float],
        hedge_after_s: float | None = None,
    ) -> None:
        self.name = name
        self.concurrency = concurrency
        self.counters = StageCounters()
        self.timeline: Timeline = Timelines()
        self.open: dict[OpenRequest, None] = {}  # waiting or in flight, as they were asked
        self._pool = pool
        self._askers: Counter[int] = Counter()  # requests here, by prompt
        self._timeout_s = timeout_s
        self._retry = retry
        self._jitter = jitter
        self.hedge_after_s = hedge_after_s
        self._mailbox = Mailbox(mailbox_capacity)
        self._turns: dict[int, asyncio.Future[None]] = {}
        self._slots_taken = 0

    @property
    def waiting(self) -> int:
        """Requests that no server has now: waiting for a turn, a server or the next attempt. Any thread may ask."""
        return sum(each.replica is None for each in tuple(self.open))

    @property
    def in_flight(self) -> int:
        """Requests that a server has now. A hedged request counts once. Any thread may ask."""
        return sum(each.replica is not None for each in tuple(self.open))

    @property
    def prompts(self) -> int:
        """How many different prompts have a request here, waiting or in flight."""
        return len(self._askers)

    async def ask(
        self,
        priority: Priority,
        request: Callable[[S, float], Awaitable[T]],
        *,
        session: str | None = None,
        tokens: int = 0,
        work: Callable[[T], int] | None = None,
        kind: str = "",
    ) -> T:
        """Run `request(service, deadline)` when its turn comes and a server can take it; returns its result.

        `deadline` is absolute, in seconds on the event loop's clock. The optional arguments help to choose a server
        and to judge its speed:

        * `session`: requests of one session share a prefix, and go to the server that holds it where possible.
        * `tokens`: upper bound of the tokens, given and generated, that the request may take of a rate limit.
        * `work`: tokens that a result really amounts to, where `tokens` says more.
        * `kind`: set where a stage has unlike requests; only latencies of one kind are compared with each other.

        Raises the request's own error once its retries are used up, and `DeadlineExceededError` at the deadline.
        """
        asked_s = asyncio.get_running_loop().time()
        self.timeline.request_asked(asked_s)
        self._askers[priority[0]] += 1
        pending = OpenRequest(Errand(self.name, priority, session, tokens, kind), asked_s, work)
        self.open[pending] = None
        try:
            return await self._serve(pending, request)
        finally:
            del self.open[pending]
            self._askers[priority[0]] -= 1
            if not self._askers[priority[0]]:
                del self._askers[priority[0]]

    async def _serve(self, pending: OpenRequest, request: Callable[[S, float], Awaitable[T]]) -> T:
        loop = asyncio.get_running_loop()
        errand = pending.errand
        await self._acquire(errand.priority)
        outcome = "cancelled"
        try:
            result = await self._attempt(pending, request)
            outcome = "done"
        except RequestError as error:
            self.counters.failed += 1
            outcome = type(error).__name__
            raise
        finally:
            ended = loop.time()
            started = ended if pending.started_s is None else pending.started_s
            span = RequestSpan(
                self.name, errand.priority, pending.asked_s, started, ended, outcome, pending.replica or ""
            )
            self.timeline.request_ended(span)
            self._release()
            self.counters.ended += 1
            self.counters.busy_s += ended - started
        self.counters.completed += 1
        return result

    async def _attempt(self, pending: OpenRequest, request: Callable[[S, float], Awaitable[T]]) -> T:
        failures: Counter[FailureClass] = Counter()  # each class has a budget of its own
        while True:
            try:
                if self.hedge_after_s is None:
                    return await self._send_leased(pending, request)
                return await self._hedged(pending, request, self.hedge_after_s)
            except RequestError as error:
                failures[error.failure_class] += 1
                self.counters.count_failure(error)
                error.stage, error.attempts = self.name, failures.total()
                delay_s = self._retry.delay_s(error, failures[error.failure_class], self._jitter())
                if delay_s is not None and isinstance(error, ThrottledError) and error.retry_after_s is not None:
                    pending.deadline += delay_s  # a pause asked for is back-pressure, as waiting for a server is
                    pending.longest_retry_after_s = max(pending.longest_retry_after_s, delay_s)
                    pending.paused_s += delay_s
                    if pending.paused_s > (1.0 + RETRY_AFTER_SPREAD) * LONGEST_PAUSE_S:
                        raise
                if delay_s is None or asyncio.get_running_loop().time() + delay_s >= pending.deadline:
                    raise
                count = failures[error.failure_class]
                # Throttled requests are sent again without limit: only failures 1, 2, 4, 8, ... are logged.
                if not isinstance(error, ThrottledError) or count & (count - 1) == 0:
                    structlog.get_logger().warning("retry", stage=self.name, attempt=failures.total(), error=str(error))
            self.counters.retried += 1
            pending.replica = None
            await asyncio.sleep(delay_s)

    async def _hedged(self, pending: OpenRequest, request: Callable[[S, float], Awaitable[T]], after_s: float) -> T:
        """Send the request, and when it is slow once more, to another server where there is one."""
        asked_of: list[str] = []

        async def first(was_sent: WasSent) -> T:
            def leased(lease: Lease[S]) -> None:
                asked_of.append(lease.replica)
                was_sent(pending.deadline - asyncio.get_running_loop().time())

            return await self._send_leased(pending, request, leased)

        async def second() -> T:
            self.counters.hedged += 1
            pending.errand.failed_on.update(asked_of)
            again = replace(pending)  # with the same errand: servers lost to either count against both
            result = await self._send_leased(again, request)
            pending.replica = again.replica  # the one that answered
            return result

        return await hedged(first, second, after_s)

    async def _send_leased(
        self,
        pending: OpenRequest,
        request: Callable[[S, float], Awaitable[T]],
        leased: Callable[[Lease[S]], None] = lambda _: None,
    ) -> T:
        lease = await self._lease(pending)
        async with lease as service:
            leased(lease)
            result = await self._send(request, service, pending.deadline)
            if pending.work is not None:
                lease.work = pending.work(result)
            return result

    async def _lease(self, pending: OpenRequest) -> Lease[S]:
        """A server for the next attempt. The deadline counts from the first lease; later waiting extends it."""
        loop = asyncio.get_running_loop()
        asked = loop.time()
        pending.replica = None
        lease = await self._pool.lease(pending.errand)
        pending.attempts += 1
        pending.replica = lease.replica
        granted = loop.time()
        if pending.started_s is None:
            pending.started_s = granted
            pending.deadline = granted + self._timeout_s
            self.counters.waited_s += granted - pending.asked_s
        else:
            pending.deadline += granted - asked
        return lease

    async def _send(self, request: Callable[[S, float], Awaitable[T]], service: S, deadline: float) -> T:
        try:
            async with asyncio.timeout_at(deadline):
                return await request(service, deadline)
        except TimeoutError:
            raise DeadlineExceededError(f"{self.name}: no answer within {self._timeout_s:g} s") from None

    async def _acquire(self, priority: Priority) -> None:
        if self._slots_taken < self.concurrency and not self._mailbox:
            self._slots_taken += 1
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
        self._slots_taken -= 1
        while (ticket := self._mailbox.pop()) is not None:
            turn = self._turns[ticket]
            if not turn.done():  # a cancelled asker may not have had the time to leave the mailbox
                self._slots_taken += 1
                turn.set_result(None)
                return
