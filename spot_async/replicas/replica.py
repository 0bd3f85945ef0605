"""Holds one replica: its backend object, what is known of it, and the leases on it.

It decides nothing by itself. The pool decides what may be sent, and `recovery` what is done about a replica in trouble.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar

import msgspec

from spot_async.base.retry import CAPABILITIES_TIMEOUT_S
from spot_async.base.waiting_room import Turns
from spot_async.errors import SpotError, TransientError
from spot_async.protocols import Backend, TrafficSource
from spot_async.replicas.concurrency_limit import ConcurrencyLimit, Occupancy
from spot_async.replicas.leasing import LeaseRequest
from spot_async.replicas.life_cycle import IN_ROTATION, LifeCycle, State
from spot_async.spending.rate_limit import LEASED, Grant
from spot_async.types import Capabilities, Traffic, WeightVersion

B = TypeVar("B", bound=Backend)


class Trouble(StrEnum):
    """Why a replica cannot continue serving as it is."""

    ENDED = "its process ended"
    SILENT = "it does not answer"
    RESTARTED = "it must be entered again"  # it answers, but is another process than was entered
    BEHIND = "it has not taken the newest weights"


@dataclass(frozen=True)
class Report:
    trouble: Trouble
    error: SpotError


class ReplicaStatus(NamedTuple):
    """One replica as people and metrics see it."""

    name: str
    state: State
    in_flight: int
    limit: int
    decreases: int  # how often the limit was lowered so far
    restarts: int  # how often it was entered again
    version: WeightVersion | None  # the weights that were sent to it last
    traffic: Traffic
    requests: int = 0  # how many it was leased for, however they ended
    busy_s: float = 0.0  # seconds of all requests together; divided by the elapsed time, the mean in flight
    away_s: float = 0.0  # seconds out of rotation
    held_s: float = 0.0  # seconds that are left of the pause that it asked for


@dataclass(eq=False)
class Replica(Generic[B]):
    """A server of a role, whichever backend object stands for it now."""

    name: str
    make: Callable[[], B]  # returns a new backend object each time
    backend: B  # at first one that is not entered yet
    _: KW_ONLY
    max_in_flight: int
    moved: Callable[[], None] = lambda: None  # is called after every change of state
    turns: Turns = field(default_factory=Turns)  # of whoever shares devices with its server

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        now_s = self._loop.time()
        self.offers: Capabilities | None = None  # what its server offered when it was entered first
        self.is_entered = False
        self.entering = asyncio.Lock()  # held while the backend is entered, left, put to sleep, woken, or sent weights
        self.life = LifeCycle(now_s, self.moved)
        self.limit = ConcurrencyLimit(self.max_in_flight)
        self.leases: dict[HeldLease[B], None] = {}  # oldest first; a set's order would differ between processes
        self.last_error: SpotError | None = None
        self.held_until_s = now_s  # the end of the pause that it asked for
        self.restarts = 0
        self.occupancy = Occupancy()  # of requests; the pool's own leases do not count
        self.load = 0.0  # what is in flight, as a share of the limit; see `update_load`
        self._requests_sent = 0
        # Requests whose connections failed since the last answer, and the time of the first of these failures.
        self._unanswered: dict[LeaseRequest, None] = {}
        self._failing_s = now_s
        self._failing: set[LeaseRequest] = set()  # all of these, whenever they were sent
        # For how long it has had requests since its last sign of life. While it has none, the first counts; while it
        # has some, the time since the second.
        self._silence_s = 0.0
        self._silent_since_s = now_s
        self._showed_life_s = now_s
        self._is_late = False  # it did not answer a request in time, and nothing else since that was sent
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._retired = Traffic()  # the traffic of backend objects that were left
        self._report: asyncio.Future[Report] = self._loop.create_future()

    @property
    def in_flight(self) -> int:
        return self.occupancy.requests

    @property
    def most_in_flight(self) -> int:
        return self.limit.value

    def update_load(self) -> None:
        """Note the load anew, as a request comes or goes or the limit changes. A router reads it of every replica."""
        self.load = self.in_flight / self.limit.value

    @property
    def has_suspected_request(self) -> bool:
        return any(lease.request.is_suspected for lease in self.leases)

    @property
    def traffic(self) -> Traffic:
        """The traffic of all its backend objects together."""
        total = msgspec.structs.replace(self._retired)
        if self.is_entered and isinstance(self.backend, TrafficSource):
            add_traffic(total, self.backend.traffic)
        return total

    @property
    def status(self) -> ReplicaStatus:
        """The replica as people and metrics see it. It may be read from any thread."""
        life, now_s = self.life, self._loop.time()
        return ReplicaStatus(
            self.name,
            life.state,
            self.in_flight,
            self.limit.value,
            self.limit.decreases,
            self.restarts,
            life.version,
            self.traffic,
            self._requests_sent,
            self.occupancy.busy_s(now_s),
            life.away_s(now_s),
            self.held_s(now_s),
        )

    def held_s(self, now_s: float) -> float:
        """Return the seconds that are left of the pause that it asked for."""
        return max(0.0, self.held_until_s - now_s)

    # What the leases say

    def granted(self, lease: HeldLease[B]) -> None:
        if not self.leases:
            self._silent_since_s = lease.granted_s - self._silence_s
            self._changed.set()
            self._idle.clear()
        self.leases[lease] = None
        if lease.is_request:
            self.occupancy.began(lease.request.kind, lease.granted_s)
            self.update_load()
            self._requests_sent += 1

    def released(self, lease: HeldLease[B]) -> None:
        del self.leases[lease]
        now_s = self._loop.time()
        lease.request.clock_started(now_s)
        if lease.is_request:
            self.occupancy.ended(lease.request.kind, now_s)
        if not self.leases:
            self._silence_s = now_s - self._silent_since_s
            self._idle.set()

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Stop the clocks of all requests in flight during the `with` block, in which the server gets new weights.

        How long these requests take then says nothing about the load.
        """
        waiting = [lease for lease in self.leases if lease.is_request]
        for lease in waiting:
            lease.request.clock_stopped(self._loop.time())
        try:
            yield
        finally:
            for lease in self.leases:
                lease.request.clock_started(self._loop.time())
            if waiting:
                self.limit.interrupted(self._loop.time())

    def answered(self, now_s: float) -> None:
        self.showed_life(now_s)
        self._unanswered.clear()
        self._failing.clear()
        self.life.answered(now_s)

    def unanswered(self, lease: HeldLease[B], error: SpotError, now_s: float) -> None:
        """Note that a request got no answer, since its connection failed or was never made.

        Only requests that were sent before the first of these failures may be what ended the server.
        """
        self.last_error = error
        if not self._unanswered:
            self._failing_s = now_s
        if lease.granted_s < self._failing_s:
            self._unanswered[lease.request] = None
        self._failing.add(lease.request)
        if self.life.failed(lease.granted_s, now_s):
            # One request that fails again and again may itself be the reason, so its trial says nothing of the server.
            self.life.failed_trial = self.life.failed_trial and len(self._failing) > 1
            self._changed.set()

    def late(self, lease: HeldLease[B]) -> None:
        """Note that a request was not answered in time. If nothing was since it was sent, the replica may be frozen."""
        if self._showed_life_s < lease.granted_s:
            self._is_late = True
            self._changed.set()

    def take_back(self, reason: str, *, is_lost: bool) -> None:
        """Cancel everything in flight. `is_lost`: the server ended or froze by itself, perhaps over one of these."""
        if is_lost:
            for request in dict.fromkeys(lease.request for lease in self.leases) | self._unanswered:
                request.losses += 1
        self._unanswered.clear()
        self._failing.clear()
        for lease in self.leases:
            lease.revoke(reason)

    # What `recovery` waits for

    async def needs_ping(self, stall_s: float) -> None:
        """Return once it is suspect or late, or has had requests for `stall_s` in all without an answer.

        Times add up over requests that are given up early, such as at a shorter deadline.
        """
        loop = asyncio.get_running_loop()
        while self.life.state is not State.SUSPECT and not self._is_late:
            self._changed.clear()
            is_due = asyncio.timeout_at(self._silent_since_s + stall_s if self.leases else None)
            try:
                async with is_due:
                    await self._changed.wait()
            except TimeoutError:
                if self.leases and loop.time() >= self._silent_since_s + stall_s:
                    return

    def showed_life(self, now_s: float) -> None:
        """Note that it answered something, such as a ping."""
        self._silence_s = 0.0
        self._silent_since_s = self._showed_life_s = now_s
        self._is_late = False

    async def until_idle(self) -> None:
        """Return once nothing is in flight."""
        await self._idle.wait()

    def report(self, trouble: Trouble, error: SpotError) -> None:
        """Report trouble. The first report counts, and none counts while the replica is being brought back."""
        if self.life.state in IN_ROTATION and not self._report.done():
            self.last_error = error.with_traceback(None)  # it would keep the backend object until the next trouble
            self._report.set_result(Report(trouble, error))

    async def trouble(self) -> Report:
        """Wait for the first trouble that is reported after the replica was last taken out of rotation."""
        return await asyncio.shield(self._report)

    def take_out(self, state: State, now_s: float) -> None:
        """Take it out of rotation. Reports until now belong to this incident, and are forgotten."""
        self.life.move(state, now_s)
        self._report = self._loop.create_future()

    # Backend objects

    def renew(self) -> None:
        """Make a new backend object, which stands for the server from then on. The old one must have been left."""
        self.backend = self.make()

    async def enter(self) -> Capabilities:
        """Enter the backend object, and return what its server offers. What it offered first is kept."""
        async with self.turns.turn(self.name):
            await self.backend.__aenter__()
        self.is_entered = True
        self.showed_life(self._loop.time())
        found = await self.backend.capabilities(deadline=self._loop.time() + CAPABILITIES_TIMEOUT_S)
        if self.offers is None:
            self.offers = found
            self.limit = ConcurrencyLimit(self.max_in_flight, found.slots or 1)
            self.update_load()
        return found

    async def leave(self) -> None:
        if not self.is_entered:
            return
        if isinstance(self.backend, TrafficSource):
            add_traffic(self._retired, self.backend.traffic)
        self.is_entered = False
        await self.backend.__aexit__(None, None, None)


