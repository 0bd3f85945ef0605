"""Checks a backend as a service: what it says of itself, many requests at once, deadlines, hang-ups, refusals."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from typing import Any

import numpy as np

from spot_async.base.tasks import gather
from spot_async.errors import DeadlineExceededError, PermanentError
from spot_async.protocols import CandidateScorer, Generator, PositionScorer, Scorer, WeightSink
from spot_async.testing.conformance.contract import (
    GENERATION,
    INNER,
    PARITY,
    TOKENS,
    Finding,
    Violation,
    check,
    chosen,
    largest,
    not_offered,
    of_tokens,
    require,
    require_close,
    require_refusal,
    scored,
)
from spot_async.testing.conformance.subject import PROMPT_TOKENS, Subject

REQUESTS = 64
SHORT_DEADLINE_S = 0.05
ABANDONED = 128  # so many requests are given up at once: more than most servers run at a time
ABANDONED_AFTER = 0.25  # when they are given up, as a share of the time that one of them takes alone
SERVED_AGAIN_WITHIN = 0.5  # the next request must be answered within this share of that time,
SERVED_AGAIN_WITHIN_S = 0.5  # or within these seconds, if that is too short to tell
ABORT_ATTEMPTS = 2


@check()
async def test_capabilities(subject: Subject) -> Finding:
    """What the backend says of itself agrees with the model's files and with the methods that it has."""
    said, files = subject.capabilities, subject.files
    methods = [
        (said.generation, Generator, "generation"),
        (said.max_top_k > 0, Scorer, "max_top_k > 0"),
        (said.max_position_top_k > 0, PositionScorer, "max_position_top_k > 0"),
        (said.candidate_logprobs != "none", CandidateScorer, "candidate_logprobs"),
        (said.weight_update, WeightSink, "weight_update"),
    ]
    for offered, protocol, name in methods:
        require(not offered or isinstance(subject.backend, protocol), f"{name}, but it is no {protocol.__name__}")
    require(said.generation or said.max_top_k > 0, "offers neither generation nor scores")
    require(said.vocab_size == files.vocab_size, f"vocab_size={said.vocab_size}, but config.json: {files.vocab_size}")
    require(said.vocab_fingerprint == files.vocabulary.fingerprint, "vocab_fingerprint is not that of the tokenizer")
    require(
        0 < said.max_context_tokens <= files.max_context_tokens,
        f"max_context_tokens={said.max_context_tokens}, but config.json: {files.max_context_tokens}",
    )
    for name in ("max_top_k", "max_generation_top_k"):
        require(
            0 <= getattr(said, name) <= said.vocab_size, f"{name}={getattr(said, name)} of {said.vocab_size} tokens"
        )
    require(math.isfinite(said.logprob_noise_nats) and said.logprob_noise_nats >= 0, "logprob_noise_nats is no width")
    return Finding(f"{said.server}: {said.vocab_size} tokens, context {said.max_context_tokens}")


@check(TOKENS)
async def test_versions(subject: Subject) -> Finding:
    """Every token says which weights sampled it."""
    if subject.version is None:
        raise not_offered("nobody knows which weights the server holds, and it takes no others")
    reply = await subject.generate(subject.prompt(0))
    spans = [(span.start, span.end, span.version) for span in reply.version_spans]
    expected = [(0, len(reply.token_ids), subject.version)]
    require(spans == expected, f"version spans {spans} where {expected} was sampled")
    return Finding(f"{len(reply.token_ids)} tokens of weights {subject.version}")


@check(after=PARITY)
async def test_concurrency(subject: Subject) -> Finding:
    """Many different requests at once: each gets its own reply."""
    offered = [_generated] if subject.capabilities.generation and subject.capabilities.sampled_token_ids else []
    offered += [scored] if subject.capabilities.max_top_k else []
    offered += [chosen] if subject.capabilities.candidate_logprobs != "none" else []
    found = await gather(offered[i % len(offered)](subject, i) for i in range(REQUESTS))
    nats = max(found)
    require_close(nats, subject.tolerance_nats, f"some of {REQUESTS} replies asked for at once")
    return Finding(f"{REQUESTS} requests at once", nats)


@check(GENERATION)
async def test_deadline(subject: Subject) -> Finding:
    """A request gives up when its deadline passes, and says so."""
    tokens = subject.long_response_tokens
    for timeout_s in (SHORT_DEADLINE_S, 0.0):
        request = subject.generate(subject.prompt(0), max_tokens=tokens, timeout_s=timeout_s)
        kept = f"{tokens} tokens came within {timeout_s:g} s: the deadline was not kept"
        await require_refusal(request, DeadlineExceededError, kept)
    await subject.generate(subject.prompt(0), max_tokens=1)
    return Finding(f"DeadlineExceededError after {SHORT_DEADLINE_S:g} s")


