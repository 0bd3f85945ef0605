"""Finds the faults that a failing simulated run needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from faults.plan import Fault


def shrunk(faults: Iterable[Fault], fails: Callable[[Sequence[Fault]], bool]) -> list[Fault]:
    """Return fewer faults with which a run fails: of these, none can be left out alone."""
    left, again = list(faults), True
    while again:
        again = False
        for fault in left:
            fewer = [each for each in left if each is not fault]
            if fails(fewer):
                left, again = fewer, True
                break
    return left
