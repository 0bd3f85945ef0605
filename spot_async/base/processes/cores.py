"""Which of a machine's cores the processes of a run use: some servers have cores of their own, the rest is shared.

An engine is slower where it waits for its core, or loses its caches, each time that the orchestrator or another server
wakes up. The settings say who wants cores (`own_cores`). Those servers are bound, and so is the orchestrator with all
that it starts, but for the trainer: in strict mode nothing else has work while it trains.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class CoreShares:
    """Cores by their numbers."""

    available: frozenset[int] = frozenset()  # that the run may use; empty where processes cannot be bound
    own: Mapping[str, frozenset[int]] = field(default_factory=dict)  # by server
    warnings: Sequence[str] = ()

    @property
    def shared(self) -> frozenset[int]:
        """For all that have none of their own."""
        return self.available.difference(*self.own.values())


def available_cores() -> frozenset[int]:
    """Those that this process may use; empty where the system binds none (it is not Linux, or it refuses)."""
    try:
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)
    except (AttributeError, OSError):
        return frozenset()
    return frozenset(cores)


def usable_cores() -> int:
    """How many this process may use, at least 1."""
    return len(available_cores()) or os.cpu_count() or 1


def share_cores(available: Collection[int], wanted: Mapping[str, int]) -> CoreShares:
    """Give each server as many cores as it wants, from the highest number down; at least one stays shared.

    Nobody gets any where they are not enough: a run goes on without, and slower.
    """
    wanted = {server: count for server, count in wanted.items() if count}
    if wanted and sum(wanted.values()) >= len(available):
        needed = " + ".join(f"{count} ({server})" for server, count in wanted.items())
        found = f"this process may use {len(available)}" if available else "this system binds no processes to cores"
        return CoreShares(
            frozenset(available),
            warnings=[f"own_cores: {needed} and one to share are wanted, but {found}: all are shared"],
        )
    left = sorted(available)
    own = {server: frozenset(left.pop() for _ in range(count)) for server, count in wanted.items()}
    return CoreShares(frozenset(available), own)


@contextlib.contextmanager
def confined(shares: CoreShares) -> Iterator[None]:
    """Keep this process, and what it starts meanwhile, to the shared cores."""
    if not shares.own:
        yield
        return
    before: dict[int, Collection[int]] = {}
    ours = os.sched_getaffinity(0)
    for thread in _threads():  # new ones, and new processes, are bound as the thread that starts them
        with contextlib.suppress(OSError):  # it has ended meanwhile
            before[thread] = os.sched_getaffinity(thread)
            os.sched_setaffinity(thread, shares.shared)
    try:
        yield
    finally:
        for thread in _threads():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, before.get(thread, ours))


def _threads() -> list[int]:
    """The ids of this process's threads."""
    return [int(thread.name) for thread in Path("/proc/self/task").iterdir()]
