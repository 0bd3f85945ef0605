"""Divides a machine's cores among the processes of a run: some servers get their own, the rest are shared.

An engine on shared cores waits, and loses its caches, each time the orchestrator or another server wakes up. The
setting `own_cores` says which servers want cores. Those are bound to their own. The orchestrator and everything it
starts are bound to the rest, except the trainer: in strict mode nothing else has work while it trains.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class CoreShares:
    """Which core numbers each server owns, and which are shared."""

    available: frozenset[int] = frozenset()  # all that the run may use; empty where processes cannot be bound
    own: Mapping[str, frozenset[int]] = field(default_factory=dict)  # by server
    warnings: Sequence[str] = ()

    @property
    def shared(self) -> frozenset[int]:
        """The cores for all processes that have none of their own."""
        return self.available.difference(*self.own.values())


def available_cores() -> frozenset[int]:
    """Return the cores that this process may use; empty where processes cannot be bound (not Linux, or refused)."""
    try:
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)
    except (AttributeError, OSError):
        return frozenset()
    return frozenset(cores)


def usable_cores() -> int:
    """Return how many cores this process may use, at least 1."""
    return len(available_cores()) or os.cpu_count() or 1


def share_cores(available: Collection[int], wanted: Mapping[str, int]) -> CoreShares:
    """Give each server as many cores as it wants, from the highest number down; at least one stays shared.

    If there are too few cores, no server gets its own. The run then continues, more slowly.
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
    for thread in _threads():  # new threads and processes inherit the cores of the thread that starts them
        with contextlib.suppress(OSError):  # the thread has ended
            before[thread] = os.sched_getaffinity(thread)
            os.sched_setaffinity(thread, shares.shared)
    try:
        yield
    finally:
        for thread in _threads():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, before.get(thread, ours))


def _threads() -> list[int]:
    """Return the ids of this process's threads."""
    return [int(thread.name) for thread in Path("/proc/self/task").iterdir()]
