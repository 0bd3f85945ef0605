"""Discovers what a running server does, by small requests whose answers are compared with each other.

It knows no server's dialect and no run, and does not judge. Each function asks through the protocols and returns what
it saw, or None if that could not be seen. Requests that fail for good are the caller's to handle.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeVar

import numpy as np

from spot_async.base.retry import DEFAULT_ATTEMPTS, QUESTION_TIMEOUT_S, RetryPolicy
from spot_async.base.tasks import gather_answers, sent_again
from spot_async.errors import DeadlineExceededError, PermanentError
from spot_async.models.chunks import Reading
from spot_async.models.precision import NOISE_MARGIN
from spot_async.protocols import Generator, Scorer
from spot_async.types import (
    FloatArray,
    Generation,
    IntArray,
    LogprobTemperature,
    SamplingSettings,
    ScoreRequest,
    TokenScores,
)

COOL = 0.5  # a temperature at which log-probabilities differ clearly from those at 1
T = TypeVar("T")

VISIBLE_NATS = 0.05  # what rounding makes in float32 at most; in 16 bits it may be more
REPEATS = 4
TOGETHER = 8
ROUND_TRIPS = 5
SEED = 20_240_229
RETRY = RetryPolicy(DEFAULT_ATTEMPTS)


@dataclass(frozen=True)
class Asked:
    """What the requests are made of: prompts of the run, a response to each, and where responses end."""

    prompts: Sequence[IntArray]
    responses: Sequence[IntArray]
    stop_token_ids: tuple[int, ...]
    # Sampling is limited to ids below this, since the responses are scored by models that may know no more.
    vocab_limit: int | None = None
    readings: Sequence[Reading] = ()  # of the student's responses, by a teacher with a tokenizer of its own
    teacher_prompts: Sequence[IntArray] = ()  # what the teacher reads in place of each prompt; empty: the prompt
    timeout_s: float = QUESTION_TIMEOUT_S
    attempt_timeout_s: float | None = None  # None: as long as all
    answered: Callable[[], None] = lambda: None  # is called with each answer

    async def answer(self, stage: str, request: Callable[[float], Awaitable[T]]) -> T:
        """Return the reply to a request, which is given its deadline. One that fails is sent again, as by the stage.

        It has its time once it has its turn: as long as the account's limits let others go first, it waits.
        """
        while True:
            try:
                reply = await self._answer_in_time(stage, request)
                break
            except DeadlineExceededError as error:
                if error.was_sent:
                    raise
        self.answered()
        return reply

    async def _answer_in_time(self, stage: str, request: Callable[[float], Awaitable[T]]) -> T:
        clock = asyncio.get_running_loop().time
        until_s = clock() + self.timeout_s
        attempt_s = min(self.timeout_s, self.attempt_timeout_s or self.timeout_s)

        async def attempts() -> T:
            while True:
                try:
                    return await request(min(until_s, clock() + attempt_s))
                except DeadlineExceededError:  # it hung, so it has waited
                    if clock() >= until_s:
                        raise

        return await sent_again(attempts, RETRY, until_s, jitter=random.random, what=f"check of {stage}")

    async def scores(
        self, scorer: Scorer, prompt_ids: IntArray, response_ids: IntArray, *, top_k: int = 1, temperature: float = 1.0
    ) -> TokenScores:
        return await self.answer(
            "score",
            lambda deadline: scorer.score(ScoreRequest(prompt_ids, response_ids, temperature, deadline), top_k=top_k),
        )


@dataclass(frozen=True)
class Noise:
    """How far repeated computations of the same rows lie apart, in nats. No one of them counts as the right one."""

    alone: float  # the largest range of rows that were asked for one after the other
    largest: float  # of those that were asked for at once, too
    ranges: FloatArray  # (N,) of all computations of a value


async def responses(generator: Generator, asked: Asked, max_tokens: int) -> list[IntArray]:
    """Return one response to each prompt."""
    replies = await gather_answers(
        _generate(generator, prompt, asked, seed=SEED + n, max_tokens=max_tokens)
        for n, prompt in enumerate(asked.prompts)
    )
    return [reply.token_ids for reply in replies]


async def score_noise(scorer: Scorer, asked: Asked, top_k: int) -> Noise | None:
    """Return the noise of scores: of the response's tokens, and of the top-k; None if no position is known."""

    async def read() -> FloatArray:
        return _values(await _score(scorer, asked, 0, top_k=top_k))

    return await _noise(read)


async def generation_noise(generator: Generator, asked: Asked, top_k: int) -> Noise | None:
    """Return the noise of the distribution after a prompt, as the server sends it with a sampled token."""

    async def read() -> FloatArray:
        reply = await _generate(generator, asked.prompts[0], asked, seed=SEED, max_tokens=1, top_k=top_k)
        assert reply.topk_logprobs is not None
        row: FloatArray = reply.topk_logprobs[0]
        return row

    return await _noise(read)


