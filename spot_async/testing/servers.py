"""Simulates servers with stated rates that can be killed, frozen, throttled and made to miss weights.

They answer as `services.SimulatedStudent` does. Here is how long that takes, depending on the load, and what happens
under a fault. A server outlives the backend objects that stand for it one after the other.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from spot_async.errors import DeadlineExceededError, ProcessDiedError, ThrottledError, TransientError
from spot_async.testing.replies import INITIAL_VERSION, capabilities
from spot_async.testing.services import VOCAB_SIZE, SimulatedStudent
from spot_async.types import Capabilities, WeightSnapshot

ROUNDING_TOKENS = 1e-6


@dataclass(frozen=True)
class Rates:
    """A server's capacity. Each request gets `tokens_per_s_each`, or its share of `tokens_per_s` if that is less."""

    tokens_per_s: float = 2000.0
    tokens_per_s_each: float = 100.0
    request_tokens: float = 2.0  # what a request costs besides its own tokens
    start_s: float = 5.0
    update_s: float = 0.5

    def each(self, requests: int) -> float:
        return min(self.tokens_per_s_each, self.tokens_per_s / requests)


class SharedProcessor:
    """Does several jobs at once, each at `rate(number of jobs)`. Nothing moves while it is paused.

    All jobs move at the same speed. So a job is done when the amount that any job would have got since the start has
    reached that job's end, and a heap of ends is enough.
    """

    def __init__(self, rate: Callable[[int], float]) -> None:
        self._rate = rate
        self._jobs: dict[int, asyncio.Future[None]] = {}
        self._ends: list[tuple[float, int]] = []  # a heap of (`_each_got` at the job's end, job)
        self._each_got = 0.0
        self._until_s = 0.0  # `_each_got` is counted up to here
        self._started = 0
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False

    def __len__(self) -> int:
        return len(self._jobs)

    async def do(self, amount: float) -> None:
        self._advance()
        number, done = self._started, asyncio.get_running_loop().create_future()
        self._started += 1
        self._jobs[number] = done
        heapq.heappush(self._ends, (self._each_got + amount, number))
        self._plan()
        try:
            await done
        finally:
            self._advance()
            self._jobs.pop(number, None)
            self._plan()

    def pause(self, paused: bool) -> None:
        self._advance()
        self._paused = paused
        self._plan()

    def fail(self, error: Exception) -> None:
        """End all jobs with `error`."""
        for done in self._jobs.values():
            if not done.done():
                done.set_exception(error)
        self._jobs.clear()
        self._plan()

    def _advance(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._jobs and not self._paused:
            self._each_got += self._rate(len(self._jobs)) * (now_s - self._until_s)
        self._until_s = now_s

    def _plan(self) -> None:
        while self._ends and self._ends[0][1] not in self._jobs:
            heapq.heappop(self._ends)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends and not self._paused:
            left = max(0.0, self._ends[0][0] - self._each_got)
            self._timer = asyncio.get_running_loop().call_later(left / self._rate(len(self._jobs)), self._finish)

    def _finish(self) -> None:
        self._timer = None
        self._advance()
        while self._ends and self._ends[0][0] <= self._each_got + ROUNDING_TOKENS:
            done = self._jobs.pop(heapq.heappop(self._ends)[1], None)
            if done is not None and not done.done():
                done.set_result(None)
        self._plan()


@dataclass(eq=False)
class SimulatedServer:
    """A simulated server at one address, its processes one after the other, and its faults."""

    name: str
    rates: Rates = field(default_factory=Rates)
    starts: int = 0
    most_in_flight: int | None = None  # further requests are refused with 429
    misses: int = 0  # how many weight updates it refuses from now on

    def __post_init__(self) -> None:
        self.processor = SharedProcessor(self.rates.each)
        self.version = INITIAL_VERSION
        self.is_running = False
        self._thawed = asyncio.Event()
        self._thawed.set()
        self.ended = asyncio.Event()

    async def start(self) -> None:
        await asyncio.sleep(self.rates.start_s)
        self.starts += 1
        self.version = INITIAL_VERSION
        self.is_running = True
        self.ended.clear()
        self.thaw()

    def stop(self) -> None:
        """End it on purpose, so that nobody's `watch` raises."""
        self.is_running = False
        self.processor.fail(TransientError(f"{self.name}: connection reset"))
        self.thaw()

    def kill(self) -> None:
        if self.is_running:
            self.stop()
            self.ended.set()

    def freeze(self) -> None:
        self._thawed.clear()
        self.processor.pause(True)

    def thaw(self) -> None:
        self._thawed.set()
        self.processor.pause(False)

    def connect(self) -> None:
        if not self.is_running:
            raise TransientError(f"{self.name}: connection refused")

    async def answers(self) -> None:
        """Return once it is not frozen."""
        self.connect()
        await self._thawed.wait()
        self.connect()


class SimulatedReplica(SimulatedStudent):
    """A student's backend object for a simulated server. Entering it starts the server."""

    def __init__(self, server: SimulatedServer, mean_tokens: int = 40) -> None:
        self.server = server
        self.requests = 0
        self.mean_tokens = mean_tokens

    @property
    def version(self):  # type: ignore[no-untyped-def, override]
        return self.server.version

    async def __aenter__(self) -> Self:
        await self.server.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.server.stop()

    async def watch(self) -> None:
        await self.server.ended.wait()
        raise ProcessDiedError(f"{self.server.name} was killed by SIGKILL")

    async def capabilities(self, *, deadline: float) -> Capabilities:
        return capabilities(VOCAB_SIZE)

    async def ping(self, *, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await self.server.answers()
        except TimeoutError:
            raise DeadlineExceededError(f"{self.server.name}: no answer to a ping") from None

    async def update_weights(self, snapshot: WeightSnapshot, *, deadline: float) -> None:
        await self.server.answers()
        if self.server.misses:
            self.server.misses -= 1
            raise TransientError(f"{self.server.name}: connection reset")
        await asyncio.sleep(self.server.rates.update_s)
        await self.server.answers()
        self.server.version = snapshot.version

    async def _work(self, tokens: int, rng: np.random.Generator) -> None:
        self.server.connect()
        if self.server.most_in_flight is not None and len(self.server.processor) >= self.server.most_in_flight:
            raise ThrottledError(f"{self.server.name}: HTTP 429", retry_after_s=1.0)
        await self.server.processor.do(tokens + self.server.rates.request_tokens)
