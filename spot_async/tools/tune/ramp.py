"""Measures one server at rising numbers of requests in flight.

It is a closed loop: each answer is followed by the next request at once. Between two levels nothing is cancelled, since
a server might continue to compute it. The number in flight doubles until the last two doublings gained nothing. All
times are those of the running loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from spot_async.config import StagesConfig
from spot_async.errors import BudgetSpentError, RequestError, SpotError, ThrottledError
from spot_async.stages.services import STAGE_SERVERS
from spot_async.tools.simulate.measured import Ending, Level, Ramp, StageLoad, is_flat
from spot_async.tools.tune.mix import Request

LEVELS = 12  # how many levels share the time and the requests: 1 to 2,048
MIN_ANSWERS = 4  # per level, however long they take
MAX_ANSWERS = 4000  # per level, however little time they take
INSTANT_S = 1e-3  # a server that answers a single request faster than this needs no limit
MIN_FAILURES = 3  # so many failures at a level end the ramp,
FAILED_SHARE = 0.1  # if they are also this share of the answers


@dataclass(frozen=True)
class RampLimits:
    """When a ramp stops, whatever it has found."""

    seconds: float  # longest time of the whole ramp
    most: int  # highest number of requests in flight
    requests: int | None = None  # most requests to send, warm-up included; None: no limit

    @property
    def answers(self) -> int:
        """The number of answers after which a level ends before its time."""
        return MAX_ANSWERS if self.requests is None else min(MAX_ANSWERS, max(MIN_ANSWERS, self.requests // LEVELS))


def without_limits(stages: StagesConfig) -> StagesConfig:
    """Return the stages' settings without limits of concurrency, and such that nothing is sent again.

    The ramp alone decides how much is in flight, and must see what fails.
    """
    unlimited = {name: getattr(stages, name).model_copy(update={"concurrency": 1 << 30}) for name in STAGE_SERVERS}
    return stages.model_copy(update={**unlimited, "attempts": 0})


class Answer(NamedTuple):
    """One request that was answered."""

    stage: str
    latency_s: float
    tokens: int


class StoppedError(Exception):
    """Raised when no further request will be answered; `ended` says why."""

    def __init__(self, ended: Ending, failure: str | None = None) -> None:
        super().__init__(failure or ended)
        self.ended: Ending = ended
        self.failure = failure


@dataclass
class ClosedLoop:
    """Keeps a number of requests in flight, which only rises: each of its workers has one."""

    requests: Iterator[Request]
    limit: int | None  # most requests in all
    sent: int = 0
    answers: list[Answer] = field(default_factory=list)  # those of the present level
    failures: list[SpotError] = field(default_factory=list)  # those of the present level
    _workers: list[asyncio.Task[None]] = field(default_factory=list)
    _working: int = 0  # workers that have not ended
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def concurrency(self) -> int:
        return len(self._workers)

    def raise_to(self, concurrency: int, group: asyncio.TaskGroup) -> None:
        """Have so many requests in flight from now on."""
        more = range(self.concurrency, concurrency)
        self._working += len(more)
        self._workers += [group.create_task(self._work(), name=f"ramp {number}") for number in more]

    def count_anew(self) -> None:
        self.answers, self.failures = [], []

    def stop(self) -> None:
        for worker in self._workers:
            worker.cancel()

    async def answered(self, count: int, *, until_s: float) -> bool:
        """Wait until `count` requests are answered, or until `until_s`; return whether they are.

        Raises StoppedError if no further request will be answered.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                while len(self.answers) < count and self._working and self._refusal() is None:
                    self._changed.clear()
                    await self._changed.wait()
        if (refusal := self._refusal()) is not None:
            raise refusal
        if len(self.answers) < count and not self._working:
            raise StoppedError("requests")
        return len(self.answers) >= count

    def _refusal(self) -> StoppedError | None:
        """Return the error that makes further requests useless; None while there is none."""
        for error in self.failures:
            if isinstance(error, ThrottledError | BudgetSpentError):
                return StoppedError("throttled" if isinstance(error, ThrottledError) else "budget", str(error))
        if len(self.failures) >= max(MIN_FAILURES, FAILED_SHARE * len(self.answers)):
            return StoppedError("failed", str(self.failures[0]))
        return None

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while (self.limit is None or self.sent < self.limit) and self._refusal() is None:
            self.sent += 1
            request = next(self.requests)
            started_s = loop.time()
            try:
                tokens = await request.send()
                self.answers.append(Answer(request.stage, loop.time() - started_s, tokens))
            except (RequestError, BudgetSpentError) as error:
                self.failures.append(error)
            self._changed.set()
            await asyncio.sleep(0)  # a service in this process may answer without waiting; let others run too
        self._working -= 1
        self._changed.set()


async def ramp(
    server: str, requests: Iterator[Request], limits: RampLimits, on_level: Callable[[str, Level], None]
) -> Ramp:
    """Measure `server` with `requests`, which never end. A server that refuses or fails ends its ramp, and no more."""
    levels: list[Level] = []
    ended: Ending = "time"
    failure: str | None = None
    box_ends_s = asyncio.get_running_loop().time() + limits.seconds
    async with asyncio.TaskGroup() as group:
        closed = ClosedLoop(requests, limits.requests)
        try:
            while ended == "time":
                closed.raise_to(max(1, min(2 * closed.concurrency, limits.most)), group)
                level = await _measure(closed, limits, box_ends_s)
                if level is None:
                    break
                levels.append(level)
                on_level(server, level)
                ended = _ended(levels, limits.most)
        except StoppedError as stopped:
            ended, failure = stopped.ended, stopped.failure
        finally:
            closed.stop()
    return Ramp(server=server, levels=levels, ended=ended, failure=failure, sent=closed.sent)


def _ended(levels: Sequence[Level], most: int) -> Ending:
    """Return why no further level is worth measuring; "time" while one is."""
    if levels[0].p50_s < INSTANT_S:
        return "instant"
    if is_flat([level.throughput for level in levels]):
        return "flat"
    return "demand" if levels[-1].concurrency >= most else "time"


async def _measure(closed: ClosedLoop, limits: RampLimits, box_ends_s: float) -> Level | None:
    """Measure and return the level that the loop is at; None if the time ended before."""
    loop = asyncio.get_running_loop()
    closed.count_anew()
    # Warm-up: the first answers are those of requests that were sent before the level was reached.
    if not await closed.answered(closed.concurrency, until_s=box_ends_s):
        return None
    closed.count_anew()
    started_s = loop.time()
    await closed.answered(limits.answers, until_s=min(started_s + limits.seconds / LEVELS, box_ends_s))
    # Slow servers get more than the window. With less than one answer of each worker, only short requests would count.
    await closed.answered(max(MIN_ANSWERS, closed.concurrency), until_s=box_ends_s)
    return _level(closed, loop.time() - started_s)


def _level(closed: ClosedLoop, seconds: float) -> Level | None:
    answers = closed.answers
    if len(answers) < MIN_ANSWERS or seconds <= 0:
        return None
    p50_s, p95_s = np.quantile([answer.latency_s for answer in answers], [0.5, 0.95]).tolist()
    by_stage = {name: [each.latency_s for each in answers if each.stage == name] for name in STAGE_SERVERS}
    return Level(
        concurrency=closed.concurrency,
        seconds=seconds,
        requests=len(answers),
        failures=len(closed.failures),
        tokens=sum(answer.tokens for answer in answers),
        p50_s=p50_s,
        p95_s=p95_s,
        stages={name: StageLoad(requests=len(own), busy_s=sum(own)) for name, own in by_stage.items() if own},
    )