async def readings(server: Any, asked: Asked, *, score_top_k: int | None, generation_top_k: int) -> list[FloatArray]:
    """Return rows to compare with those of another server of the same model.

    They are the scores of the responses, (tokens, 1 + top-k), and the distributions after the prompts, (1, top-k), as
    the server sends them with a sampled token. None leaves the former out, and a top-k of 0 the latter. Unknown
    positions are NaN.
    """
    rows = []
    for n in range(len(asked.prompts)):
        if score_top_k is not None:
            scores = await _score(server, asked, n, top_k=score_top_k)
            values = np.column_stack([scores.logprobs, scores.topk_logprobs])
            values[~scores.known] = np.nan
            rows.append(values)
        if generation_top_k:
            reply = await _generate(server, asked.prompts[n], asked, seed=SEED, max_tokens=1, top_k=generation_top_k)
            assert reply.topk_logprobs is not None
            rows.append(reply.topk_logprobs[:1])
    return rows


def in_common(first: Sequence[FloatArray], other: Sequence[FloatArray]) -> tuple[FloatArray, FloatArray]:
    """Return the values (N,) of two servers' `readings` at positions that both know."""
    one, two = (np.concatenate([rows.ravel() for rows in each]) for each in (first, other))
    known = ~(np.isnan(one) | np.isnan(two))
    return one[known], two[known]


@dataclass(frozen=True)
class Explained:
    """The mean log-probability of responses' first tokens, and of all others; None where none is known."""

    first: float | None
    rest: float | None


async def explained(scorer: Scorer, asked: Asked, prompts: Sequence[IntArray]) -> Explained:
    """Return how likely the responses are behind these prompts."""
    scores = await gather_answers(
        asked.scores(scorer, prompt, response) for prompt, response in zip(prompts, asked.responses, strict=True)
    )
    rows = [np.where(each.known, each.logprobs, np.nan) for each in scores]
    parts = (np.concatenate([row[part] for row in rows]) for part in (slice(1), slice(1, None)))
    return Explained(*(float(np.nanmean(part)) if np.isfinite(part).any() else None for part in parts))


async def score_temperature(scorer: Scorer, asked: Asked, noise_nats: float) -> LogprobTemperature | None:
    """Return the temperature of scores, by asking at two; if the server refuses the second, it is 1."""
    at_one = _values(await _score(scorer, asked, 0, top_k=1))
    try:
        cool = _values(await _score(scorer, asked, 0, top_k=1, temperature=COOL))
    except PermanentError:
        return "one"
    return _convention(at_one, cool, noise_nats)


async def generation_temperature(generator: Generator, asked: Asked, noise_nats: float) -> LogprobTemperature | None:
    """Return the temperature of sampled tokens' log-probabilities, by the likeliest token after a few prompts."""
    best: list[float] = []
    cool: list[float] = []
    for temperature, found in ((1.0, best), (COOL, cool)):
        for prompt in asked.prompts:
            reply = await _generate(generator, prompt, asked, seed=SEED, max_tokens=1, top_k=1, temperature=temperature)
            assert reply.topk_logprobs is not None
            found.append(float(reply.topk_logprobs[0, 0]))
    return _convention(np.array(best, np.float32), np.array(cool, np.float32), noise_nats)


async def honours_seeds(generator: Generator, asked: Asked, max_tokens: int) -> bool | None:
    """Return whether a seed decides the tokens; None if different seeds give the same tokens as well."""
    prompt = asked.prompts[0]

    async def sample(seed: int) -> tuple[int, ...]:
        return tuple((await _generate(generator, prompt, asked, seed=seed, max_tokens=max_tokens)).token_ids.tolist())

    first, *others = await gather_answers(sample(seed) for seed in range(SEED, SEED + 4))
    again = await sample(SEED)
    if first != again:
        return False
    return True if any(other != first for other in others) else None


async def spoken_and_scored(
    generator: Generator, scorer: Scorer, asked: Asked, max_tokens: int, *, top_k: int = 0, each: int = 1
) -> tuple[FloatArray, FloatArray]:
    """Return log-probabilities (N, 1 + top-k) of N known tokens as they are sampled, and as they are scored.

    After the token's own come the likeliest in its place, NaN where the two name different ones. There are `each`
    responses to a prompt, and all are asked for at once.
    """

    async def one(n: int, prompt: IntArray) -> tuple[FloatArray, FloatArray]:
        reply = await _generate(generator, prompt, asked, seed=SEED + n, max_tokens=max_tokens, top_k=top_k)
        scores = await asked.scores(scorer, prompt, reply.token_ids, top_k=max(top_k, 1))
        known = scores.known
        spoken, scored = reply.logprobs[known, None], scores.logprobs[known, None]
        if top_k and reply.topk_ids is not None and reply.topk_logprobs is not None:
            same = (reply.topk_ids == scores.topk_ids)[known]
            spoken = np.column_stack([spoken, np.where(same, reply.topk_logprobs[known], np.nan)])
            scored = np.column_stack([scored, scores.topk_logprobs[known]])
        return spoken, scored

    pairs = await gather_answers(one(n, prompt) for n, prompt in enumerate(tuple(asked.prompts) * each))
    spoken, scored = (np.concatenate(side) for side in zip(*pairs, strict=True))
    return spoken, scored


