"""Checks sampling: are log-probabilities right, and are tokens drawn as was asked?"""

from __future__ import annotations

import math

import numpy as np

from spot_async.base.tasks import gather
from spot_async.errors import PermanentError
from spot_async.testing.conformance.contract import (
    ENDS,
    GENERATION,
    INNER,
    TOKENS,
    Finding,
    Violation,
    check,
    largest,
    largest_of_topk,
    log_kept_mass,
    not_offered,
    nucleus_mass_before,
    of_tokens,
    require,
    require_close,
)
from spot_async.testing.conformance.subject import COOL, PROMPT_TOKENS, Subject
from spot_async.types import Generation, IntArray

PROMPTS = 8
COLD = 0.01  # the lowest temperature that common servers do not replace by greedy decoding
COLD_MARGIN_NATS = 0.3  # with this margin, the second best token is exp(30) times less likely at COLD
TOP_P = 0.5
DRAWS = 128
LIMIT_Z = 5.0  # standard errors of a mean over DRAWS draws; an honest server exceeds it once in a million times
TAIL_TOKENS = 8
MOST_BANNED = 512  # ids that may be banned; vLLM's GPU runner takes at most 1,024 in a request
STOPS = 8  # stop tokens; of 4, a server that ignores seeds would sample none the second time once in 2,500 times


@check(TOKENS)
async def test_generation_parity(subject: Subject) -> Finding:
    """Log-probabilities of sampled tokens and of the top-K are right at every position but the first and the last."""
    replies = await _sample(subject)
    nats = 0.0
    for prompt, reply in replies:
        exact = (await subject.exact(prompt, reply.token_ids))[INNER]
        nats = max(nats, largest(reply.logprobs[INNER], of_tokens(exact, reply.token_ids[INNER])))
        if reply.topk_ids is not None and reply.topk_logprobs is not None:
            nats = max(nats, largest_of_topk(exact, reply.topk_ids[INNER], reply.topk_logprobs[INNER]))
    require_close(nats, subject.tolerance_nats, "log-probabilities of sampled tokens")
    tokens = sum(len(reply.token_ids) for _, reply in replies)
    return Finding(f"{len(replies)} responses, {tokens} tokens, top-{subject.generation_top_k}", nats)


@check(TOKENS, after=["generation_parity"])
async def test_generation_boundary(subject: Subject) -> Finding:
    """They are right at the first and the last token of the response too, where an error by one row shows."""
    nats, one_off = 0.0, 0.0
    for prompt, reply in await _sample(subject):
        exact = await subject.exact(prompt, reply.token_ids)
        nats = max(nats, largest(reply.logprobs[ENDS], of_tokens(exact, reply.token_ids)[ENDS]))
        if reply.topk_ids is not None and reply.topk_logprobs is not None:
            nats = max(nats, largest_of_topk(exact[ENDS], reply.topk_ids[ENDS], reply.topk_logprobs[ENDS]))
        shifted = np.roll(exact, -1, axis=0)[0, reply.token_ids[0]], exact[-2, reply.token_ids[-1]]
        one_off = max(one_off, largest(reply.logprobs[ENDS], shifted))
    require_close(nats, subject.tolerance_nats, "log-probabilities of first and last tokens")
    require(one_off > subject.tolerance_nats, "the model's rows are too alike to tell one from the next: use another")
    return Finding(f"rows one off would differ by {one_off:.2g} nats", nats)


@check(TOKENS, after=["generation_parity"])
async def test_generation_temperature(subject: Subject) -> Finding:
    """Log-probabilities of sampled tokens are at the temperature that the capabilities say."""
    convention = subject.capabilities.generation_temperature
    nats, other = 0.0, 0.0
    for prompt, reply in await _sample(subject, temperature=COOL):
        exact = await subject.exact(prompt, reply.token_ids, temperature=COOL, convention=convention)
        wrong = await subject.exact(prompt, reply.token_ids, temperature=1.0 if convention == "request" else COOL)
        nats = max(nats, largest(reply.logprobs[INNER], of_tokens(exact, reply.token_ids)[INNER]))
        other = max(other, largest(reply.logprobs[INNER], of_tokens(wrong, reply.token_ids)[INNER]))
    said = "that of the request" if convention == "request" else "1 whatever the request says"
    if nats > subject.tolerance_nats / COOL and other <= subject.tolerance_nats / COOL:
        raise Violation(f"capabilities say {said}, but log-probabilities are at the other", nats)
    require_close(nats, subject.tolerance_nats / COOL, f"log-probabilities at temperature {COOL} (said: {said})")
    return Finding(f"{said}; the other would differ by {other:.2g} nats", nats)


