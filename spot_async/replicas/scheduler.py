"""Grants leases: decides which replica a request goes to, and lets requests wait until one has room.

The oldest prompt comes first, over all stages of a role, and nobody overtakes. If a rate limit has no room for the
first request, those behind it wait too, since large requests would never leave otherwise. Only a request that is
suspected to end servers (`LeaseRequest.is_suspected`), and must wait for a server without another suspect, lets others
pass.

Nothing is polled. The next request gets its turn when a place comes free, when a replica comes back, or when the timer
of a rate limit or of a pause runs out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic

import structlog

from spot_async.base.text import counted, rough_time
from spot_async.base.waiting_room import WaitingRoom
from spot_async.errors import (
    HTTP_ERROR,
    LONG_PAUSE_S,
    DeadlineExceededError,
    PoisonedReplyError,
    RequestError,
    ServerRestartedError,
    ThrottledError,
    TransientError,
)
from spot_async.replicas.concurrency_limit import Decrease
from spot_async.replicas.leasing import LeaseRequest
from spot_async.replicas.life_cycle import State
from spot_async.replicas.replica import B, HeldLease, Replica, Trouble
from spot_async.replicas.router import Router
from spot_async.spending.rate_limit import RateLimiter
from spot_async.types import WeightVersion


@dataclass(eq=False)
class Scheduler(Generic[B]):
    """Grants the leases of one role."""

    replicas: list[Replica[B]]
    rate_limit: RateLimiter | None
    warn: Callable[[str], None] = lambda line: None  # gets the first line of a kind, and ever fewer of those after it
    # Replicas with other weights get no requests; see `replica_moved`.
    version: WeightVersion | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._alive: list[Replica[B]] | None = None  # those that take requests; None: to be found anew
        self._timer: asyncio.TimerHandle | None = None
        self._router = Router()
        # It needs no capacity of its own, since stages send no more requests than their limits allow.
        self._room: WaitingRoom[LeaseRequest, HeldLease[B]] = WaitingRoom(
            self._grant, HeldLease.give_back, lets_pass=lambda request: request.is_suspected
        )
        self._said: Counter[str] = Counter()  # how many lines there were, by kind

    def __len__(self) -> int:
        return len(self._room)

    async def lease(self, request: LeaseRequest) -> HeldLease[B]:
        """See `ServicePool.lease`."""
        request.check()
        lease = await self._room.enter(request)
        if request.is_convicted:  # a server that had it before may have ended while it waited here
            lease.give_back()
            request.check()
        return lease

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def replica_moved(self) -> None:
        """Grant leases to those who wait, as far as possible: a replica has changed its state, or weights with it."""
        self._alive = None
        self._room.admit()

    def _takers(self) -> list[Replica[B]]:
        """Return the replicas that take requests. They are kept until one moves, but not where one is on trial."""
        if (alive := self._alive) is None:
            alive = [each for each in self.replicas if each.life.takes(self.version, each.in_flight)]
            on_trial = any(each.life.state is State.HALF_OPEN for each in self.replicas)
            self._alive = None if on_trial else alive
        return alive

    def _grant(self, request: LeaseRequest) -> HeldLease[B] | None:
        now_s, alive = asyncio.get_running_loop().time(), self._takers()
        serving = [each for each in alive if each.held_until_s <= now_s]
        if request.is_suspected:
            serving = [each for each in serving if not each.has_suspected_request]
        session = request.session if len(self.replicas) > 1 else None
        replica = self._router.choose(session, serving, request.failed_on)
        if replica is None:
            held_s = [each.held_s(now_s) for each in alive if each.held_until_s > now_s]
            if held_s:
                self._admit_in(min(held_s))
            return None
        if self.rate_limit is not None:
            delay_s = self.rate_limit.delay_s(now_s, request.tokens)
            if delay_s > 0:
                self._admit_in(delay_s)
                return None
        grant = None if self.rate_limit is None else self.rate_limit.grant(request.tokens)
        return HeldLease(replica, request, now_s, self._released, grant=grant)

    def _admit_in(self, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + delay_s:
                return
            self._timer.cancel()
        self._timer = loop.call_later(delay_s, self._timer_ran_out)

    def _hold(self, replica: Replica[B], error: ThrottledError, seconds: float, now_s: float) -> None:
        longer_s = seconds - replica.held_s(now_s)
        replica.held_until_s = max(replica.held_until_s, now_s + seconds)
        if longer_s >= LONG_PAUSE_S:  # once, and not for each of the requests that were refused together
            structlog.get_logger().warning("left alone", replica=replica.name, seconds=seconds, error=str(error))
            self._say("pause", f"{replica.name} gets nothing for {rough_time(seconds)}, as it asks: {error}")

    def _timer_ran_out(self) -> None:
        self._timer = None
        self._room.admit()

    def _released(self, lease: HeldLease[B], error: BaseException | None) -> None:
        """Note what a request ended with, and let others in. The replica learns of it unless it was taken back."""
        if isinstance(error, RequestError):
            lease.request.failed_on |= {lease.replica}
        if not lease.was_revoked:
            self._learn(lease, error)
        if self.rate_limit is not None and lease.grant is not None:
            self.rate_limit.give_back(lease.grant)  # unless the request was sent
        lease.owner.update_load()
        self._room.admit()

    def _learn(self, lease: HeldLease[B], error: BaseException | None) -> None:
        replica, now_s, request = lease.owner, asyncio.get_running_loop().time(), lease.request
        in_flight = replica.in_flight + 1  # this request included, which has just left
        lowered: Decrease | None = None
        match error:
            case None:
                replica.answered(now_s)
                replica.occupancy.answered(request.kind, request.work)
                now = replica.occupancy.at(request.kind, now_s)
                lowered = replica.limit.succeeded(
                    request.kind, sent=lease.sent, now=now, work=request.work, in_flight=in_flight
                )
            case RequestError() if not error.was_sent:
                pass
            case ThrottledError():
                if error.retry_after_s is not None:
                    self._hold(replica, error, error.retry_after_s, now_s)
                replica.answered(now_s)
                lowered = replica.limit.refused(str(error), sent_s=lease.granted_s, now_s=now_s, in_flight=in_flight)
            case DeadlineExceededError():
                replica.late(lease)
                now = replica.occupancy.at(request.kind, now_s)
                lowered = replica.limit.timed_out(
                    request.kind, str(error), sent=lease.sent, now=now, work=request.work, in_flight=in_flight
                )
            case ServerRestartedError():
                replica.report(Trouble.RESTARTED, error)
            case TransientError() if not _is_refusal(error):
                replica.unanswered(lease, error, now_s)
            case RequestError() if _is_of_a_reply(error):
                replica.answered(now_s)
        if lowered is not None:
            self._tell(replica.name, request.stage, lowered)

    def _tell(self, replica: str, stage: str, lowered: Decrease) -> None:
        log = structlog.get_logger()
        tell = log.info if lowered.by_latency else log.warning
        tell("limit lowered", replica=replica, stage=stage, **lowered._asdict())
        if lowered.by_latency:  # normal operation, so people need not act; log and report have it
            return
        most = counted(lowered.after, "request")
        self._say(
            "limit",
            f"{replica} gets {most} at a time for now, not {lowered.before}, more again as it answers: "
            f"{lowered.reason}",
        )

    def _say(self, kind: str, line: str) -> None:
        self._said[kind] += 1
        # The 1st, 2nd, 4th, 8th and so on: an endpoint that refuses for hours would fill the screen.
        if self._said[kind] & (self._said[kind] - 1) == 0:
            self.warn(line)


def _is_refusal(error: RequestError) -> bool:
    """Whether the server itself answered with an error (HTTP 500, say), so that it lives and the request may be bad."""
    return error.exchange is not None and (error.exchange.status or 0) >= HTTP_ERROR


def _is_of_a_reply(error: RequestError) -> bool:
    """Whether the error came from a reply. A request that the backend itself refused says nothing of the server."""
    was_answered = error.exchange is not None and error.exchange.status is not None
    return was_answered or isinstance(error, PoisonedReplyError)