@check(GENERATION, after=["deadline"])
async def test_abort(subject: Subject) -> Finding:
    """Requests that are given up free their places at once: the next one need not wait for them to finish."""
    if not subject.capabilities.abort:
        raise not_offered("the server finishes what it began, also when nobody waits")
    alone_s = await _seconds(subject, subject.long_response_tokens)
    limit_s = max(SERVED_AGAIN_WITHIN_S, SERVED_AGAIN_WITHIN * alone_s)
    for _ in range(ABORT_ATTEMPTS):  # a busy machine may be slow once
        waited_s = await _wait_behind_abandoned(subject, ABANDONED_AFTER * alone_s)
        if waited_s < limit_s:
            break
    what = f"a short request waits {waited_s:.2f} s behind {ABANDONED} abandoned ones of {alone_s:.2f} s each"
    require(waited_s < limit_s, f"{what}: they continue")
    return Finding(what)


async def _wait_behind_abandoned(subject: Subject, abandoned_after_s: float) -> float:
    """Return the seconds that a short request takes after many long ones were given up."""
    tokens = subject.long_response_tokens
    try:
        async with asyncio.timeout(abandoned_after_s):
            await gather(subject.generate(subject.prompt(i), max_tokens=tokens) for i in range(ABANDONED))
    except TimeoutError:
        return await _seconds(subject, 1)
    raise Violation(f"{ABANDONED} responses of {tokens} tokens came sooner than a quarter of one alone")


async def _seconds(subject: Subject, max_tokens: int) -> float:
    started = asyncio.get_running_loop().time()
    await subject.generate(subject.prompt(0), max_tokens=max_tokens)
    return asyncio.get_running_loop().time() - started


@check()
async def test_refused_ids(subject: Subject) -> Finding:
    """Token ids outside the vocabulary are refused, and the server lives on. Some servers die of them."""
    response, refused = subject.tokens(3, seed=1), 0
    for wrong in (subject.capabilities.vocab_size, 2**31 - 1, -1):
        bad = np.array([response[0], wrong, response[1]], np.int32)
        if subject.capabilities.generation:
            refused += await _refused(subject, subject.generate(bad), f"a prompt with token {wrong}")
        if subject.capabilities.max_top_k:
            refused += await _refused(subject, subject.score(bad, response), f"a prompt with token {wrong}")
            refused += await _refused(subject, subject.score(response, bad), f"a response with token {wrong}")
        if subject.capabilities.candidate_logprobs != "none":
            at = np.array([0], np.int32), np.array([[wrong]], np.int32)
            refused += await _refused(subject, subject.candidates(response, response, *at), f"candidate {wrong}")
    return Finding(f"{refused} requests refused, the server lives on")


@check()
async def test_refused_shapes(subject: Subject) -> Finding:
    """An empty prompt, positions beyond the response and a top-k larger than is served are refused likewise."""
    prompt, response, refused = subject.prompt(0), subject.tokens(3, seed=1), 0
    empty = np.zeros(0, np.int32)
    said = subject.capabilities
    if said.generation:
        k = said.max_generation_top_k + 1
        refused += await _refused(subject, subject.generate(prompt, top_k=k), f"top_k={k} of a generation")
        refused += await _refused(subject, subject.generate(empty), "an empty prompt")
        refused += await _refused(subject, subject.generate(prompt, max_tokens=0), "max_tokens=0")
    if said.max_top_k:
        k = said.max_top_k + 1
        refused += await _refused(subject, subject.score(prompt, response, top_k=k), f"top_k={k} of scores")
        refused += await _refused(subject, subject.score(empty, response), "an empty prompt")
    if said.candidate_logprobs != "none":
        for position in (-1, 3):
            at = np.array([position], np.int32), np.array([[1]], np.int32)
            refused += await _refused(subject, subject.candidates(prompt, response, *at), f"position {position} of 3")
    return Finding(f"{refused} requests refused, the server lives on")


async def _refused(subject: Subject, request: Awaitable[Any], what: str) -> int:
    """Return 1 if the request is refused. Raises `Violation` if it is answered, or if the server does not live on."""
    await require_refusal(request, PermanentError, f"{what} was answered: refuse it with PermanentError")
    if subject.capabilities.generation:
        await subject.generate(subject.prompt(0), max_tokens=1)
    else:
        await subject.score(subject.prompt(0), subject.tokens(2, seed=1))
    return 1


async def _generated(subject: Subject, number: int) -> float:
    """Generate once, and return the largest difference to the exact log-probabilities, in nats."""
    prompt = subject.prompt(100 + number, PROMPT_TOKENS + number % 7)
    reply = await subject.generate(prompt, max_tokens=8 + number % 23)
    exact = await subject.exact(prompt, reply.token_ids)
    return largest(reply.logprobs[INNER], of_tokens(exact, reply.token_ids)[INNER])
