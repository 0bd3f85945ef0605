"""Finds a server's rates in the requests that a run sent to it. Pure.

A request is on its way for `request_s`, whatever the server has to do. Then it waits until fewer than `slots` others
are worked on. These share the server: each gets `tokens_per_s_each`, or its part of `tokens_per_s` if that is less.

A recorded run says when each request was sent, how many tokens it had and when its answer came. So the requests are
sent again to a server with such rates, on paper. The rates are those whose answers come when the recorded ones did. A
server that works on one request after the other is found in the same way: it has one slot.

How long a single request waits also depends on what is not modelled, such as others of its length. So answers only
decide what a request has at most, and what it takes besides. The rate of all follows from the whole run: its tokens are
done in just the time in which the server had requests. Such a server gives the run's own times back.

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
GOLDEN = (5**0.5 - 1) / 2
STEPS = 14  # of a search: each leaves this share of the range


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
    every = [each for each in sorted(requests, key=lambda each: each.started_s) if each.tokens > 0]
    every = [each for each in every if each.ended_s > each.started_s]
    if not every:
        return None
    servers = _by_server(every[-LATEST:])
    rates = min((_search(servers, tried) for tried in ([slots] if slots else [None, 1])), key=lambda found: found[0])[1]
    return _speed(_by_server(every), rates.request_s, rates.tokens_per_s / rates.tokens_per_s_each, rates.slots)


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


def _search(servers: Sequence[Sent], slots: int | None) -> tuple[float, Speed]:
    """Return the smallest sum of unexplained seconds that a search finds, and its rates.

    It looks for `request_s`, and for `shared`: how many requests the server has at its whole rate.
    """
    seconds, tokens = (np.concatenate(each) for each in list(zip(*servers, strict=True))[1:])
    most_shared = min(float(slots or np.inf), max(float(_loads(own, 0.0)[0].max()) for own in servers))

    def rates(request_s: float, shared: float) -> Speed:
        found = _speed(servers, request_s, shared, slots)
        # No request was answered before a server with that one alone would have been done.
        most_s = max(0.0, float((seconds - tokens / found.tokens_per_s_each).min()))
        return found if request_s <= most_s else _speed(servers, most_s, shared, slots)

    def missing_s(request_s: float, shared: float) -> float:
        found = rates(request_s, shared)
        return float(np.abs(seconds - np.concatenate([replayed(own, found) for own in servers])).sum())

    def shared_by(request_s: float) -> tuple[float, float]:
        return _least(lambda power: missing_s(request_s, float(np.exp(power))), float(np.log(most_shared)))

    request_s, left_s = _least(lambda request_s: shared_by(request_s)[1], 0.99 * float(seconds.min()))
    return left_s, rates(request_s, float(np.exp(shared_by(request_s)[0])))


def _least(cost: Callable[[float], float], highest: float) -> tuple[float, float]:
    """Return where, from 0 to `highest`, a cost with a single valley is least, and that cost: golden-section search."""
    low, high = 0.0, highest
    left, right = high - GOLDEN * high, GOLDEN * high
    of_left, of_right = cost(left), cost(right)
    for _ in range(STEPS):
        if of_left <= of_right:
            high, right, of_right = right, left, of_left
            left = high - GOLDEN * (high - low)
            of_left = cost(left)
        else:
            low, left, of_left = left, right, of_right
            right = low + GOLDEN * (high - low)
            of_right = cost(right)
    return (left, of_left) if of_left <= of_right else (right, of_right)


def _speed(servers: Sequence[Sent], request_s: float, shared: float, slots: int | None) -> Speed:
    """Return the speed at which all requests are done in the time that they took together."""
    alone_s = 0.0  # that one request alone would have taken for all of them
    for own in servers:
        in_flight, for_s = _loads(own, request_s)
        alone_s += float((np.minimum(in_flight, shared) * for_s).sum())
    each = float(sum(own.tokens.sum() for own in servers)) / alone_s
    return Speed(each * shared, each, request_s, slots)


def _by_server(requests: Sequence[Timed]) -> list[Sent]:
    found = []
    for name in sorted({each.server for each in requests}):
        columns = zip(*(each[1:] for each in requests if each.server == name), strict=True)
        started_s, ended_s, tokens = map(np.array, columns)
        found.append(Sent(started_s, ended_s - started_s, tokens))
    return found


def _loads(own: Sent, request_s: float) -> tuple[Float64Array, Float64Array]:
    """Return how many requests the server had, one number after the other, and for how many seconds each."""
    times_s = np.concatenate([own.started_s + request_s, own.started_s + own.seconds])
    order = np.argsort(times_s, kind="stable")
    changes = np.concatenate([np.ones_like(own.tokens), -np.ones_like(own.tokens)])[order]
    return np.cumsum(changes)[:-1], np.diff(times_s[order])
