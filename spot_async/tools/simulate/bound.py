"""Computes the time that no iteration can be shorter than, from the work of an iteration and the rates. Pure.

In a strict run an iteration's requests, its training and its weight update follow each other. Otherwise they overlap.
Then the slowest of them bounds the iteration, and so does the way of one batch, of which n + 1 are under way at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """A lower bound of an iteration's seconds, and what makes it."""

    seconds: float
    by: str
    parts: dict[str, float]  # seconds of an iteration that each server and the trainer need for its work


def bound(
    max_staleness: int, servers_s: Mapping[str, float], train_s: float, update_s: float, strict_s: float
) -> Bound:
    """Return the bound. `servers_s` are by role; `strict_s` is the time of a strict iteration."""
    slowest = max(servers_s, key=lambda role: servers_s[role])
    parts = {**servers_s, "trainer": train_s}
    if max_staleness == 0:
        return Bound(seconds=servers_s[slowest] + train_s + update_s, by=f"{slowest}, then trainer", parts=parts)
    overlapped = {**parts, "one batch's way": strict_s / (max_staleness + 1)}
    by = max(overlapped, key=lambda name: overlapped[name])
    return Bound(seconds=overlapped[by], by=by, parts=parts)