@check(TOKENS)
async def test_sampling_distribution(subject: Subject) -> Finding:
    """First tokens are drawn from the model's distribution at the temperature that was asked for.

    The statistic is the mean probability of the tokens that were drawn. Its expectation and variance are known, and it
    is bounded, unlike a log-probability, so that one rare token cannot decide.
    """
    prompts = [subject.prompt(i % PROMPTS) for i in range(DRAWS)]
    replies = await gather(subject.generate(prompt, max_tokens=1, temperature=COOL) for prompt in prompts)
    excess, variance = 0.0, 1.0  # 1 and not 0, for rows that have all their mass on one token
    for i in range(PROMPTS):
        drawn = [reply.token_ids[0] for reply in replies[i::PROMPTS]]
        row = np.exp((await subject.exact(prompts[i], np.zeros(1, np.int32), temperature=COOL))[0])
        mean = float((row * row).sum())
        excess += float(row[drawn].sum()) - len(drawn) * mean
        variance += len(drawn) * float((row * (row - mean) ** 2).sum())
    z = excess / math.sqrt(variance)
    what = f"the probability of {DRAWS} tokens drawn at temperature {COOL}"
    require(abs(z) < LIMIT_Z, f"{what} is {z:+.1f} standard errors off: they are drawn from something else")
    return Finding(f"{what} is {z:+.1f} standard errors off")


@check(TOKENS)
async def test_low_temperature(subject: Subject) -> Finding:
    """Close to temperature 0, the likeliest token is drawn, if it is clearly ahead."""
    clear, wrong = 0, 0
    for prompt, reply in await _sample(subject, temperature=COLD):
        exact = await subject.exact(prompt, reply.token_ids)
        best = np.sort(exact, axis=1)
        ahead = best[:, -1] - best[:, -2] > COLD_MARGIN_NATS
        clear += int(ahead.sum())
        wrong += int((exact.argmax(axis=1) != reply.token_ids)[ahead].sum())
    require(wrong == 0, f"{wrong} of {clear} tokens at temperature {COLD} are not the likeliest")
    require(clear > 0, f"no token is {COLD_MARGIN_NATS} nats ahead: use a model with more peaked distributions")
    return Finding(f"{clear} tokens at temperature {COLD} are the likeliest")


@check(TOKENS, after=["generation_parity"])
async def test_top_p(subject: Subject) -> Finding:
    """Only the nucleus is sampled. Log-probabilities are over all tokens or the nucleus, as the capabilities say."""
    truncated = subject.capabilities.logprob_convention == "truncated"
    nats, mass = 0.0, 0.0
    for prompt, reply in await _sample(subject, top_p=TOP_P):
        exact = await subject.exact(prompt, reply.token_ids)
        mass = max(mass, float(nucleus_mass_before(exact, reply.token_ids).max()))
        expected = of_tokens(exact, reply.token_ids) - (log_kept_mass(exact, TOP_P) if truncated else 0.0)
        nats = max(nats, largest(reply.logprobs[INNER], expected[INNER]))
    require(
        mass < TOP_P + 1e-4, f"tokens beyond the likeliest {TOP_P:.0%} were sampled (up to {mass:.1%} are likelier)"
    )
    said = f"{subject.capabilities.logprob_convention} distribution"
    require_close(nats, subject.tolerance_nats, f"log-probabilities under top_p={TOP_P} (said: of the {said})")
    return Finding(f"within the nucleus of {TOP_P:.0%}; log-probabilities of the {said}", nats)


@check(TOKENS, after=["generation_parity"])
async def test_vocab_limit(subject: Subject) -> Finding:
    """Ids from the limit on are not sampled. A student's log-probabilities are still those over all tokens."""
    width = subject.capabilities.vocab_size
    free = max(int(reply.token_ids.max()) for _, reply in await _sample(subject))
    limit = max(free, width - MOST_BANNED)
    nats = 0.0
    for prompt, reply in await _sample(subject, vocab_limit=limit):
        require(reply.token_ids.max() < limit, f"token {reply.token_ids.max()} was sampled under a limit of {limit}")
        if subject.capabilities.weight_update:
            exact = await subject.exact(prompt, reply.token_ids)
            nats = max(nats, largest(reply.logprobs[INNER], of_tokens(exact, reply.token_ids)[INNER]))
    require_close(nats, subject.tolerance_nats, f"log-probabilities under vocab_limit={limit}")
    seen = f", of which it samples {free} by itself" if free >= limit else ""
    return Finding(f"none of the last {width - limit} ids{seen}", nats)


@check(TOKENS)
async def test_stop_tokens(subject: Subject) -> Finding:
    """A response ends with its first stop token, which is part of it, or else at its full length."""
    sampled = np.concatenate([reply.token_ids for _, reply in await _sample(subject)])
    tokens, counts = np.unique(sampled, return_counts=True)
    stops = (*map(int, tokens[np.argsort(-counts, kind="stable")[:STOPS]]), *subject.end_token_ids)
    replies = [reply for _, reply in await _sample(subject, stop_token_ids=stops)]
    stopped = 0
    for reply in replies:
        hits = np.flatnonzero(np.isin(reply.token_ids, stops))
        last = len(reply.token_ids) - 1
        require(not len(hits) or hits[0] == last, f"token {hits[:1]} of a response is a stop token, but it continued")
        reason = "stop" if len(hits) else "length"
        require(reply.finish_reason == reason, f"finish reason {reply.finish_reason!r} where it ended by {reason}")
        stopped += len(hits)
    require(stopped > 0, f"none of {len(replies)} responses met a stop token, though they are the likeliest ones")
    return Finding(f"{stopped} of {len(replies)} responses ended by one of {len(stops)} stop tokens, included")


