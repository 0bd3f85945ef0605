"""Finds a server's rates in the requests that a run sent to it. Pure.

A request takes some seconds whatever the server has to do. Then each of its tokens takes the longer, the more requests
share the server: up to `shared` requests not at all, and from there on in proportion. So

    seconds = request_s + tokens / each * max(1, requests beside it / shared)

`request_s` and `each` are the least squares of that. The rate of the whole server is counted, and not taken from them:
it is what the server did while it had at least half as many requests as it ever had.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spot_async.types import Float64Array

STEPS = 60  # values of `shared` that are tried
LEAST_WORK = 0.1  # of a request's seconds are for its tokens


class Timed(NamedTuple):
    """A request of known length."""

    server: str
    started_s: float
    ended_s: float
    tokens: float


class Speed(NamedTuple):
    """What was found of one server."""

    tokens_per_s: float
    tokens_per_s_each: float
    request_s: float


class Worked(NamedTuple):
    """The requests of one server, by when it began to work on them."""

    begun_s: Float64Array
    ended_s: Float64Array
    tokens: Float64Array

    @property
    def seconds(self) -> Float64Array:
        return self.ended_s - self.begun_s


def speed(requests: Sequence[Timed], slots: int | None) -> Speed | None:
    """Return the speed that explains the requests' seconds; None where they say nothing.

    A server works on `slots` requests at a time, and others wait there. Their wait does not count.
    """
    by_server: dict[str, list[Timed]] = defaultdict(list)
    for each in requests:
        by_server[each.server].append(each)
    servers = [_worked(own, slots) for own in by_server.values()]
    seconds, tokens = (np.concatenate([getattr(own, name) for own in servers]) for name in ("seconds", "tokens"))
    beside = np.concatenate([_beside(own) for own in servers])
    best: tuple[float, float, float] | None = None  # what is not explained, `request_s`, seconds of a token
    for shared in np.geomspace(1.0, max(1.0, beside.max(initial=1.0)), STEPS):
        found = _line(tokens * np.maximum(1.0, beside / shared), seconds)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    if best is None:
        return None
    _, request_s, token_s = best
    rates = [_rate(own, request_s) for own in servers]
    return Speed(max(1 / token_s, sum(rates) / len(rates)), 1 / token_s, request_s)


def _worked(requests: Sequence[Timed], slots: int | None) -> Worked:
    ordered = sorted(requests, key=lambda each: each.started_s)
    begun_s, ended_s = _begun_s(ordered, slots), np.array([each.ended_s for each in ordered])
    has_time = begun_s < ended_s
    return Worked(begun_s[has_time], ended_s[has_time], np.array([each.tokens for each in ordered])[has_time])


def _beside(own: Worked) -> Float64Array:
    """Return how many requests the server had while it had each of them, itself included, as a mean."""
    times_s, in_flight = _steps(own.begun_s, own.ended_s, np.ones_like(own.tokens))
    busy_s = np.concatenate([[0.0], np.cumsum(in_flight[:-1] * np.diff(times_s))])
    during_s = np.interp(own.ended_s, times_s, busy_s) - np.interp(own.begun_s, times_s, busy_s)
    return np.asarray(during_s / own.seconds)


def _rate(own: Worked, request_s: float) -> float:
    """Return the tokens a second while the server worked on at least half as many tokens' requests as it ever did."""
    begun_s = np.minimum(own.begun_s + request_s, own.ended_s - LEAST_WORK * own.seconds)
    times_s, in_flight = _steps(begun_s, own.ended_s, np.ones_like(own.tokens))
    _, speeds = _steps(begun_s, own.ended_s, own.tokens / (own.ended_s - begun_s))
    full_s = np.diff(times_s) * (in_flight[:-1] >= in_flight.max() / 2)
    return float((speeds[:-1] * full_s).sum() / full_s.sum())


def _steps(begun_s: Float64Array, ended_s: Float64Array, amounts: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Return times, and from each of them on the sum of the amounts that have begun and not ended."""
    times_s = np.concatenate([begun_s, ended_s])
    order = np.argsort(times_s, kind="stable")
    return times_s[order], np.cumsum(np.concatenate([amounts, -amounts])[order])


def _begun_s(ordered: Sequence[Timed], slots: int | None) -> Float64Array:
    """Return when the server began to work on each request: at once, or when one before it left its slot."""
    if slots is None:
        return np.array([each.started_s for each in ordered])
    begun_s, taken = [], list[float]()
    for each in ordered:
        at_s = each.started_s
        while taken and (taken[0] <= at_s or len(taken) >= slots):
            at_s = max(at_s, heapq.heappop(taken))
        begun_s.append(at_s)
        heapq.heappush(taken, each.ended_s)
    return np.array(begun_s)


def _line(x: Float64Array, y: Float64Array) -> tuple[float, float, float] | None:
    """Return the least squares of a line, its height at 0, which is not negative, and its slope; None if that is not
    positive.
    """
    if not len(x) or not x.any():
        return None
    spread = float(np.square(x - x.mean()).sum())
    slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread if spread > 0 else 0.0
    height = float(y.mean() - slope * x.mean())
    if slope <= 0 or height < 0:
        height, slope = 0.0, float((x * y).sum() / np.square(x).sum())
    return (float(np.square(height + slope * x - y).sum()), height, slope) if slope > 0 else None
