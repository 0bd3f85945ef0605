"""Decides when the next request to an endpoint may leave, by limits on requests and tokens a minute.

Pure: it reads no clock, and nobody waits here. Each limit is a token bucket that refills evenly and holds one second's
worth. So a minute's allowance is spread over the minute, since providers that state a limit per minute often enforce
it over a second.

A request goes through these steps:

1. Whoever grants turns asks `delay_s`, waits that long, and calls `grant`, which keeps room for one request.
2. Whoever sends the request asks `turn_s`, waits that long, and calls `send` as it leaves. Requests leave in order.
3. If nothing is sent after all, `give_back` returns the grant, as if it had never been given.
4. `settle` corrects the count once the reply states what the request really took.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from itertools import takewhile

BURST_S = 1.0  # seconds' worth of the rate that may leave at once
ROUNDING = 1e-6  # requests or tokens that may be missing by rounding alone


@dataclass(eq=False)
class Grant:
    """Permission for one request. It keeps room for it until the request is sent or the grant given back."""

    tokens: int  # prompt and response together


# The grant of the lease under which the current task sends. A context variable carries it there, since the pool that
# grants turns and the adapter that sends do not know each other.
LEASED: ContextVar[Grant | None] = ContextVar("LEASED", default=None)


class TokenBucket:
    """Lets `per_minute` of something through. It holds a second's worth, but at least one."""

    def __init__(self, per_minute: float) -> None:
        self._per_s = per_minute / 60
        self._capacity = max(1.0, BURST_S * self._per_s)
        self._level = self._capacity
        self._at_s = float("-inf")

    def delay_s(self, now_s: float, amount: float, kept: float) -> float:
        """Return the seconds until `amount` may be taken beside what is `kept` for others.

        An amount larger than the bucket may be taken from a full bucket; otherwise it could never leave.
        """
        missing = min(amount, self._capacity) + kept - self._level_at(now_s)
        return missing / self._per_s if missing > ROUNDING else 0.0

    def take(self, now_s: float, amount: float) -> None:
        """Take `amount`; a negative one gives back.

        What is taken beyond the level is owed: later requests wait until it has been refilled.
        """
        self._level = min(self._capacity, self._level_at(now_s) - amount)
        self._at_s = max(now_s, self._at_s)

    def _level_at(self, now_s: float) -> float:
        if now_s <= self._at_s:
            return self._level
        return min(self._capacity, self._level + (now_s - self._at_s) * self._per_s)


class RateLimiter:
    """The rate limits of one account or endpoint, and the pause that the endpoint asked for."""

    def __init__(self, requests_per_minute: float | None = None, tokens_per_minute: float | None = None) -> None:
        self._requests = None if requests_per_minute is None else TokenBucket(requests_per_minute)
        self._tokens = None if tokens_per_minute is None else TokenBucket(tokens_per_minute)
        self._held_until_s = float("-inf")
        self._grants: set[Grant] = set()  # neither used nor given back
        self._granted_tokens = 0
        self._leaving: dict[Grant, None] = {}  # those whose request is waiting to leave, in order

    def delay_s(self, now_s: float, tokens: int) -> float:
        """Return the seconds until a request of `tokens` (prompt and response together) may be granted; 0: now."""
        return self._delay_s(now_s, tokens, len(self._grants), self._granted_tokens)

    def turn_s(self, now_s: float, grant: Grant) -> float:
        """Return the seconds until the request with `grant` may leave, after those that came before it; 0: now.

        Grants that nobody has come with yet are ignored, because their holder may itself be waiting for this request.
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
        """Return the seconds that are left of the pause that the endpoint asked for."""
        return max(0.0, self._held_until_s - now_s)

    def grant(self, tokens: int) -> Grant:
        """Keep room for a request of `tokens` until its grant is used or given back."""
        grant = Grant(tokens)
        self._grants.add(grant)
        self._granted_tokens += tokens
        return grant

    def claim(self, grant: Grant | None) -> Grant | None:
        """Return the grant to the first caller who claims it; None to later ones, and if it is used or not ours."""
        if grant is None or grant in self._leaving or grant not in self._grants:
            return None
        self._leaving[grant] = None
        return grant

    def send(self, now_s: float, grant: Grant) -> None:
        """Count the grant's request as sent."""
        self.give_back(grant)
        if self._requests is not None:
            self._requests.take(now_s, 1)
        if self._tokens is not None:
            self._tokens.take(now_s, grant.tokens)

    def give_back(self, grant: Grant) -> None:
        """Free the room that the grant keeps. Does nothing if the grant was used or given back before."""
        self._leaving.pop(grant, None)
        if grant in self._grants:
            self._grants.remove(grant)
            self._granted_tokens -= grant.tokens

    def settle(self, now_s: float, *, taken: int, used: int) -> None:
        """Correct the count: a request for which `taken` tokens were taken needed `used`."""
        if self._tokens is not None:
            self._tokens.take(now_s, used - taken)

    def hold(self, now_s: float, seconds: float) -> None:
        """Let no request leave for so many seconds, since the endpoint asked for a pause."""
        self._held_until_s = max(self._held_until_s, now_s + seconds)
