"""What `tune` measures: servers at rising numbers of requests in flight. Its file holds these records as they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from spot_async.base.files import read_json

FORMAT = 1  # raised when the file can no longer be read as before
ENOUGH = 0.95  # of the best throughput: below it, more in flight gave more

Ending = Literal["flat", "demand", "instant", "time", "requests", "budget", "throttled", "failed"]
ENDED: dict[Ending, str] = {  # why a ramp ended
    "flat": "more in flight gave no more",
    "demand": "the run never has more in flight",
    "instant": "answers at once",
    "time": "its time was used up",
    "requests": "its requests were used up",
    "budget": "its budget is spent",
    "throttled": "the server asked to be left alone",
    "failed": "requests failed",
}


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
    knee: int | None = None  # the level that its stages' limits follow from; None if they stay as configured
    ended: Ending
    failure: str | None = None  # the error of the request that ended it
    sent: int = 0  # all requests, warm-up included

    @property
    def is_whole(self) -> bool:
        """Whether more in flight than was measured is known to bring nothing. Else nobody knows what it would bring."""
        return self.ended in ("flat", "demand")


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """A value for one configuration key, with its reason."""

    key: str
    configured: int
    recommended: int
    reason: str


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """One tuning: everything that was measured, and what follows from it."""

    format: int = FORMAT
    measured: str  # when, in ISO 8601 with the time zone
    seconds: float  # how long each server was measured at most
    prompts: int  # for how many prompts requests were noted
    requests_per_prompt: dict[str, float]  # by server
    ramps: list[Ramp]
    recommendations: list[Recommendation] = []
    advice: list[str] = []
    warnings: list[str] = []


def read_tuning(path: Path) -> Tuning:
    """Return a tuning from its JSON file. Raises DataError if it cannot be read, or is of a newer format."""
    return read_json(path, Tuning, newest_format=FORMAT, otherwise="is no file of spot-async tune")


def rates_of_ramps(ramps: Sequence[Ramp]) -> dict[str, Any]:
    """Return the rates of servers that were ramped, as `rates.ClusterRates` has them."""
    rates: dict[str, Any] = {}
    for ramp in ramps:
        of_verdicts = ramp.server == "verifier"
        speeds = {each.concurrency: each.throughput if of_verdicts else each.tokens_per_s for each in ramp.levels}
        speeds = {requests: speed for requests, speed in speeds.items() if speed > 0}
        levels = dict(zip(speeds, running_medians([*speeds.values()]), strict=True))
        if of_verdicts and levels:
            rates |= {"verdict_s": ramp.levels[0].p50_s, "verdicts": levels}
        elif levels:
            rates[ramp.server] = {"levels": levels}
    return rates


def is_flat(throughputs: Sequence[float]) -> bool:
    """Whether the last two doublings gained nearly nothing over those before. One alone may have been disturbed."""
    return len(throughputs) > 2 and max(running_medians(throughputs)[:-2]) >= ENOUGH * max(throughputs[-2:])


def running_medians(values: Sequence[float]) -> list[float]:
    """Return each value's median with its two neighbours: a single level that something else disturbed is taken out.

    The ends stay as they are. (Tukey, "Exploratory Data Analysis", 1977.)
    """
    inner = [sorted(values[i - 1 : i + 2])[1] for i in range(1, len(values) - 1)]
    return [*values[:1], *inner, *values[-1:]] if len(values) > 2 else list(values)
