"""The records that a ramp makes: what a server does at each concurrency. `tune.json` holds them as they are."""

from __future__ import annotations

from typing import Literal

import msgspec

from spot_async.tools.tune.knee import running_medians

# Why a ramp ended.
Ending = Literal[
    "flat",  # more in flight no longer gave more
    "demand",  # the run never has more in flight
    "instant",  # answers come so fast that no limit is needed
    "time",  # --seconds were used up
    "requests",  # --limit-requests were sent
    "budget",  # a budget of money or tokens is spent
    "throttled",  # the server asked to be left alone (429, 503)
    "failed",  # requests failed for other reasons
]


class StageLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a server did for one stage at one level."""

    requests: int
    busy_s: float  # summed latency; divided by the level's seconds it is the mean in flight (Little's law)


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """What a server did with a constant number of requests in flight, without the warm-up."""

    concurrency: int
    seconds: float  # over which answers were counted
    requests: int  # answered in that time
    failures: int = 0  # requests that failed in that time
    tokens: int  # generated, or scored
    p50_s: float  # median latency
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
    """All levels that were measured of one server."""

    server: str  # a role, or "verifier"
    levels: list[Level]  # by rising concurrency
    knee: int | None  # its concurrency; None if throughput still rose at the end, or nothing could be measured
    ended: Ending
    failure: str | None = None  # the error of the request that ended it
    sent: int = 0  # all requests, warm-up included

    @property
    def at_knee(self) -> Level | None:
        return next((level for level in self.levels if level.concurrency == self.knee), None)

    @property
    def best(self) -> float:
        """The highest throughput, in requests per second, that the knee was judged by; 0 if nothing was measured."""
        return max(running_medians([level.throughput for level in self.levels]), default=0.0)
