"""Runs one kind of request: a stage has a bounded waiting room, its own concurrency and its own counters.

A request gets a slot of its stage, oldest prompt first, and then a lease on a server from its role's pool. It runs in
the asker's task. So cancelling the asker cancels the request, and there is no worker that could die unnoticed.

A failed request is retried until its deadline, on another server where there is one. The class of its error says how
often. What a request does is none of a stage's business.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Generic, Literal, TypeVar

import structlog

from spot_async.base.events import Channel
from spot_async.base.retry import RETRY_AFTER_SPREAD, RetryPolicy
from spot_async.base.text import shortened
from spot_async.base.waiting_room import Priority, WaitingRoom
from spot_async.errors import (
    LONGEST_PAUSE_S,
    ContractError,
    DeadlineExceededError,
    FailureClass,
    RequestError,
    ThrottledError,
)
from spot_async.replicas.leasing import Lease, LeaseRequest, ServicePool
from spot_async.stages.events import AttemptFailed, RequestAsked, RequestEnded

FAILED_KEPT = 64  # attempts of one request: it may be throttled for a day
REASON_CHARACTERS = 300

S = TypeVar("S")
T = TypeVar("T")


@dataclass
class StageCounters:
    """What a stage has done so far."""

    completed: int = 0
    work: int = 0  # tokens that the completed requests amounted to, where they say so
    failed: int = 0
    retried: int = 0
    ended: int = 0  # completed, failed or cancelled after they had a slot
    busy_s: float = 0.0  # summed over `ended`: mean in flight = busy_s / elapsed
    waited_s: float = 0.0  # summed time in the waiting room, and until a server could be had
    permanent: int = 0  # attempts that failed, by class
    throttled: int = 0
    transient: int = 0
    poisoned: int = 0
    lost_s: float = 0.0  # part of `busy_s`: attempts that failed, with the pauses after them; throttled ones left out

    def count_failure(self, failed: AttemptFailed) -> None:
        setattr(self, failed.failure, getattr(self, failed.failure) + 1)
        if failed.failure is not FailureClass.THROTTLED:
            self.lost_s += failed.lost_s


# Most requests never fail, so they share it.
NONE_YET: Mapping[FailureClass, int] = MappingProxyType({})


@dataclass(eq=False, slots=True)
class OpenRequest(LeaseRequest):
    """One request that a stage holds. The watchdog reads these to say what a run waits for.

    Times are in seconds on the event loop's clock.
    """

    asked_s: float = field(kw_only=True)
    started_s: float | None = None  # when its first lease was granted
    sent_s: float | None = None  # when the newest attempt got a server
    deadline: float = 0.0  # of all attempts
    attempt_deadline: float = 0.0  # of the newest attempt, and no later than that
    longest_retry_after_s: float = 0.0  # the longest pause that an endpoint has asked for
    paused_s: float = 0.0  # the sum of the pauses that endpoints asked for
    attempts: int = 0  # so far
    # Attempts that failed: each class has its retries.
    failures: Mapping[FailureClass, int] = field(default_factory=lambda: NONE_YET)
    failed: tuple[AttemptFailed, ...] = ()  # the newest of these attempts
    replica: str | None = None  # the one that has it; None while it waits for one, empty where the role has only one
    timer: asyncio.Timeout | None = None  # ends the attempt that a server has now at its deadline
    stopped_s: float | None = None  # since when its server stands still for new weights, and its clock with it

    @property
    def has_last_attempt(self) -> bool:
        """Whether the newest attempt may take all the time that is left."""
        return self.attempt_deadline >= self.deadline

    def clock_stopped(self, now_s: float) -> None:
        self.stopped_s = now_s
        self._set_timer(None)

    def clock_started(self, now_s: float) -> None:
        if self.stopped_s is not None:
            self.deadline += now_s - self.stopped_s
            self.attempt_deadline += now_s - self.stopped_s
            self.stopped_s = None
            self._set_timer(self.attempt_deadline)

    def _set_timer(self, when_s: float | None) -> None:
        if self.timer is not None and not self.timer.expired():
            self.timer.reschedule(when_s)


@dataclass(frozen=True, kw_only=True)
class StageLimits:
    """How many requests a stage has at once, for how long each, and how often it is sent."""

    concurrency: int
    timeout_s: float  # of all attempts
    attempt_timeout_s: float | None = None  # None: as long as all
    retry: RetryPolicy
    waiting_capacity: int
    requests_per_prompt: int | None = None  # at the same time; None: any number
    stated_by: str = ""  # the field of `PolicyNeeds` that states it
    # For how long a server may stand still for new weights while it has a request. Servers are told a deadline that is
    # later by this, since it cannot be put off. The stage itself keeps to the right one.
    longest_standstill_s: float = 0.0


class UpdatePause:
    """Holds requests back while a server that cannot do both loads weights. One for all stages of a role's servers."""

    def __init__(self) -> None:
        self._inside = 0
        self._ended = asyncio.Event()
        self._ended.set()
        self._emptied = asyncio.Event()
        self._emptied.set()

    @property
    def is_on(self) -> bool:
        return not self._ended.is_set()

    async def enter(self) -> None:
        """Wait until there is no pause, and go to the servers. Every request that went must `leave`."""
        while self.is_on:  # another one may begin before this task runs
            await self._ended.wait()
        self._inside += 1
        self._emptied.clear()

    def leave(self) -> None:
        self._inside -= 1
        if not self._inside:
            self._emptied.set()

    @asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """Begin a pause, wait until all have left, and end it after the block."""
        self._ended.clear()
        try:
            await self._emptied.wait()
            yield
        finally:
            self._ended.set()


