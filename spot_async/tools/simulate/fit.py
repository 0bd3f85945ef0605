"""Finds a server's rates in the requests that a run sent to it. Pure.

A request is on its way for `request_s`, whatever the server has to do. Then it waits until fewer than `slots` others
are worked on. These share the server: each gets `tokens_per_s_each`, or its part of `tokens_per_s` if that is less.

A recorded run says when each request was sent, how many tokens it had and when its answer came. So the requests are
sent again to a server with such rates, on paper. The rates are those whose answers come when the recorded ones did. A
server that works on one request after the other is found in the same way: it has one slot.

What a run does not show is not assumed: at most, a server does what it did with all the requests that it ever had at
a time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from spot_async.types import Float64Array

LATEST = 2000  # requests that are sent again: the last ones
STARTS = 3  # values of `shared` from which the search begins
ROUNDS = 25  # of a search at most
STEP = 0.02  # for derivatives, relative
ENOUGH = 1e-4  # improvement of a round, relative
SLOWEST_TOKENS_PER_S, FASTEST_TOKENS_PER_S = 1e-6, 1e12  # beyond any server: a step of the search may be far off
STUCK = 1e4  # damping that ends a search
UNEXPLAINED = 0.01  # of the median seconds: no request is explained any better


class Timed(NamedTuple):
    """A request of known length."""

    server: str
    started_s: float
    ended_s: float
    tokens: float


class Speed(NamedTuple):
    """What was found of one server. Without `slots` it works on all its requests at once."""

    tokens_per_s: float
    tokens_per_s_each: float
    request_s: float
    slots: int | None


class Sent(NamedTuple):
    """The requests of one server, in the order in which they were sent."""

    started_s: Float64Array
    seconds: Float64Array
    tokens: Float64Array


def speed(requests: Sequence[Timed], slots: int | None) -> Speed | None:
    """Return the speed that explains the requests' seconds best; None where they say nothing.

    Without `slots` the server may work on all at once, or on one after the other.
    """
    latest = [each for each in sorted(requests, key=lambda each: each.started_s) if each.tokens > 0][-LATEST:]
    latest = [each for each in latest if each.ended_s > each.started_s]
    if not latest:
        return None
    servers = [_sent([each for each in latest if each.server == name]) for name in sorted({r.server for r in latest})]
    best: tuple[float, Speed] | None = None
    for tried in [slots] if slots else [None, 1]:
        most_shared = min(float(tried or np.inf), max(float(_in_flight(own).max()) for own in servers))
        for shared in np.geomspace(most_shared, 1.0, STARTS if most_shared > 1.0 else 1):
            found = _search(servers, tried, float(shared), most_shared)
            if best is None or found[0] < best[0]:
                best = found
    assert best is not None
    return best[1]


def replayed(sent: Sent, rates: Speed) -> Float64Array:
    """Return the seconds that the requests take at a server with these rates."""
    slots = rates.slots or len(sent.tokens)
    arrivals_s, tokens = (sent.started_s + rates.request_s).tolist(), sent.tokens.tolist()
    ended_s = [0.0] * len(tokens)
    now_s = got = 0.0  # `got` is what any request would have got since the start
    ends: list[tuple[float, int]] = []  # a heap of (`got` at the request's end, request)
    waiting: deque[int] = deque()

    def work_until(limit_s: float) -> None:
        nonlocal now_s, got
        while ends:
            rate = min(rates.tokens_per_s_each, rates.tokens_per_s / len(ends))
            end_s = now_s + (ends[0][0] - got) / rate
            if end_s > limit_s:
                got += rate * (limit_s - now_s)
                break
            got, number = heapq.heappop(ends)
            now_s = ended_s[number] = end_s
            if waiting:
                begun = waiting.popleft()
                heapq.heappush(ends, (got + tokens[begun], begun))
        now_s = limit_s

    for number, arrival_s in enumerate(arrivals_s):
        work_until(arrival_s)
        if len(ends) < slots:
            heapq.heappush(ends, (got + tokens[number], number))
        else:
            waiting.append(number)
    work_until(float("inf"))
    return np.array(ended_s) - sent.started_s


def _search(servers: Sequence[Sent], slots: int | None, shared: float, most_shared: float) -> tuple[float, Speed]:
    """Return the smallest sum of unexplained seconds that a search finds from here, and its rates.

    It looks for `request_s`, `tokens_per_s_each`, and `shared`: how many requests the server has at its whole rate.
    """
    seconds = np.concatenate([own.seconds for own in servers])
    scale_s = float(np.median(seconds))

    def rates(place: Float64Array) -> Speed:
        each = float(np.exp(place[1]))
        return Speed(each * float(np.exp(place[2])), each, scale_s * float(place[0]), slots)

    def missing(place: Float64Array) -> Float64Array:
        found = rates(place)
        return np.asarray(seconds - np.concatenate([replayed(own, found) for own in servers]))

    tokens = np.concatenate([own.tokens for own in servers])
    slowed = np.concatenate([np.maximum(1.0, np.minimum(_in_flight(own), slots or np.inf) / shared) for own in servers])
    request_s = 0.5 * float(seconds.min())
    each = float(np.median(tokens * slowed / (seconds - request_s)))
    lowest = np.array([0.0, np.log(SLOWEST_TOKENS_PER_S), 0.0])
    highest = np.array([np.inf, np.log(FASTEST_TOKENS_PER_S), np.log(most_shared)])
    place = np.array([request_s / scale_s, np.log(each), np.log(shared)])
    place, left = _least(missing, place, lowest, highest, UNEXPLAINED * scale_s)
    return left, rates(place)


def _least(
    missing: Callable[[Float64Array], Float64Array],
    place: Float64Array,
    lowest: Float64Array,
    highest: Float64Array,
    floor: float,
) -> tuple[Float64Array, float]:
    """Return where the sum of the absolute values of `missing` is least, and that sum: Levenberg and Marquardt's way,
    with weights that make squares absolute values.
    """
    now = missing(place)
    left, damping = float(np.abs(now).sum()), 1e-2
    for _ in range(ROUNDS):
        steps = np.where(place + STEP > highest, -STEP, STEP) * np.eye(len(place))
        slopes = np.stack([(missing(place + step) - now) / step.sum() for step in steps], axis=1)
        weights = 1 / np.sqrt(np.maximum(np.abs(now), floor))
        a, b = slopes * weights[:, None], now * weights
        square, before = a.T @ a, left
        while damping < STUCK:
            pulled = square + damping * (np.diag(np.diag(square)) + 1e-9 * np.eye(len(place)))
            tried = np.clip(place - np.linalg.solve(pulled, a.T @ b), lowest, highest)
            then = missing(tried)
            if np.abs(then).sum() < left:
                place, now, left, damping = tried, then, float(np.abs(then).sum()), damping / 3
                break
            damping *= 4
        if before - left <= ENOUGH * before:
            break
    return place, left


def _sent(requests: Sequence[Timed]) -> Sent:
    started_s, ended_s, tokens = (np.array(column) for column in zip(*(each[1:] for each in requests), strict=True))
    return Sent(started_s, ended_s - started_s, tokens)


def _in_flight(own: Sent) -> Float64Array:
    """Return how many requests the server had while it had each of them, itself included, as a mean."""
    ended_s = own.started_s + own.seconds
    times_s = np.concatenate([own.started_s, ended_s])
    order = np.argsort(times_s, kind="stable")
    changes = np.concatenate([np.ones_like(ended_s), -np.ones_like(ended_s)])[order]
    times_s, in_flight = times_s[order], np.cumsum(changes)
    busy_s = np.concatenate([[0.0], np.cumsum(in_flight[:-1] * np.diff(times_s))])
    during_s = np.interp(ended_s, times_s, busy_s) - np.interp(own.started_s, times_s, busy_s)
    return np.asarray(np.maximum(1.0, during_s / own.seconds))
