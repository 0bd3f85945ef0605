"""Defines what a stage asks of the servers that it sends requests to: a lease on one of them, for one attempt.

`pool.ReplicaPool` is the real pool. A service that is no pool (a verifier, or one of a test or of a program) becomes a
pool of one without any limit by `pool_of`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Protocol, TypeVar, cast, runtime_checkable

from spot_async.base.waiting_room import Priority
from spot_async.errors import PermanentError

SUSPECTED = 2  # replicas lost with a request, after which it is suspected to end them

S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)


@dataclass(slots=True, eq=False)
class LeaseRequest:
    """A request on its way through a pool, with all its attempts."""

    stage: str
    priority: Priority
    session: str | None = None  # requests of a session share a prefix
    tokens: int = 0  # the most that it may take of a token limit
    kind: str = ""  # latencies are compared within a kind; default: the stage
    failed_on: frozenset[str] = frozenset()  # names of the replicas that failed it
    losses: int = 0  # how many replicas ended or froze while they had it
    work: int = 0  # tokens that its answer amounts to once that is known, and until then the most it may take

    def __post_init__(self) -> None:
        self.kind = self.kind or self.stage
        self.work = self.work or self.tokens

    def clock_stopped(self, now_s: float) -> None:
        """Its server stands still for new weights. Called by the pool; what has a deadline puts it off."""

    def clock_started(self, now_s: float) -> None:
        """Its server continues, or it has left the server. Also called where the clock was not stopped."""

    @property
    def is_suspected(self) -> bool:
        """Whether it may be what ends servers. Then it is sent where no other suspect is, so that a loss tells."""
        return self.losses >= SUSPECTED

    @property
    def is_convicted(self) -> bool:
        return self.losses > SUSPECTED

    def check(self) -> None:
        """Raise `PermanentError` once it is clear that this request ends servers.

        Many requests are in flight when a server ends, and at most one of them is to blame. The last attempt without
        other suspects saves those that were only beside a bad prompt.
        """
        if self.is_convicted:
            raise PermanentError(
                f"{self.stage}: {self.losses} times a server ended or froze while it had this request, the last time "
                "with no other such request beside it: it is not sent again"
            )


class Lease(Protocol[S_co]):
    """The right to send one request to one replica, from entering to leaving. Enter it at once.

    On leaving, the pool learns how the request ended, and thus how the replica is. If the replica is lost meanwhile,
    the lease is taken back: the request is cancelled, and leaving raises a `TransientError` instead.
    """

    @property
    def replica(self) -> str:
        """The replica's name; empty if there is only one."""

    def give_back(self) -> None:
        """Give back a lease that was not used, in place of entering it."""

    async def __aenter__(self) -> S_co:
        """Return the replica's service."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class ServicePool(Protocol[S_co]):
    """The replicas of one role."""

    async def lease(self, request: LeaseRequest) -> Lease[S_co]:
        """Wait, without a time limit, until a replica may take the request; return a lease on it.

        This is the servers' back-pressure. Raises `PermanentError` for a request that is known to end servers.
        """


class OneService(Generic[S]):
    """A `ServicePool` of one service without limits. It is its own lease, since there is nothing to count."""

    replica = ""

    def __init__(self, service: S) -> None:
        self._service = service

    async def lease(self, request: LeaseRequest) -> Lease[S]:
        return self

    def give_back(self) -> None:
        pass

    async def __aenter__(self) -> S:
        return self._service

    async def __aexit__(self, *exc_info: object) -> None:
        pass


def pool_of(service: S | ServicePool[S]) -> ServicePool[S]:
    """Return a pool as it is, and any other service as a pool of one."""
    return cast("ServicePool[S]", service) if isinstance(service, ServicePool) else OneService(service)
