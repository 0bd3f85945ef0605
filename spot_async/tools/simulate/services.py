"""Simulates servers and a trainer that work at stated rates, several jobs at once.

Replies and numbers are those of `testing/services.py`.

Rates and lengths are in grains here (`lengths.Workload`).
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import count

import msgspec
import numpy as np

from spot_async.base.seeds import derive_seed
from spot_async.base.tasks import Opened
from spot_async.models.responses import counted_tokens
from spot_async.stages.services import EnvironmentService
from spot_async.testing.environments import SimulatedEnvironment, simulated_environment
from spot_async.testing.services import (
    END_TOKEN,
    INITIAL_VERSION,
    VOCAB_SIZE,
    Latency,
    SimulatedStudent,
    SimulatedTeacher,
    SimulatedTrainer,
    SimulatedVerifier,
    capabilities,
    generation,
    with_topk,
)
from spot_async.testing.simulation import simulated_vocabulary
from spot_async.tools.simulate.lengths import GRAINS, Asked, EnvironmentRates, Workload
from spot_async.tools.simulate.rates import ClusterRates, TrainerRates, of_one
from spot_async.types import (
    Capabilities,
    Float64Array,
    Generation,
    IntArray,
    Live,
    Problem,
    Prompt,
    SamplingSettings,
    ScoreRequest,
    Supervision,
    TokenScores,
    TrainReport,
    Verdict,
    VersionSpan,
    WeightSnapshot,
    WeightVersion,
)

ROUNDING = 1e-6  # of amounts
LOOKS_IN_A_STEP = 3  # a backward pass takes as long as two forward passes


class SharedProcessor:
    """Does several jobs at once. A job has one share or several, and each share moves at `rate(number of shares)`.

    Nothing moves while it is paused. All shares move at the same speed. So a job is done when the amount that any share
    would have got since the start has reached that job's end, and a heap of ends is enough.
    """

    def __init__(self, rate: Callable[[int], float]) -> None:
        self._rate = rate
        self._shares = 0  # of all jobs together
        # A heap of jobs: what any share will have got at its end, its number, and what its `do` waits for.
        self._jobs: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = count()
        self._each_got = 0.0
        self._done = 0.0  # on all jobs together
        self._until_s = 0.0  # both are counted up to here
        self._timer: asyncio.TimerHandle | None = None
        self._is_paused = False

    @property
    def each_got(self) -> float:
        """How much any share would have got since the start."""
        self._advance()
        return self._each_got

    @property
    def done(self) -> float:
        """How much it has done so far, that of jobs under way included."""
        self._advance()
        return self._done

    async def do(self, amount: float, shares: int = 1) -> None:
        """Do a job: as much on all of its shares together."""
        self._advance()
        done = asyncio.get_running_loop().create_future()
        heapq.heappush(self._jobs, (self._each_got + amount / shares, next(self._numbers), done))
        self._shares += shares
        self._plan()
        try:
            await done
        finally:
            self._advance()
            self._shares -= shares
            self._plan()

    def pause(self, paused: bool) -> None:
        self._advance()
        self._is_paused = paused
        self._plan()

    def _advance(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._shares and not self._is_paused:
            got = self._rate(self._shares) * (now_s - self._until_s)
            self._each_got += got
            self._done += got * self._shares
        self._until_s = now_s

    def _plan(self) -> None:
        while self._jobs and self._jobs[0][2].done():  # whoever waited has left
            heapq.heappop(self._jobs)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._jobs and not self._is_paused:
            left = max(0.0, self._jobs[0][0] - self._each_got)
            self._timer = asyncio.get_running_loop().call_later(left / self._rate(self._shares), self._finish)

    def _finish(self) -> None:
        """End the jobs that are due. Each `do` then gives its shares back, and plans what is next."""
        self._timer = None
        self._advance()
        reached = max(self._each_got + ROUNDING, self._jobs[0][0])  # the first job is due, whatever rounding says
        while self._jobs and self._jobs[0][0] <= reached:
            _, _, done = heapq.heappop(self._jobs)
            if not done.done():
                done.set_result(None)


AT_ONCE = Latency(0.0, 0.0, 0.0)
UNLIMITED = 1 << 30
PROMPT_TOKENS = 8  # of a simulated prompt; the workload says how long real ones are
WRITTEN = " ".join(["2"] * GRAINS)  # a response in the data, which is as long as the average
FIRST_TOKEN, BASE = 2, VOCAB_SIZE - 2  # the two before it are special


def prompts(teachers: Sequence[str] = ("",)) -> Iterator[Prompt]:
    """Return prompts without end, which ask one of these teachers each, by turns; empty: all that there are.

    The tokens of each are the digits of its ordinal, so that servers know it.
    """
    for ordinal in count():
        digits = [ordinal // BASE**place % BASE for place in range(PROMPT_TOKENS)]
        token_ids = np.array(digits, np.int32) + FIRST_TOKEN
        teacher = teachers[ordinal % len(teachers)]
        problem = Problem(id=f"p{ordinal}", text="", answer="1", response=WRITTEN, teacher=teacher)
        yield Prompt(ordinal=ordinal, problem=problem, token_ids=token_ids)


def ordinal_of(prompt_ids: IntArray) -> int:
    """Return the ordinal of the prompt that these tokens begin with."""
    digits = (prompt_ids[:PROMPT_TOKENS] - FIRST_TOKEN).tolist()
    return sum(digit * BASE**place for place, digit in enumerate(digits))


class RatedServer(Opened):
    """A simulated server: requests wait for a slot, and those that have one share its processor."""

    def __init__(self, role: str, cluster: ClusterRates, workload: Workload, asked: Asked) -> None:
        """Make a server. One without rates may be asked for nothing. All of a role have the same `asked`."""
        self._rates = rates = cluster.of(role)
        self._cluster = cluster
        self._workload = workload
        self._asked = asked
        self._processor = SharedProcessor(cache(lambda requests: rates.tokens_per_s_of_one(requests) / workload.grain))
        self._slots = asyncio.Semaphore(rates.slots or UNLIMITED)
        self._updates: list[tuple[float, WeightVersion]] = [(0.0, INITIAL_VERSION)]  # by what any share had got

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def capabilities(self, *, deadline: float) -> Capabilities:
        return capabilities(VOCAB_SIZE, slots=self._rates.slots, in_flight_updates=self._cluster.in_flight_updates)

    async def update_weights(self, snapshot: WeightSnapshot, *, deadline: float) -> None:
        """Load weights. Requests in flight stand still meanwhile, and continue with the new ones."""
        self._processor.pause(True)
        try:
            await asyncio.sleep(self._cluster.update_s)
        finally:
            self._processor.pause(False)
        self._updates.append((self._processor.each_got, snapshot.version))

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling: SamplingSettings,
        *,
        top_k: int = 0,
        session: str | None = None,
        deadline: float,
    ) -> Generation:
        most, ordinal = sampling.max_tokens, ordinal_of(prompt_ids)
        length = self._workload.turn(ordinal, sampling.seed, most, self._asked, session or "")
        begun = await self.work(length)
        rng = np.random.default_rng(derive_seed(sampling.seed, "tokens"))
        token_ids = rng.integers(2, VOCAB_SIZE, length, dtype=np.int32)
        if length < most:
            token_ids[-1] = END_TOKEN
        reply = generation(
            token_ids, -rng.random(length, dtype=np.float32), finish_reason="stop" if length < most else "length"
        )
        return with_topk(msgspec.structs.replace(reply, version_spans=self._spans(begun, length)), top_k, VOCAB_SIZE)

    @property
    def worked(self) -> float:
        """Grains that it has worked off so far, those of requests under way included."""
        return self._processor.done

    async def work(self, grains: float, shares: int = 1) -> float:
        """Work off a request, which has a share of the processor or several; return what one had got before."""
        if self._rates.request_s:
            await asyncio.sleep(self._rates.request_s)
        async with self._slots:
            begun = self._processor.each_got
            await self._processor.do(grains, shares)
        return begun

    def _spans(self, begun: float, length: int) -> tuple[VersionSpan, ...]:
        """Return the versions of a response's tokens, of those that were generated between two updates the same."""
        starts = [min(length, max(0, round(got - begun))) for got, _ in self._updates]
        ends = [*starts[1:], length]
        return tuple(
            VersionSpan(start, end, version)
            for start, end, (_, version) in zip(starts, ends, self._updates, strict=True)
            if end > start
        )


