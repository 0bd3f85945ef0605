"""How many requests and tokens may leave for an endpoint, and when. Pure: no clock, nobody waits here.

Token buckets that refill evenly and hold one second's worth: a minute's allowance is spread over the minute, since
providers that state a limit per minute often enforce it over a second.

A request goes through these steps:

1. Who grants turns asks `delay_s`, waits so long, and calls `grant`, which keeps room for one request.
2. Who sends the request asks `turn_s`, waits so long, and calls `send` as it leaves. Requests leave in order.
3. `give_back` returns a grant for which nothing was sent, as if it had never been.
4. `settle` corrects the count when the reply says what the request really took.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from itertools import takewhile

BURST_S = 1.0  # of the rate that may leave at once
ROUNDING = 1e-6  # of requests or tokens


@dataclass(eq=False)
class Grant:
    """Leave for one request, which holds room until it is sent or given back."""

    tokens: int  # prompt and response together


# Of the lease under which something is sent: whoever grants turns need not be who sends.
LEASED: ContextVar[Grant | None] = ContextVar("LEASED", default=None)


class TokenBucket:
    """`per_minute` of something, in bursts of a second's worth and never less than one."""

    def __init__(self, per_minute: float) -> None:
        self._per_s = per_minute / 60
        self._capacity = max(1.0, BURST_S * self._per_s)
        self._level = self._capacity
        self._at_s = float("-inf")

    def delay_s(self, now_s: float, amount: float, kept: float) -> float:
        """Seconds until `amount` may be taken beside what is `kept` for others. More than the bucket holds may be taken
        from a full one."""
        missing = min(amount, self._capacity) + kept - self._level_at(now_s)
        return missing / self._per_s if missing > ROUNDING else 0.0

    def take(self, now_s: float, amount: float) -> None:
        """A negative amount gives back. What is taken beyond the level is owed: later ones wait for it."""
        self._level = min(self._capacity, self._level_at(now_s) - amount)
        self._at_s = max(now_s, self._at_s)

    def _level_at(self, now_s: float) -> float:
        if now_s <= self._at_s:
            return self._level
        return min(self._capacity, self._level + (now_s - self._at_s) * self._per_s)


class RateLimiter:
    """The limits of one account or endpoint: on requests, on tokens, and a pause that it asked for."""

    def __init__(self, requests_per_minute: float | None = None, tokens_per_minute: float | None = None) -> None:
        self._requests = None if requests_per_minute is None else TokenBucket(requests_per_minute)
        self._tokens = None if tokens_per_minute is None else TokenBucket(tokens_per_minute)
        self._held_until_s = float("-inf")
        self._grants: set[Grant] = set()  # neither sent by nor given back
        self._granted_tokens = 0
        self._leaving: dict[Grant, None] = {}  # of them, those that somebody came to send by, in that order

    def delay_s(self, now_s: float, tokens: int) -> float:
        """Seconds until a request of `tokens` (prompt and response together) may be granted its turn; 0: now."""
        return self._delay_s(now_s, tokens, len(self._grants), self._granted_tokens)

    def turn_s(self, now_s: float, grant: Grant) -> float:
        """Seconds until the request that came with `grant` may leave, behind those that came before; 0: now.

        It does not wait for grants that nobody came with yet: who holds one may be waiting for this request to end.
        """
        self._leaving.setdefault(grant)
        before = list(takewhile(lambda each: each is not grant, self._leaving))
        return self._delay_s(now_s, grant.tokens, len(before), sum(each.tokens for each in before))

    def _delay_s(self, now_s: float, tokens: int, kept_requests: int, kept_tokens: int) -> float:
        delays = [self.held_s(now_s)]
        if self._requests is not None:
            delays.append(self._requests.delay_s(now_s, 1, kept_requests))
        if self._tokens is not None:
            delays.append(self._tokens.delay_s(now_s, tokens, kept_tokens))
        return max(delays)

    def held_s(self, now_s: float) -> float:
        """Seconds for which the endpoint still wants to be left alone."""
        return max(0.0, self._held_until_s - now_s)

    def grant(self, tokens: int) -> Grant:
        """Keep room for a request of `tokens`."""
        grant = Grant(tokens)
        self._grants.add(grant)
        self._granted_tokens += tokens
        return grant

    def claim(self, grant: Grant | None) -> Grant | None:
        """The grant, for the first who asks, if it is one of this limiter's that is still good."""
        if grant is None or grant in self._leaving or grant not in self._grants:
            return None
        self._leaving[grant] = None
        return grant

    def send(self, now_s: float, grant: Grant) -> None:
        """The grant's request leaves."""
        self.give_back(grant)
        if self._requests is not None:
            self._requests.take(now_s, 1)
        if self._tokens is not None:
            self._tokens.take(now_s, grant.tokens)

    def give_back(self, grant: Grant) -> None:
        """Nothing is sent by it any more; nothing happens where it was sent by."""
        self._leaving.pop(grant, None)
        if grant in self._grants:
            self._grants.remove(grant)
            self._granted_tokens -= grant.tokens

    def settle(self, now_s: float, *, taken: int, used: int) -> None:
        """A request for which `taken` tokens were taken needed `used`."""
        if self._tokens is not None:
            self._tokens.take(now_s, used - taken)

    def hold(self, now_s: float, seconds: float) -> None:
        """The endpoint asked to be left alone: nothing leaves for that long, whichever request was told."""
        self._held_until_s = max(self._held_until_s, now_s + seconds)
