"""How many requests and tokens may leave for an endpoint, and when. Pure: no clock, nobody waits here.

Token buckets that refill evenly and hold one second's worth: a minute's allowance is spread over the minute, since
providers that state a limit per minute often enforce it over a second. Whoever grants requests their turn asks
`delay_s`, waits, and calls `take`; when the reply says what it really took, `settle` gives the difference back.
"""

from __future__ import annotations

from collections import deque

BURST_S = 1.0  # of the rate that may leave at once
ROUNDING = 1e-6  # of requests or tokens
MAX_GRANTED = 1024


class TokenBucket:
    """`per_minute` of something, in bursts of a second's worth and never less than one."""

    def __init__(self, per_minute: float) -> None:
        self._per_s = per_minute / 60
        self._capacity = max(1.0, BURST_S * self._per_s)
        self._level = self._capacity
        self._at_s = float("-inf")

    def delay_s(self, now_s: float, amount: float) -> float:
        """Seconds until `amount` may be taken. More than the bucket holds may be taken from a full one."""
        missing = min(amount, self._capacity) - self._level_at(now_s)
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
    """`protocols.RateLimit` of one account or endpoint: requests, tokens, and being told to wait.

    What `take` granted is claimed by the next request that leaves: whoever grants turns need not be who sends.
    """

    def __init__(self, requests_per_minute: float | None = None, tokens_per_minute: float | None = None) -> None:
        self._requests = None if requests_per_minute is None else TokenBucket(requests_per_minute)
        self._tokens = None if tokens_per_minute is None else TokenBucket(tokens_per_minute)
        self._held_until_s = float("-inf")
        self._granted: deque[int] = deque(maxlen=MAX_GRANTED)

    def delay_s(self, now_s: float, tokens: int) -> float:
        """Seconds until a request of `tokens` (prompt and response together) may leave; 0: now."""
        delays = [self.held_s(now_s)]
        if self._requests is not None:
            delays.append(self._requests.delay_s(now_s, 1))
        if self._tokens is not None:
            delays.append(self._tokens.delay_s(now_s, tokens))
        return max(delays)

    def held_s(self, now_s: float) -> float:
        """Seconds for which the endpoint still wants to be left alone."""
        return max(0.0, self._held_until_s - now_s)

    def take(self, now_s: float, tokens: int) -> None:
        """Count a request of `tokens` as gone."""
        if self._requests is not None:
            self._requests.take(now_s, 1)
        if self._tokens is not None:
            self._tokens.take(now_s, tokens)
        self._granted.append(tokens)

    def claim(self) -> int | None:
        """The tokens of the oldest grant that nobody has used yet, now used; None when there is none."""
        return self._granted.popleft() if self._granted else None

    def settle(self, now_s: float, *, taken: int, used: int) -> None:
        """A request for which `taken` tokens were taken needed `used`."""
        if self._tokens is not None:
            self._tokens.take(now_s, used - taken)

    def hold(self, now_s: float, seconds: float) -> None:
        """The endpoint asked to be left alone: nothing leaves for that long, whichever request was told."""
        self._held_until_s = max(self._held_until_s, now_s + seconds)
