"""What a ramp finds out: a server's figures at each concurrency. Plain records, as `tune.json` holds them."""

from __future__ import annotations

from typing import Literal

import msgspec

from spot_async.tools.tune.knee import running_medians

# Why a ramp went no further.
Ending = Literal[
    "flat",  # more in flight no longer gave more
    "demand",  # the run never has more in flight
    "instant",  # answers take no time that a limit could save
    "time",  # --seconds were used up
    "requests",  # --limit-requests were sent
    "budget",  # so was the money, or the tokens
    "throttled",  # the server asked to be left alone (429, 503)
    "failed",  # requests failed otherwise
]


class StageLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of request among those that a server answered at one level."""

    requests: int
    busy_s: float  # summed latency: mean in flight = busy_s / seconds (Little's law)


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """A server with a constant number of requests in flight, warm-up left out."""

    concurrency: int
    seconds: float  # over which answers were counted
    requests: int  # answered in them
    failures: int = 0  # beside them
    tokens: int  # generated; of a scorer, given log-probabilities
    p50_s: float  # latency, half of the requests below
    p95_s: float
    stages: dict[str, StageLoad]

    @property
    def throughput(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Ramp(msgspec.Struct, frozen=True, kw_only=True):
    """One server from one request in flight to as many as it pays for."""

    server: str  # a role, or "verifier"
    levels: list[Level]  # by concurrency
    knee: int | None  # a concurrency; None when nothing could be measured
    ended: Ending
    failure: str | None = None  # what the request that ended it said
    sent: int = 0  # requests in all, warm-up included

    @property
    def at_knee(self) -> Level | None:
        return next((level for level in self.levels if level.concurrency == self.knee), None)

    @property
    def best(self) -> float:
        """The highest throughput, requests per second, as the knee was judged by; 0 when nothing was measured."""
        return max(running_medians([level.throughput for level in self.levels]), default=0.0)