class RatedStudent(RatedServer, SimulatedStudent):
    """A server of the student."""

    @property
    def version(self) -> WeightVersion:  # type: ignore[override]
        return self._updates[-1][1]

    async def score_base(self, request: ScoreRequest, *, top_k: int) -> TokenScores:
        """Score a response as the reference, or else as a teacher: as fast as its rates say, if none is written."""
        own = self._rates
        base = self._cluster.teacher if self._cluster.reference.tokens_per_s is None else self._cluster.reference
        assert own.tokens_per_s is not None
        assert base.tokens_per_s is not None
        scored = self._workload.scored(ordinal_of(request.prompt_ids), len(request.response_ids))
        shares = max(1, round(own.requests_at_whole_rate / base.requests_at_whole_rate))
        await self.work(scored * own.tokens_per_s / base.tokens_per_s, shares)
        return await SimulatedTeacher(AT_ONCE).score(request, top_k=top_k)

    async def _work(self, tokens: int, rng: np.random.Generator) -> None:
        """Take the time of candidates, the only request that its base class answers."""
        await asyncio.sleep(self._cluster.candidates_s)


class RatedTeacher(RatedServer, SimulatedTeacher):
    """A server of the teacher or of the reference."""

    latency = AT_ONCE

    async def _rows(self, request: ScoreRequest) -> Float64Array:
        """Take the time of a score, whether of the top-k or of chosen tokens."""
        await self.work(self._workload.scored(ordinal_of(request.prompt_ids), len(request.response_ids)))
        return await super()._rows(request)


