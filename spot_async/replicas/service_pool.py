"""What a stage asks of the servers it sends requests to: a lease on one of them, for one attempt.

`pool.ReplicaPool` is the real one. A service that is no pool (a verifier, a service of a test or of a program's own)
is taken for the only one there is, without any limit: `pool_of`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, Protocol, TypeVar, cast, runtime_checkable

from spot_async.base.waiting_room import Priority
from spot_async.errors import PermanentError

SUSPECTED = 2  # losses

S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)


@dataclass(slots=True, eq=False)
class Errand:
    """One request on its way through a pool, all its attempts included."""

    stage: str
    priority: Priority
    session: str | None = None  # of requests that share a prefix
    tokens: int = 0  # that it may take of a token limit
    kind: str = ""  # whose latencies are compared; of a stage whose requests are alike, its name
    failed_on: set[str] = field(default_factory=set)  # replicas, by name
    losses: int = 0  # replicas that ended or froze while they had it
    work: int = 0  # tokens that its answer amounts to, once that is known; until then the most it may take

    def __post_init__(self) -> None:
        self.kind = self.kind or self.stage
        self.work = self.work or self.tokens

    @property
    def is_suspected(self) -> bool:
        """Whether it may be what ends servers: then it is sent where no other suspect is, so that a loss tells."""
        return self.losses >= SUSPECTED

    @property
    def is_convicted(self) -> bool:
        return self.losses > SUSPECTED

    def check(self) -> None:
        """Raises `PermanentError` once it is clear that this request ends servers.

        Many requests are in flight when a server ends, and at most one of them is to blame. Without a last attempt
        alone, those beside a bad prompt would be given up with it.
        """
        if self.is_convicted:
            raise PermanentError(
                f"{self.stage}: {self.losses} times a server ended or froze while it had this request, the last time "
                "with no other such request beside it: it is not sent again"
            )


class Lease(Protocol[S_co]):
    """The right to send one request to one replica, from entering to leaving. To be entered at once.

    What the request ends with, as it leaves, is what the pool learns of the replica. A replica that is lost
    meanwhile takes the lease back: the request is cancelled, and leaving raises a `TransientError` in its place.
    """

    @property
    def replica(self) -> str:
        """Its name; empty where there is only one."""
        ...

    async def __aenter__(self) -> S_co:
        """The replica's service."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class ServicePool(Protocol[S_co]):
    """The replicas of one role."""

    async def lease(self, errand: Errand) -> Lease[S_co]:
        """Wait for a replica that may take the request now. Waits for as long as it takes: it is back-pressure.

        Raises `PermanentError` for a request that is known to end servers.
        """
        ...


class OneService(Generic[S]):
    """A `ServicePool` of one service that takes everything; at once its own lease, since there is nothing to keep."""

    replica = ""

    def __init__(self, service: S) -> None:
        self._service = service

    async def lease(self, errand: Errand) -> Lease[S]:
        return self

    async def __aenter__(self) -> S:
        return self._service

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def pool_of(service: S | ServicePool[S]) -> ServicePool[S]:
    """The pool that it is, or one that holds nothing else."""
    return cast("ServicePool[S]", service) if isinstance(service, ServicePool) else OneService(service)