@dataclass(eq=False)
class HeldLease(Generic[B]):
    """A `Lease` on a replica. Its timeout is never due by itself; it is how the request is cancelled."""

    owner: Replica[B]
    request: LeaseRequest
    granted_s: float
    # Is told what the request ended with, which is None if it was answered.
    released: Callable[[HeldLease[B], BaseException | None], None] = lambda lease, error: None
    _: KW_ONLY
    is_request: bool = True  # False: it is the pool's own work, such as a weight update, and is not limited
    grant: Grant | None = None  # the room that a rate limit keeps
    _reason: str | None = field(default=None, init=False)
    _is_entered: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.service = self.owner.backend
        self.sent = self.owner.occupancy.at(self.request.kind, self.granted_s)
        self.ended: Callable[[], None] = lambda: None  # called once when it ends
        self._timeout = asyncio.timeout(None)
        self.owner.granted(self)

    @property
    def replica(self) -> str:
        return self.owner.name

    @property
    def was_revoked(self) -> bool:
        return self._reason is not None

    def revoke(self, reason: str) -> None:
        if self._reason is not None:  # it was revoked before, and takes its time to end
            return
        self._reason = reason
        if self._is_entered:
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def give_back(self) -> None:
        """Give back a lease that was not used. Nothing is learned from it."""
        self.revoke("it was not used")
        self._end(None)

    async def __aenter__(self) -> B:
        if self._reason is not None:  # revoked between granting and entering, so its service may have been left
            self._end(self._given_up())
            raise self._given_up()
        await self._timeout.__aenter__()
        self._is_entered = True
        if self.grant is not None:
            self._was_leased = LEASED.set(self.grant)
        return self.service

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            error = self._given_up()
            raise error from None
        finally:
            self._is_entered = False
            if self.grant is not None:
                LEASED.reset(self._was_leased)
            self._end(error)
            del error  # its trace refers to here, so with the way back it would keep the request and the backend

    def _given_up(self) -> TransientError:
        error = TransientError(f"{self.replica}: given up: {self._reason}")
        error.in_short = "server lost"
        return error

    def _end(self, error: BaseException | None) -> None:
        self.owner.released(self)
        self.released(self, error)
        self.ended()


def add_traffic(total: Traffic, more: Traffic) -> None:
    for name in more.__struct_fields__:
        setattr(total, name, getattr(total, name) + getattr(more, name))