class RatedTrainer(SimulatedTrainer):
    """A trainer that takes a fixed time and some for each token."""

    def __init__(self, rates: TrainerRates, grain: int) -> None:
        super().__init__()
        self._rates = rates
        self._grain = grain

    async def look(self, iteration: int, batch: Sequence[Supervision]) -> Sequence[Live]:
        await asyncio.sleep(self._tokens_s(batch) / LOOKS_IN_A_STEP)
        return await super().look(iteration, batch)

    async def train(self, iteration: int, batch: Sequence[Supervision]) -> TrainReport:
        self.step_s = self._rates.fixed_s + self._tokens_s(batch)
        return await super().train(iteration, batch)

    def _tokens_s(self, batch: Sequence[Supervision]) -> float:
        assert self._rates.tokens_per_s is not None
        return self._grain * sum(int(counted_tokens(each).sum()) for each in batch) / self._rates.tokens_per_s


class RatedVerifier(SimulatedVerifier):
    """A verifier whose verdicts share what it does, where that was measured."""

    def __init__(self, rates: ClusterRates) -> None:
        super().__init__(rates.verdict_s if rates.verdicts is None else 0.0)
        self._levels = rates.verdicts
        self._processor = SharedProcessor(cache(lambda requests: of_one(rates.verdicts or {1: 1.0}, requests)))

    async def verify(self, problem: Problem, response_text: str, *, deadline: float) -> Verdict:
        if self._levels is not None:
            await self._processor.do(1.0)
        return await super().verify(problem, response_text, deadline=deadline)


def rated_environment(rates: EnvironmentRates, workload: Workload) -> EnvironmentService:
    """Return an environment whose workers answer a turn each at a time, and which ends episodes as the rates say."""
    bridge = np.zeros(max(1, round(rates.answer_tokens / workload.grain)), np.int32)
    server = SimulatedEnvironment(
        rates.answer_s or 0.0,
        turns=lambda problem: rates.turns_of(int(problem.id.removeprefix("p"))),
        workers=asyncio.Semaphore(rates.workers or UNLIMITED),
    )
    rules = simulated_environment(simulated_vocabulary(), between=lambda texts: bridge, max_turns=UNLIMITED).rules
    return EnvironmentService(server=server, rules=rules)