async def recomputed(servers: Sequence[Any], asked: Asked, *, top_k: int, max_tokens: int, speaks: bool) -> FloatArray:
    """Return differences (N, top-k) between computations of the run's own rows by the servers of a role, NaN: unknown.

    Where they sample, a response of one is scored by the next, or by itself if there is only one, beside many others.
    """
    if speaks:
        compared = await gather_answers(
            spoken_and_scored(one, other, asked, max_tokens, top_k=top_k, each=REPEATS)
            for one, other in zip(servers, [*servers[1:], servers[0]], strict=True)
        )
        found = [spoken - scored for spoken, scored in compared]
    else:
        read = await gather_answers(
            readings(servers[n % len(servers)], asked, score_top_k=top_k, generation_top_k=0)
            for n in range(1 + REPEATS)
        )
        found = [one - two for pair in combinations(read, 2) for one, two in zip(*pair, strict=True)]
    return np.concatenate(found)[:, 1:]


async def truncation_p_value(generator: Generator, asked: Asked, max_tokens: int, top_k: int) -> float:
    """Return how likely samples at temperature 1 are to be so near the top of the distributions stated beside them.

    If no token was below rank r, the chance of that is the product of the masses that the positions have down to
    rank r, whatever the model: it is small if something truncates what is sampled, such as a top-k. The value is that
    product for the lowest rank seen, times the ranks that it could have been (Bonferroni); 1 where one was below all.
    """
    replies = await gather_answers(
        _generate(generator, prompt, asked, seed=SEED + n, max_tokens=max_tokens, top_k=top_k)
        for prompt in asked.prompts
        for n in range(REPEATS)
    )
    rows = [reply.topk_logprobs for reply in replies if reply.topk_logprobs is not None]
    named = [reply.topk_ids == reply.token_ids[:, None] for reply in replies if reply.topk_ids is not None]
    masses = np.cumsum(np.exp(np.concatenate(rows).astype(np.float64)), axis=1)
    is_own = np.concatenate(named)
    if not is_own.any(axis=1).all():
        return 1.0
    lowest = int(is_own.argmax(axis=1).max())
    return min(1.0, top_k * float(np.exp(np.log(np.minimum(1.0, masses[:, lowest])).sum())))


async def round_trip_s(server: Any, asked: Asked, *, scores: bool) -> float:
    """Return the least seconds of scoring one token, or of generating one: a busy machine adds some to any."""
    clock = asyncio.get_running_loop().time
    seconds = []
    for _ in range(ROUND_TRIPS):
        started = clock()
        if scores:
            await asked.scores(server, asked.prompts[0], asked.responses[0][:1])
        else:
            await _generate(server, asked.prompts[0], asked, seed=SEED, max_tokens=1)
        seconds.append(clock() - started)
    return min(seconds)


async def _noise(read: Callable[[], Coroutine[Any, Any, FloatArray]]) -> Noise | None:
    alone = [await read()]
    if not alone[0].size:
        return None
    alone += [await read() for _ in range(REPEATS - 1)]
    together = await gather_answers(read() for _ in range(TOGETHER))
    ranges = np.ptp([*alone, *together], axis=0)
    return Noise(float(np.ptp(alone, axis=0).max()), float(ranges.max()), ranges)


def _convention(at_one: FloatArray, cool: FloatArray, noise_nats: float) -> LogprobTemperature | None:
    """Return the temperature that rows are at; None if they are too sure of a token, or too noisy, to show any."""
    if not at_one.size or float(at_one.min()) > -VISIBLE_NATS:
        return None
    if (nats := float(np.abs(at_one - cool).max())) <= VISIBLE_NATS:
        return "one"
    return "request" if nats > NOISE_MARGIN * noise_nats else None


def _values(scores: TokenScores) -> FloatArray:
    """Return all values of known positions that should repeat."""
    return np.concatenate([scores.logprobs[scores.known], scores.topk_logprobs[scores.known].ravel()])


async def _score(scorer: Scorer, asked: Asked, n: int, *, top_k: int, temperature: float = 1.0) -> TokenScores:
    return await asked.scores(scorer, asked.prompts[n], asked.responses[n], top_k=top_k, temperature=temperature)


async def _generate(
    generator: Generator,
    prompt_ids: IntArray,
    asked: Asked,
    *,
    seed: int,
    max_tokens: int,
    top_k: int = 0,
    temperature: float = 1.0,
) -> Generation:
    sampling = SamplingSettings(
        temperature=temperature,
        max_tokens=max_tokens,
        stop_token_ids=asked.stop_token_ids,
        seed=seed,
        vocab_limit=asked.vocab_limit,
    )
    return await asked.answer(
        "rollout", lambda deadline: generator.generate(prompt_ids, sampling, top_k=top_k, deadline=deadline)
    )
