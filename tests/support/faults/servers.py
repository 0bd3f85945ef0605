"""Simulates servers with stated rates that can be killed, frozen, throttled and made to miss weights.

They answer as `services.SimulatedStudent` does. Here is how long that takes, depending on the load, and what happens
under a fault. A server outlives the backend objects that stand for it one after the other.

New weights reach a student's server in one of four ways (`Update`). Where requests are in flight meanwhile, a response
has tokens of several versions, and its spans say which.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Self

import msgspec
import numpy as np
from following_teacher import FollowingTeacher

from spot_async.errors import (
    BudgetSpentError,
    DeadlineExceededError,
    Exchange,
    PermanentError,
    PoisonedReplyError,
    ProcessDiedError,
    RequestError,
    ServerRestartedError,
    ThrottledError,
    TransientError,
)
from spot_async.testing.services import (
    END_TOKEN,
    INITIAL_VERSION,
    VOCAB_SIZE,
    SimulatedStudent,
    any_lineage,
    capabilities,
    finish_reason,
    generation,
    rng_of,
    sampled_tokens,
    with_topk,
)
from spot_async.tools.simulate.services import SharedProcessor
from spot_async.types import (
    Capabilities,
    FloatArray,
    Generation,
    IntArray,
    SamplingSettings,
    ScoreRequest,
    VersionSpan,
    WeightSnapshot,
    WeightVersion,
)

LONGEST_DELAY_S = 20.0  # of a reply that comes late

# What a server does with requests in flight when it gets new weights. It allows none (drain). Or they wait (keep), wait
# and are computed again up to where they were (retract), or end with an error (abort).
Update = Literal["drain", "keep", "retract", "abort"]
# What may be wrong with one reply. The first four are answers of the server, or what a client finds wrong in them; a
# reply may break off, come late, or never come.
ReplyFault = Literal["bad request", "server error", "throttled", "nonsense", "reset", "cut off", "late", "never"]
# What may be wrong with one weight update: the server refuses, the connection breaks off before or after it has the
# weights, it dies half-way, or nothing happens until the deadline.
UpdateFault = Literal["refused", "reset", "unheard", "dies", "hangs"]


class FaultyProcessor(SharedProcessor):
    """One whose jobs may fail, and that may be paused for several reasons."""

    def __init__(self, rate: Callable[[int], float]) -> None:
        super().__init__(rate)
        self._held_for: set[str] = set()

    def __len__(self) -> int:
        return sum(not done.done() for _, _, done in self._jobs)

    def hold(self, held: bool, why: str) -> None:
        """Pause it for this reason, or end that pause. It continues once no reason is left."""
        if held:
            self._held_for.add(why)
        else:
            self._held_for.discard(why)
        self.pause(bool(self._held_for))

    def fail(self, error: Exception) -> None:
        """End all jobs with an `error` of their own."""
        for _, _, done in self._jobs:
            if not done.done():
                done.set_exception(copy.copy(error))
        self._plan()


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


class Held(NamedTuple):
    """Weights that a server holds, from the moment at which any request has got `each_got`."""

    each_got: float
    version: WeightVersion
    contents: str  # what it read of them


@dataclass(eq=False)
class SimulatedServer:
    """A simulated server at one address, its processes one after the other, and its faults."""

    name: str
    rates: Rates = field(default_factory=Rates)
    starts: int = 0
    most_in_flight: int | None = None  # further requests are refused with 429
    misses: int = 0  # how many weight updates it refuses from now on
    update: Update = "drain"
    read: Callable[[str], str] = str  # returns the contents of a weight directory, of which one may be ""
    reply_faults: deque[ReplyFault] = field(default_factory=deque)  # of its next replies
    update_faults: deque[UpdateFault] = field(default_factory=deque)  # of its next updates
    is_unpaid: bool = False  # whether there is no money for further requests
    is_asleep: bool = False
    has_weights: bool = True  # which wake before the rest

    def __post_init__(self) -> None:
        self.processor = FaultyProcessor(self.rates.each)
        self.luck = rng_of("faults of", self.name)  # not a request's, whose answer does not depend on faults
        self.held = [Held(0.0, INITIAL_VERSION, "")]  # oldest first
        self.is_running = False
        self._is_updating = False
        self._thawed = asyncio.Event()
        self._thawed.set()
        self.ended = asyncio.Event()

    @property
    def version(self) -> WeightVersion:
        return self.held[-1].version

    async def start(self, contents: str = "") -> None:
        """Start a process, which holds the initial weights, or what somebody else gave it."""
        await asyncio.sleep(self.rates.start_s)
        self.starts += 1
        self._hold(INITIAL_VERSION, contents)
        self.is_running = True
        self.ended.clear()
        self.thaw()

    def stop(self) -> None:
        """End it on purpose, so that nobody's `watch` raises."""
        self.is_running = False
        self.is_asleep, self.has_weights = False, True
        self._is_updating = False
        self.processor.fail(self.failure(TransientError, "connection reset"))
        self.processor.hold(False, "update")
        self.thaw()

    def kill(self) -> None:
        if self.is_running:
            self.stop()
            self.ended.set()

    def freeze(self) -> None:
        self._thawed.clear()
        self.processor.hold(True, "frozen")

    def thaw(self) -> None:
        self._thawed.set()
        self.processor.hold(False, "frozen")

    def connect(self) -> None:
        if not self.is_running:
            raise self.failure(TransientError, "connection refused")

    async def answers(self) -> None:
        """Return once it is not frozen."""
        self.connect()
        await self._thawed.wait()
        self.connect()

    async def load(self, snapshot: WeightSnapshot, deadline: float) -> None:
        """Load new weights, as `update` says. Raises AssertionError for what no run may do."""
        await self.answers()
        fault: UpdateFault | None = self.update_faults.popleft() if self.update_faults else None
        if self.misses:
            self.misses, fault = self.misses - 1, "reset"
        if fault == "refused":
            raise self.failure(TransientError, "cannot load the weights", status=500)
        if fault == "reset":
            raise self.failure(TransientError, "connection reset")
        assert self.has_weights, f"{self.name} gets weights in its sleep"
        assert not self._is_updating, f"{self.name} gets weights while it loads others"
        in_flight, process = len(self.processor), self.starts
        assert self.update != "drain" or not in_flight, f"{self.name} gets weights with {in_flight} requests in flight"
        if self.update == "abort":
            self.processor.fail(TransientError(f"{self.name}: the server aborted the request"))
        self._is_updating = True
        self.processor.hold(True, "update")
        try:
            contents = self.read(snapshot.directory)
            if fault == "hangs":
                await asyncio.sleep(deadline - asyncio.get_running_loop().time())
                raise self.failure(DeadlineExceededError, "the weights were not loaded in time")
            again_s = in_flight * self.rates.request_tokens / self.rates.tokens_per_s
            await asyncio.sleep(self.rates.update_s + (again_s if self.update == "retract" else 0.0))
            if fault == "dies":
                self.kill()
            await self.answers()
            if self.starts != process:
                raise self.failure(TransientError, "connection reset")
            assert self.read(snapshot.directory) == contents, f"{snapshot.directory} changed under {self.name}"
            self._hold(snapshot.version, contents)
        finally:
            if self.starts == process:
                self._is_updating = False
                self.processor.hold(False, "update")
        if fault == "unheard":
            raise self.failure(TransientError, "connection reset")

    def failure(self, kind: type[RequestError], words: str, status: int | None = None) -> Any:
        """Return a failed request, as a client would see it. Without a status there was no reply."""
        error = kind(f"{self.name}: {words}")
        error.exchange = Exchange(self.name, "POST", "/", 0, {}, status)
        return error

    def _hold(self, version: WeightVersion, contents: str) -> None:
        self.held.append(Held(self.processor.each_got, version, contents))


