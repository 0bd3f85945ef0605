"""Stands for all servers of a role as one backend: it leases them to stages, sends weights, and brings servers back.

It is a thin shell: `scheduler` grants leases, `weights` keeps versions, `recovery` sees to a replica in trouble.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Generic, TypeAlias

from spot_async.base.retry import no_room
from spot_async.base.tasks import Opened, gather, settle
from spot_async.base.waiting_room import Turns
from spot_async.config import ServingConfig, backend_section
from spot_async.errors import (
    ConfigError,
    RequestError,
    ServerRestartedError,
    SpotError,
    ThrottledError,
    UnreachableError,
)
from spot_async.protocols import Sleeper
from spot_async.replicas.capabilities import VOCABULARY, check_same, combined
from spot_async.replicas.gpu_time_sharing import GpuTimeSharing
from spot_async.replicas.leasing import Lease, LeaseRequest
from spot_async.replicas.life_cycle import ALIVE, IN_ROTATION, State
from spot_async.replicas.recovery import Recovery
from spot_async.replicas.replica import B, Replica, ReplicaStatus, Trouble, add_traffic
from spot_async.replicas.scheduler import Scheduler
from spot_async.replicas.weights import Weights, got_no_reply
from spot_async.spending.rate_limit import RateLimiter
from spot_async.types import Capabilities, Traffic, WeightSnapshot

ATTACH_INTERVAL_S = 0.5  # between two attempts to reach a server that is not there yet
FIRST = (0,)  # the priority of what is asked before the first prompt
Wake: TypeAlias = Callable[[Sleeper], Awaitable[None]]  # wakes a part of one server, or the rest
LAST_SLEEP_TIMEOUT_S = 30.0  # for a server in trouble, which may not answer any more


@dataclass(frozen=True, kw_only=True)
class PeopleListener:
    """Functions that get a line for people."""

    warn: Callable[[str], None] = lambda line: None  # a server's limit is lowered, or a server asks for a long pause
    ready: Callable[[str], None] = lambda line: None  # a server answers
    # Entering waits, up to `recovery_timeout_s`, for a server at an address. None: then the start fails at once.
    waiting: Callable[[str], None] | None = None


@dataclass(eq=False)
class ReplicaPool(Opened, Generic[B]):
    """A `ServicePool`, `Backend`, `WeightSink`, `Sleeper` and `TrafficSource` of one or more replicas.

    Keep `watch` running: it brings replicas back. Without it, a replica that fails stays out.
    """

    role: str
    # Make each replica's backend, by the replica's name. Entering a backend starts its server, or attaches to it.
    factories: Mapping[str, Callable[[], B]]
    serving: ServingConfig = field(default_factory=ServingConfig)
    _: KW_ONLY
    are_ours: bool = True  # entering starts servers, so that entering again counts as a restart
    rate_limit: RateLimiter | None = None
    people: PeopleListener = field(default_factory=PeopleListener)
    # Of replicas that share devices with others, by their names; they start in these, and start again.
    turns: Turns = field(default_factory=Turns)
    time_sharing: GpuTimeSharing | None = None  # what gives the pool time on GPUs that it shares, and enters it then

    def __post_init__(self) -> None:
        self._made = {name: (make, make()) for name, make in self.factories.items()}
        self._replicas: list[Replica[B]] = []
        self._scheduler = Scheduler(self._replicas, self.rate_limit, self.people.warn)
        if self.time_sharing is not None:
            self.time_sharing.pools[self.role] = self
        self._moved = asyncio.Event()  # set when a replica changes its state
        self._weights = Weights(self._replicas, self._scheduler, self._moved)
        self._awake = asyncio.Event()
        self._awake.set()
        self._asleep: list[Replica[B]] = []

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        """Start all servers, or attach to them. If one cannot be started, the others are ended."""
        most, made, self._made = self.serving.max_in_flight, self._made, {}
        for name, (make, backend) in made.items():
            self._replicas.append(
                Replica(name, make, backend, max_in_flight=most, moved=self._replica_moved, turns=self.turns)
            )
        stack.push_async_callback(lambda: settle(replica.leave() for replica in self._replicas))
        found = await gather(self._enter(replica) for replica in self._replicas)
        for replica, offers in zip(self._replicas, found, strict=True):
            check_same(found[0], replica.name, offers, VOCABULARY)
            replica.life.move(State.SERVING, asyncio.get_running_loop().time())
        stack.callback(self._scheduler.close)

    async def _enter(self, replica: Replica[B]) -> Capabilities:
        """Start one server, or attach to it, for the first time; return what it offers.

        Raises ConfigError where nothing answers at its address.
        """
        loop, waits, is_told = asyncio.get_running_loop(), self.people.waiting is not None, False
        longest_s, began_s = self.serving.recovery_timeout_s, loop.time()
        until_s = loop.time() + (longest_s if waits else 0.0)
        while True:
            try:
                offered = await replica.enter()
                self.people.ready(f"{replica.name} answers after {loop.time() - began_s:.1f} s")
                return offered
            except UnreachableError as error:
                if self.are_ours:
                    raise
                nothing = f"nothing answers at {error.exchange.endpoint if error.exchange else replica.name}"
                if loop.time() >= until_s:
                    waited = f" for {longest_s:g} s" if waits else ""
                    raise ConfigError(
                        f"{self.role}.backend.url: {nothing}{waited} ({error.reason}): start it, or correct the address"
                    ) from None
            except ThrottledError as error:
                raise ConfigError(no_room(backend_section(self.role, replica.name), error)) from None
            if self.people.waiting is not None and not is_told:
                self.people.waiting(f"waiting for {replica.name}: {nothing} yet; up to {longest_s:g} s")
                is_told = True
            await replica.leave()
            replica.renew()
            await asyncio.sleep(ATTACH_INTERVAL_S)

    @property
    def replicas(self) -> Sequence[ReplicaStatus]:
        return [replica.status for replica in self._replicas]

    @property
    def backends(self) -> dict[str, B]:
        """The backend that stands for each replica now, by name. It is for asking every server itself."""
        return {replica.name: replica.backend for replica in self._replicas}

    @property
    def waiting(self) -> int:
        """How many requests wait, because no replica can take them yet."""
        return len(self._scheduler)

    @property
    def traffic(self) -> Traffic:
        """The traffic of all servers together, including servers that were left."""
        total = Traffic()
        for replica in self._replicas:
            add_traffic(total, replica.traffic)
        return total

    async def lease(self, request: LeaseRequest) -> Lease[B]:
        if self.time_sharing is None:
            return await self._scheduler.lease(request)
        await self.time_sharing.enter(self.role, request.priority)
        try:
            lease = await self._scheduler.lease(request)
        except BaseException:
            self.time_sharing.leave()
            raise
        lease.ended = self.time_sharing.leave
        return lease

    @contextlib.asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """Keep all servers awake inside, for whoever asks each of them itself."""
        if self.time_sharing is None:
            yield
            return
        await self.time_sharing.enter(self.role, FIRST)
        try:
            yield
        finally:
            self.time_sharing.leave()

    async def capabilities(self, *, deadline: float) -> Capabilities:
        """Return what all servers offer."""
        return combined(await gather(replica.backend.capabilities(deadline=deadline) for replica in self._replicas))

    async def update_weights(self, snapshot: WeightSnapshot, *, deadline: float) -> None:
        """Send weights to all replicas that serve, at the same time.

        A replica that misses them gets no requests until it has them. If all refuse them, all continue with the old
        ones, and the first refusal is raised. If all are lost, wait for one to come back, until `deadline` (loop time).
        """
        await self._weights.update(snapshot, deadline=deadline)

    def withdraw_weights(self) -> None:
        """Send the newest weights to no server any more, since they are void: others come by `update_weights` soon."""
        self._weights.withdraw()

    async def watch(self) -> None:
        """Bring replicas back until this is cancelled.

        Raises `ProcessDiedError` when the last server of ours ended too often, and `SpotError` when no server has
        served for `recovery_timeout_s`.
        """
        recoveries = [
            Recovery(replica, self._replicas, self._weights, self._awake, self.serving, are_ours=self.are_ours).run()
            for replica in self._replicas
        ]
        await gather([self._watch_for_none(), *recoveries])

    @property
    def sleeps_while_training(self) -> bool:
        backends = [replica.backend for replica in self._replicas]
        return any(isinstance(each, Sleeper) and each.sleeps_while_training for each in backends)

    async def sleep(self, *, deadline: float) -> None:
        """Put all servers to sleep, those that are coming back too. Raises what a server answers that does not sleep.

        A server that is lost, or was restarted, is brought back once the others wake.
        """
        self._awake.clear()
        self._moved.set()  # while servers sleep, none has to serve: `_watch_for_none` stops its clock
        await gather(self._sleep(replica, deadline) for replica in self._replicas)

    async def _sleep(self, replica: Replica[B], deadline: float) -> None:
        async with replica.entering:
            if not (replica.is_entered and isinstance(replica.backend, Sleeper)):
                return
            if replica.life.state in IN_ROTATION:
                try:
                    self._asleep.append(replica)
                    await replica.backend.sleep(deadline=deadline)
                except RequestError as error:
                    if not _is_lost(error):
                        raise
                    replica.report(Trouble.RESTARTED, error)
                return
            with contextlib.suppress(RequestError):  # it is in trouble already, and may not answer
                soon = min(deadline, asyncio.get_running_loop().time() + LAST_SLEEP_TIMEOUT_S)
                await replica.backend.sleep(deadline=soon)
                self._asleep.append(replica)

    async def wake_weights(self, *, deadline: float) -> None:
        """Wake all servers' memory for weights. One that does not wake is brought back. Raises when all refuse to.

        From then on lost servers are brought back.
        """
        await self._wake(self._asleep, lambda backend: backend.wake_weights(deadline=deadline))

    async def wake(self, *, deadline: float) -> None:
        """Wake all servers. Raises if all refuse. One that does not wake is brought back as if it had failed."""
        asleep, self._asleep = self._asleep, []
        await self._wake(asleep, lambda backend: backend.wake(deadline=deadline))

    async def _wake(self, asleep: Sequence[Replica[B]], wake: Wake) -> None:
        try:
            errors = await gather(_wake(replica, wake) for replica in asleep)
        finally:
            self._awake.set()
            self._replica_moved()
        serving = [each for each in zip(asleep, errors, strict=True) if each[0].life.state in IN_ROTATION]
        failed = [(replica, error) for replica, error in serving if error is not None]
        if failed and len(failed) == len(serving) and not any(_is_lost(error) for _, error in failed):
            raise failed[0][1]
        for replica, error in failed:
            replica.report(Trouble.RESTARTED, error)

    async def _watch_for_none(self) -> None:
        """Raise `SpotError` once no replica has served for `recovery_timeout_s`."""
        while True:
            self._moved.clear()
            if self._has_server:
                await self._moved.wait()
                continue
            try:
                async with asyncio.timeout(self.serving.recovery_timeout_s):
                    while not self._has_server:
                        self._moved.clear()
                        await self._moved.wait()
            except TimeoutError:
                raise SpotError(self._why_none()) from None

    @property
    def _has_server(self) -> bool:
        """Whether a replica is alive, or none has to be, since all sleep."""
        return not self._awake.is_set() or any(replica.life.state in ALIVE for replica in self._replicas)

    def _why_none(self) -> str:
        last = "; ".join(f"{each.name}: {each.life.state}, {each.last_error}" for each in self._replicas)
        return (
            f"{self.role}: no server for {self.serving.recovery_timeout_s:g} s ({last}): see to it, or raise "
            f"{self.role}.serving.recovery_timeout_s where it takes longer to come back"
        )

    def _replica_moved(self) -> None:
        self._moved.set()
        self._scheduler.replica_moved()


def _is_lost(error: RequestError) -> bool:
    """Whether a server has ended, or was started again, since it was asked last."""
    return isinstance(error, ServerRestartedError) or got_no_reply(error)


async def _wake(replica: Replica[B], wake: Wake) -> RequestError | None:
    async with replica.entering:
        if not (replica.is_entered and isinstance(replica.backend, Sleeper)):
            return None  # it was left meanwhile, so there is nothing to wake
        try:
            await wake(replica.backend)
        except RequestError as error:
            return error
    return None