@check(TOKENS, after=["low_temperature"])
async def test_immediate_stop(subject: Subject) -> Finding:
    """A response whose first token is a stop token has one token."""
    rows = np.stack([(await subject.exact(subject.prompt(i), np.zeros(1, np.int32)))[0] for i in range(PROMPTS)])
    second, first = np.sort(rows, axis=1)[:, -2:].T
    clearest = int((first - second).argmax())
    best, prompt = int(rows[clearest].argmax()), subject.prompt(clearest)
    reply = await subject.generate(prompt, temperature=COLD, stop_token_ids=(best, *subject.end_token_ids))
    require(
        reply.token_ids.tolist() == [best] and reply.finish_reason == "stop",
        f"{len(reply.token_ids)} tokens and {reply.finish_reason!r} where the first token is a stop token",
    )
    return Finding("one token, its stop token")


@check(GENERATION)
async def test_samples_differ(subject: Subject) -> Finding:
    """Requests with different seeds are different samples. With one seed for all, a run would train on copies."""
    replies = await gather(subject.generate(subject.prompt(0)) for _ in range(PROMPTS))
    different = len({_tokens(reply) for reply in replies})
    require(different == len(replies), f"{len(replies)} seeds at once gave only {different} different responses")
    return Finding(f"{different} different responses to one prompt")


@check(GENERATION, after=["samples_differ"])
async def test_seeds(subject: Subject) -> Finding:
    """The same seed gives the same tokens, alone and among other requests, and another seed gives others."""
    if not subject.capabilities.seeds:
        raise not_offered("nobody says that seeds are honoured: runs may not repeat, each seed is still its own sample")
    prompt, seeds = subject.prompt(0), range(7000, 7008)
    alone = [await subject.generate(prompt, seed=seed) for seed in seeds]
    again = await subject.generate(prompt, seed=seeds[0])
    require(_tokens(alone[0]) == _tokens(again), "the same request twice gave different tokens")
    different = len({_tokens(reply) for reply in alone})
    require(different == len(alone), f"{len(alone)} seeds gave only {different} different responses")
    company = await gather(
        subject.generate(prompt if seed else subject.prompt(i), seed=seed)
        for i in range(3)
        for seed in (seeds if i == 0 else [None] * len(seeds))
    )
    changed = sum(_tokens(a) != _tokens(b) for a, b in zip(alone, company, strict=False))
    require(changed == 0, f"{changed} of {len(alone)} responses change in the company of other requests")
    return Finding(f"{len(alone)} seeds, {different} responses, the same among {len(company)} requests at once")


@check(TOKENS, after=["generation_parity"])
async def test_longest_response(subject: Subject) -> Finding:
    """Prompt and response may fill the context exactly, and one token more is never silently cut off.

    It is refused, or served in full by a server whose context is longer than it says.
    """
    context = subject.capabilities.max_context_tokens
    prompt = subject.tokens(context - TAIL_TOKENS, seed=1)
    reply = await subject.generate(prompt, max_tokens=TAIL_TOKENS)
    require(len(reply.token_ids) == TAIL_TOKENS, f"{len(reply.token_ids)} tokens where {TAIL_TOKENS} fill the context")
    exact = await subject.exact(prompt, reply.token_ids)
    nats = largest(reply.logprobs[INNER], of_tokens(exact, reply.token_ids)[INNER])
    require_close(nats, subject.tolerance_nats, f"log-probabilities at the end of {context} tokens")
    over = [(prompt, TAIL_TOKENS + 1), (subject.tokens(context + 1, seed=1), 1)]
    refusals = sum([await _is_refused(subject, *request) for request in over])
    return Finding(f"{context} tokens are served; of {len(over)} requests for more {refusals} are refused", nats)


async def _is_refused(subject: Subject, prompt: IntArray, max_tokens: int) -> bool:
    """Return whether the request is refused. Raises `Violation` if the response is shorter than was asked for."""
    try:
        reply = await subject.generate(prompt, max_tokens=max_tokens)
    except PermanentError:
        return True
    require(
        len(reply.token_ids) == max_tokens,
        f"a prompt of {len(prompt)} and max_tokens={max_tokens} exceed the context, but gave "
        f"{len(reply.token_ids)} tokens: refuse it with PermanentError",
    )
    return False


async def _sample(subject: Subject, **settings: float | tuple[int, ...]) -> list[tuple[IntArray, Generation]]:
    """Return prompts, each with a response."""
    prompts = [subject.prompt(i, PROMPT_TOKENS + i) for i in range(PROMPTS)]
    replies = await gather(
        subject.generate(prompt, top_k=subject.generation_top_k, **settings)  # type: ignore[arg-type]
        for prompt in prompts
    )
    return list(zip(prompts, replies, strict=True))


def _tokens(reply: Generation) -> tuple[int, ...]:
    return tuple(reply.token_ids.tolist())