@dataclass(eq=False)
class Stage(Generic[S]):
    """Admits requests by priority, at most `concurrency` at once, each with `timeout_s` for all its attempts.

    An attempt that has no answer after `attempt_timeout_s` has failed, and is made again while there is time.

    Neither counts the time that a request waits: for its turn, for a server, while its server stands still for new
    weights, or because an endpoint asked for a pause (Retry-After). Waiting is back-pressure and has no limit, except
    that the pauses together last a day at most.
    """

    name: str
    pool: ServicePool[S]
    limits: StageLimits
    _: KW_ONLY
    jitter: Callable[[], float]
    events: Channel = field(default_factory=Channel)  # it publishes its requests there
    pause: UpdatePause = field(default_factory=UpdatePause)  # holds its requests back on their way to a server

    def __post_init__(self) -> None:
        limits = self.limits
        self.concurrency = limits.concurrency
        self.counters = StageCounters()
        self.open: dict[OpenRequest, None] = {}  # waiting or in flight, in the order in which they were asked
        self._askers: defaultdict[int, int] = defaultdict(int)  # how many requests each prompt has here
        self._attempt_timeout_s = limits.timeout_s if limits.attempt_timeout_s is None else limits.attempt_timeout_s
        self._answered_s = float("-inf")  # when it had its newest answer
        self._slots_taken = 0
        self._room: WaitingRoom[OpenRequest, Literal[True]] = WaitingRoom(
            self._take_slot, self._free_slot, capacity=limits.waiting_capacity
        )

    @property
    def waiting(self) -> int:
        """Requests that no server has now: waiting for a turn, a server or the next attempt. Any thread may ask."""
        return sum(each.replica is None for each in tuple(self.open))

    @property
    def in_flight(self) -> int:
        """Requests that a server has now. Any thread may ask."""
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
        """Run `request(service, deadline)` when its turn comes and a server can take it; return its result.

        `deadline` is absolute, in seconds on the event loop's clock. The optional arguments help to choose a server
        and to judge its speed:

        * `session`: requests of one session share a prefix, and go to the server that holds it where possible.
        * `tokens`: the most tokens that the request may take of a rate limit, prompt and response together.
        * `work`: returns the tokens that a result amounts to, where that can be less than `tokens`.
        * `kind`: set where a stage has unlike requests, since latencies are compared only within a kind.

        Raise the request's own error once its retries are used up, and `DeadlineExceededError` at the deadline. Raise
        `ContractError` for one request more than a prompt may have at the same time.
        """
        most = self.limits.requests_per_prompt
        if most is not None and self._askers.get(priority[0], 0) >= most:
            raise ContractError(
                f"the policy asks {self.name} for {most + 1} answers of a prompt at once, and its needs state {most}: "
                f"set PolicyNeeds.{self.limits.stated_by} to what it asks for, or see that each request ends"
            )
        asked_s = asyncio.get_running_loop().time()
        self.events.publish(RequestAsked(asked_s))
        pending = OpenRequest(self.name, priority, session, tokens, kind, asked_s=asked_s)
        self.open[pending] = None
        self._askers[priority[0]] += 1
        try:
            await self._room.enter(pending)
            result = await self._answered(pending, request, work)
        finally:
            self._close(pending)
        self.counters.completed += 1
        self._answered_s = asyncio.get_running_loop().time()
        if work is not None:
            self.counters.work += pending.work
        return result

    def _close(self, pending: OpenRequest) -> None:
        prompt = pending.priority[0]
        del self.open[pending]
        self._askers[prompt] -= 1
        if not self._askers[prompt]:
            del self._askers[prompt]

    def _note_end(self, pending: OpenRequest, outcome: str) -> None:
        """Note how a request ended that had a slot, and free the slot."""
        ended_s = asyncio.get_running_loop().time()
        started_s = ended_s if pending.started_s is None else pending.started_s
        self.events.publish(
            RequestEnded(
                self.name,
                pending.priority,
                pending.asked_s,
                started_s,
                ended_s,
                outcome,
                pending.replica or "",
                pending.work if pending.kind == self.name else 0,
                pending.failed,
            )
        )
        self._free_slot()
        self.counters.ended += 1
        self.counters.busy_s += ended_s - started_s

    async def _answered(
        self, pending: OpenRequest, request: Callable[[S, float], Awaitable[T]], work: Callable[[T], int] | None
    ) -> T:
        """Make attempts until one gives a result, or none is left. Note how that ended, and free the slot."""
        outcome = "cancelled"
        try:
            while True:
                try:
                    result = await self._attempt(pending, request, work)
                    outcome = "done"
                    return result
                except RequestError as error:
                    delay_s = self._note_failure(pending, error)
                    if delay_s is None:
                        self.counters.failed += 1
                        outcome = type(error).__name__
                        raise
                self.counters.retried += 1
                pending.replica = None
                await asyncio.sleep(delay_s)
        finally:
            self._note_end(pending, outcome)

    async def _attempt(
        self, pending: OpenRequest, request: Callable[[S, float], Awaitable[T]], work: Callable[[T], int] | None
    ) -> T:
        """Send the request once, under a lease, until the attempt's deadline."""
        asked_s = asyncio.get_running_loop().time()
        pending.replica = pending.sent_s = None
        lease = await self._inside(pending)
        try:
            self._note_lease(pending, lease.replica, asked_s)
            async with lease as service:
                due_s = pending.attempt_deadline if pending.stopped_s is None else None
                try:
                    async with asyncio.timeout_at(due_s) as pending.timer:
                        result = await request(service, pending.attempt_deadline + self.limits.longest_standstill_s)
                except TimeoutError:
                    given_s = self.limits.timeout_s if pending.has_last_attempt else self._attempt_timeout_s
                    raise DeadlineExceededError(f"{self.name}: no answer within {given_s:g} s") from None
                finally:
                    pending.timer = None
                if work is not None:
                    pending.work = work(result)
                return result
        finally:
            self.pause.leave()

    def _note_lease(self, pending: OpenRequest, replica: str, asked_s: float) -> None:
        """Note the server of an attempt. The deadline counts from the first lease; later waiting extends it."""
        granted_s = asyncio.get_running_loop().time()
        pending.attempts += 1
        pending.replica, pending.sent_s = replica, granted_s
        if pending.started_s is None:
            pending.started_s = granted_s
            pending.deadline = granted_s + self.limits.timeout_s
            self.counters.waited_s += granted_s - pending.asked_s
        else:
            pending.deadline += granted_s - asked_s
        pending.attempt_deadline = min(pending.deadline, granted_s + self._attempt_timeout_s)

    def note_missing(self, what: str) -> None:
        """Count and publish that a request was answered, but not with what it was asked for."""
        now_s = asyncio.get_running_loop().time()
        self._publish_failure(AttemptFailed(self.name, now_s, now_s, None, FailureClass.TRANSIENT, what, what))

    def _publish_failure(self, failed: AttemptFailed) -> None:
        self.counters.count_failure(failed)
        self.events.publish(failed)

    def _note_failure(self, pending: OpenRequest, error: RequestError) -> float | None:
        """Return the seconds until the next attempt; None if there is none."""
        delay_s, failed_s = self._delay_s(pending, error), asyncio.get_running_loop().time()
        failed = AttemptFailed(
            self.name,
            failed_s if pending.sent_s is None else pending.sent_s,
            failed_s,
            delay_s,
            error.failure_class,
            error.brief,
            shortened(str(error), REASON_CHARACTERS),
            pending.replica or "",
        )
        pending.failed = (*pending.failed[1 - FAILED_KEPT :], failed)
        self._publish_failure(failed)
        return delay_s

    def _delay_s(self, pending: OpenRequest, error: RequestError) -> float | None:
        failure_class = error.failure_class
        count = pending.failures.get(failure_class, 0) + 1
        pending.failures = {**pending.failures, failure_class: count}
        attempts = sum(pending.failures.values())
        error.stage, error.attempts = self.name, attempts
        error.others_answered = pending.started_s is not None and self._answered_s > pending.started_s
        delay_s = self.limits.retry.delay_s(error, count, self.jitter(), has_time=not pending.has_last_attempt)
        if delay_s is not None and isinstance(error, ThrottledError) and error.retry_after_s is not None:
            pending.deadline += delay_s  # a pause asked for is back-pressure, as waiting for a server is
            pending.longest_retry_after_s = max(pending.longest_retry_after_s, delay_s)
            pending.paused_s += delay_s
            if pending.paused_s > (1.0 + RETRY_AFTER_SPREAD) * LONGEST_PAUSE_S:  # one pause may be as long as that
                return None
        if delay_s is None or asyncio.get_running_loop().time() + delay_s >= pending.deadline:
            return None
        # Throttled requests are sent again without limit: only failures 1, 2, 4, 8, ... are logged.
        if not isinstance(error, ThrottledError) or count & (count - 1) == 0:
            structlog.get_logger().warning("retry", stage=self.name, attempt=attempts, error=str(error))
        return delay_s

    async def _inside(self, pending: OpenRequest) -> Lease[S]:
        """Wait until there is no pause, and return a lease."""
        while True:
            await self.pause.enter()
            try:
                lease = await self.pool.lease(pending)
            except BaseException:
                self.pause.leave()
                raise
            if not self.pause.is_on:
                return lease
            # It began while this request waited for a lease. Whoever began it must not wait for this one too.
            lease.give_back()
            self.pause.leave()

    def _take_slot(self, pending: OpenRequest) -> Literal[True] | None:
        if self._slots_taken >= self.concurrency:
            return None
        self._slots_taken += 1
        return True

    def _free_slot(self, taken: Literal[True] = True) -> None:
        self._slots_taken -= 1
        self._room.admit()