class _OnServer:
    """A backend object for a simulated server. Entering it starts the server, or `attaches` to one that runs."""

    def __init__(self, server: SimulatedServer, *, attaches: bool = False) -> None:
        self.server = server
        self._attaches = attaches
        self._process = 0

    async def __aenter__(self) -> Self:
        if self._attaches:
            self.server.connect()
        else:
            await self.server.start()
        self._process = self.server.starts
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if not self._attaches:
            self.server.stop()

    async def watch(self) -> None:
        if self._attaches:  # nobody watches a process of others
            await asyncio.get_running_loop().create_future()
        await self.server.ended.wait()
        raise ProcessDiedError(f"{self.server.name} was killed by SIGKILL")

    async def capabilities(self, *, deadline: float) -> Capabilities:
        found = capabilities(VOCAB_SIZE, in_flight_updates=self.server.update != "drain")
        return msgspec.structs.replace(found, version=None) if self._attaches else found

    async def ping(self, *, deadline: float) -> None:
        await self._answers(deadline)

    async def update_weights(self, snapshot: WeightSnapshot, *, deadline: float) -> None:
        self._check_process()
        try:
            async with asyncio.timeout_at(deadline):
                await self.server.load(snapshot, deadline)
        except TimeoutError:
            raise self.server.failure(DeadlineExceededError, "the weights were not loaded in time") from None
        self._check_process()

    async def _answers(self, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await self.server.answers()
        except TimeoutError:
            raise DeadlineExceededError(f"{self.server.name}: no answer in time") from None
        self._check_process()

    async def _work(self, tokens: int, rng: np.random.Generator) -> None:
        """Take as long as the server takes. Raises what may go wrong with a reply."""
        server = self.server
        if server.is_unpaid:
            raise BudgetSpentError(f"{server.name}: the budget is spent")
        server.connect()
        self._check_process()
        assert not server.is_asleep, f"{server.name} gets a request in its sleep"
        if server.most_in_flight is not None and len(server.processor) >= server.most_in_flight:
            raise ThrottledError(f"{server.name}: HTTP 429", retry_after_s=1.0)
        fault: ReplyFault | None = server.reply_faults.popleft() if server.reply_faults else None
        amount = tokens + server.rates.request_tokens
        match fault:
            case "bad request":
                raise server.failure(PermanentError, "HTTP 400", status=400)
            case "server error":
                raise server.failure(TransientError, "HTTP 500", status=500)
            case "throttled":
                raise ThrottledError(f"{server.name}: HTTP 429", retry_after_s=float(server.luck.exponential(2.0)))
            case "reset":
                await server.processor.do(server.luck.random() * amount)
                raise server.failure(TransientError, "connection reset")
        await server.processor.do(amount)
        match fault:
            case "nonsense":
                raise server.failure(PoisonedReplyError, "a reply with NaN", status=200)
            case "cut off":
                raise server.failure(TransientError, "the reply broke off")
            case "late":
                await asyncio.sleep(LONGEST_DELAY_S * server.luck.random())
            case "never":
                await asyncio.get_running_loop().create_future()

    def _check_process(self) -> None:
        if self.server.starts != self._process:
            raise ServerRestartedError(f"{self.server.name} is another process than before")


class SimulatedReplica(_OnServer, SimulatedStudent):
    """A student's backend object for a simulated server."""

    def __init__(self, server: SimulatedServer, mean_tokens: int = 40, *, attaches: bool = False) -> None:
        super().__init__(server, attaches=attaches)
        self.requests = 0
        self.mean_tokens = mean_tokens

    @property
    def version(self):  # type: ignore[no-untyped-def, override]
        return self.server.version

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling: SamplingSettings,
        *,
        top_k: int = 0,
        session: str | None = None,
        deadline: float,
    ) -> Generation:
        """Sample a response. Where weights come meanwhile, the tokens after that are those that they would sample."""
        self.requests += 1
        began, held = self.server.processor.each_got, len(self.server.held) - 1
        rng = rng_of(sampling.seed, any_lineage(self.version))
        token_ids = sampled_tokens(rng, sampling, self.mean_tokens, VOCAB_SIZE, END_TOKEN)
        logprobs = -rng.random(len(token_ids), dtype=np.float32)
        await self._work(len(token_ids), rng)
        spans = self._spans(len(token_ids), began, self.server.held[held:])
        last = token_ids[-1]
        for span in spans[1:]:
            rng, tokens = rng_of(sampling.seed, any_lineage(span.version)), span.end - span.start
            token_ids[span.start : span.end] = rng.integers(2, VOCAB_SIZE, tokens)
            logprobs[span.start : span.end] = -rng.random(tokens)
        token_ids[-1] = last  # how long it gets is the first weights' to decide
        found = generation(token_ids, logprobs, finish_reason=finish_reason(token_ids, END_TOKEN))
        return with_topk(msgspec.structs.replace(found, version_spans=spans), top_k, VOCAB_SIZE)

    async def candidate_logprobs(self, request: ScoreRequest, *asked: Any, **settings: Any) -> FloatArray:
        """Score candidates. That it is another process shows before the weights that it holds, as with real servers."""
        self.server.connect()
        self._check_process()
        return await super().candidate_logprobs(request, *asked, **settings)

    sleeps_while_training = True

    async def sleep(self, *, deadline: float) -> None:
        await self._answers(deadline)
        in_flight = len(self.server.processor)
        assert not in_flight, f"{self.server.name} is put to sleep with {in_flight} requests in flight"
        self.server.is_asleep, self.server.has_weights = True, False

    async def wake_weights(self, *, deadline: float) -> None:
        await self._answers(deadline)
        self.server.has_weights = True

    async def wake(self, *, deadline: float) -> None:
        await self._answers(deadline)
        self.server.is_asleep, self.server.has_weights = False, True

    def _spans(self, tokens: int, began: float, held: Sequence[Held]) -> tuple[VersionSpan, ...]:
        """Return which weights sampled the tokens. `began` is what any request had got when this one began."""
        began += self.server.rates.request_tokens
        changed = [held[0], *(new for old, new in pairwise(held) if new.version != old.version)]
        starts = [0, *(min(tokens, max(0, int(each.each_got - began))) for each in changed[1:])]
        return tuple(
            VersionSpan(start, end, each.version)
            for start, end, each in zip(starts, [*starts[1:], tokens], changed, strict=True)
            if start < end
        )


class SimulatedTeacherReplica(_OnServer, FollowingTeacher):
    """A teacher's backend object for a simulated server: it scores, and writes responses of its own."""

    @property
    def version(self):  # type: ignore[no-untyped-def, override]
        return self.server.version

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling: SamplingSettings,
        *,
        top_k: int = 0,
        session: str | None = None,
        deadline: float,
    ) -> Generation:
        rng = rng_of("teacher", sampling.seed)
        token_ids = sampled_tokens(rng, sampling, 40, VOCAB_SIZE, END_TOKEN)
        await self._work(len(token_ids), rng)
        return generation(token_ids, -rng.random(len(token_ids)), finish_reason=finish_reason(token_ids, END_TOKEN))
