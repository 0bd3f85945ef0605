"""Checks scores and candidates: log-probabilities of tokens that are given, not sampled."""

from __future__ import annotations

import numpy as np

from spot_async.base.tasks import gather
from spot_async.errors import PermanentError, VersionMismatchError
from spot_async.testing.conformance.contract import (
    CANDIDATES,
    ENDS,
    POSITIONS,
    SCORES,
    Finding,
    Rows,
    Violation,
    check,
    entropy,
    largest,
    largest_of_scores,
    largest_of_topk,
    not_offered,
    of_tokens,
    require,
    require_close,
    require_refusal,
)
from spot_async.testing.conformance.subject import COOL, PROMPT_TOKENS, RESPONSE_TOKENS, Subject
from spot_async.types import IntArray, ScoreRequest, TokenScores, WeightVersion

RESPONSES = 6
OF_POSITION = 5  # candidates
CANDIDATE_POSITIONS = 6
EMPTY = np.zeros(0, np.int32)


@check(SCORES)
async def test_score_parity(subject: Subject) -> Finding:
    """Log-probabilities of the response's tokens are right at every position but the first and the last."""
    nats, tokens, masked = 0.0, 0, 0
    for (_, response), scores, exact in await _score(subject):
        tokens, masked = tokens + len(response), masked + len(response) - int(scores.known.sum())
        nats = max(nats, largest_of_scores(exact, response, scores))
    require_close(nats, subject.tolerance_nats, "log-probabilities of given tokens")
    require(masked < tokens, f"all {tokens} positions are masked: the server tokenises every one differently")
    return Finding(f"{RESPONSES} responses, {tokens} tokens" + f", {masked} of them masked" * (masked > 0), nats)


@check(SCORES, after=["score_parity"])
async def test_score_boundary(subject: Subject) -> Finding:
    """They are right at the first and the last token too, and for one token alone, where an error by one row shows."""
    nats, one_off = 0.0, 0.0
    ends = 0
    for (_, response), scores, exact in await _score(subject):
        here = [row for row in ENDS if scores.known[row]]
        ends += len(here)
        nats = max(nats, largest(scores.logprobs[here], of_tokens(exact, response)[here]))
        shifted = np.array([exact[1, response[0]], exact[-2, response[-1]]])
        one_off = max(one_off, largest(scores.logprobs[here], shifted[here]))
    prompt, single = subject.prompt(0), subject.tokens(1, seed=5)
    alone = await subject.score(prompt, single)
    if alone.known[0]:
        nats = max(nats, largest(alone.logprobs, of_tokens(await subject.exact(prompt, single), single)))
    require(ends > 0, "all first and last positions are masked")
    require_close(nats, subject.tolerance_nats, "log-probabilities of first and last tokens")
    require(one_off > subject.tolerance_nats, "the model's rows are too alike to tell one from the next: use another")
    return Finding(f"rows one off would differ by {one_off:.2g} nats", nats)


@check(SCORES, after=["score_parity"])
async def test_score_top_k(subject: Subject) -> Finding:
    """The likeliest tokens and their log-probabilities come in order, as many as the capabilities say."""
    nats = 0.0
    for _, scores, exact in await _score(subject):
        here = scores.known
        nats = max(nats, largest_of_topk(exact[here], scores.topk_ids[here], scores.topk_logprobs[here]))
    prompt, response = _responses(subject)[0]
    most = await subject.score(prompt, response, top_k=subject.capabilities.max_top_k)
    exact, here = await subject.exact(prompt, response), most.known
    nats = max(nats, largest_of_topk(exact[here], most.topk_ids[here], most.topk_logprobs[here]))
    require_close(nats, subject.tolerance_nats, "top-K log-probabilities or ids")
    return Finding(f"top-{subject.score_top_k}, and the largest: top-{subject.capabilities.max_top_k}", nats)


@check(SCORES, after=["score_parity"])
async def test_score_tail(subject: Subject) -> Finding:
    """The tail of a row, where it is served, is the probability of all tokens outside of its top-K."""
    nats = 0.0
    for _, scores, exact in await _score(subject):
        if scores.tail_logprobs is None or subject.score_top_k == subject.capabilities.vocab_size:
            raise not_offered("no tails of rows")
        here, others = scores.known, exact.copy()
        np.put_along_axis(others, scores.topk_ids.astype(np.int64), -np.inf, axis=1)
        nats = max(nats, largest(scores.tail_logprobs[here], np.logaddexp.reduce(others, axis=1)[here]))
    require_close(nats, subject.tolerance_nats, "log-probabilities of the tokens outside of the top-K")
    return Finding(f"outside of the top-{subject.score_top_k}", nats)


@check(SCORES, after=["score_parity"])
async def test_score_entropy(subject: Subject) -> Finding:
    """The bounds hold the exact entropy, and are equal to it if the capabilities call it exact."""
    outside, width, nats = 0.0, 0.0, 0.0
    for _, scores, exact in await _score(subject):
        here = scores.known
        true, lower, upper = entropy(exact)[here], scores.entropy_lower[here], scores.entropy_upper[here]
        outside = max(outside, float(np.maximum(lower - true, true - upper).max(initial=0.0)))
        width = max(width, float((upper - lower).max(initial=0.0)))
        nats = max(nats, largest(scores.entropy[here], true))
    require(outside <= subject.tolerance_nats, f"bounds miss the exact entropy by up to {outside:.2g} nats", outside)
    if not subject.capabilities.exact_entropy:
        return Finding(f"bounds up to {width:.2g} nats apart; their middle is up to {nats:.2g} off", max(outside, 0.0))
    require_close(nats, subject.tolerance_nats, "entropies, said to be exact,")
    return Finding("exact", nats)


@check(POSITIONS, after=["score_parity"])
async def test_position_scores(subject: Subject) -> Finding:
    """Single positions can be asked for again with a wider top-K, and bounds that hold the exact entropy."""
    said = subject.capabilities
    prompt, response, positions, _ = _candidates(subject)
    served = await subject.backend.score_at(
        ScoreRequest(prompt, response, 1.0, subject.deadline()), positions, top_k=said.max_position_top_k
    )
    exact = (await subject.exact(prompt, response))[positions]
    nats = largest_of_topk(exact, served.topk_ids, served.topk_logprobs)
    true = entropy(exact)
    outside = float(np.maximum(served.entropy_lower - true, true - served.entropy_upper).max())
    require_close(nats, subject.tolerance_nats, "top-K log-probabilities or ids of single positions")
    require(outside <= subject.tolerance_nats, f"bounds miss the exact entropy by up to {outside:.2g} nats", outside)
    return Finding(f"{len(positions)} positions, top-{said.max_position_top_k} of {said.vocab_size}", nats)


@check(SCORES, after=["score_parity"])
async def test_score_temperature(subject: Subject) -> Finding:
    """Scores are at the temperature that the capabilities say."""
    convention = subject.capabilities.score_temperature
    nats, other = 0.0, 0.0
    for prompt, response in _responses(subject):
        try:
            scores = await subject.score(prompt, response, temperature=COOL)
        except PermanentError as refusal:
            require(
                convention == "one", f"temperature {COOL} is refused, though capabilities say it is served: {refusal}"
            )
            return Finding(f"1; {COOL} is refused")
        exact = await subject.exact(prompt, response, temperature=COOL, convention=convention)
        wrong = await subject.exact(prompt, response, temperature=1.0 if convention == "request" else COOL)
        nats = max(nats, largest_of_scores(exact, response, scores))
        other = max(other, largest_of_scores(wrong, response, scores))
    said = "that of the request" if convention == "request" else "1 whatever the request says"
    if nats > subject.tolerance_nats / COOL and other <= subject.tolerance_nats / COOL:
        raise Violation(f"capabilities say {said}, but scores are at the other", nats)
    require_close(nats, subject.tolerance_nats / COOL, f"scores at temperature {COOL} (said: {said})")
    return Finding(f"{said}; the other would differ by {other:.2g} nats", nats)


@check(SCORES)
async def test_empty_response(subject: Subject) -> Finding:
    """A response of no tokens has no rows, or is refused, and the server lives on."""
    try:
        scores = await subject.score(subject.prompt(0), EMPTY)
    except PermanentError:
        note = "refused"
    else:
        rows = {len(scores.logprobs), len(scores.topk_ids), len(scores.entropy)}
        require(rows == {0}, f"scores of no tokens have {sorted(rows)} rows")
        note = "no rows"
    await subject.score(subject.prompt(0), subject.tokens(2, seed=1))
    return Finding(note)


@check(SCORES, after=["score_parity"])
async def test_longest_score(subject: Subject) -> Finding:
    """Prompt and response may fill the context exactly, and one token more is refused.

    For a student, which runs only sample from, one token less is enough, since some servers sample a token after every
    score.
    """
    context = subject.capabilities.max_context_tokens
    response = subject.tokens(RESPONSE_TOKENS, seed=2)
    prompt = subject.tokens(context - RESPONSE_TOKENS, seed=1)
    try:
        scores = await subject.score(prompt, response)
    except PermanentError:
        require(subject.capabilities.weight_update, f"{context} tokens fill the context, but are refused")
        prompt = prompt[1:]
        scores = await subject.score(prompt, response)
    nats = largest_of_scores(await subject.exact(prompt, response), response, scores)
    tokens = len(prompt) + len(response)
    require_close(nats, subject.tolerance_nats, f"log-probabilities at the end of {tokens} tokens")
    request = subject.score(subject.tokens(context - RESPONSE_TOKENS + 1, seed=1), response)
    scored = f"{context + 1} tokens exceed the context of {context}, but were scored: refuse them"
    await require_refusal(request, PermanentError, scored)
    return Finding(f"{tokens} tokens are scored, {context + 1} refused", nats)


@check(CANDIDATES)
async def test_candidates(subject: Subject) -> Finding:
    """Log-probabilities of chosen tokens, likely or not, are exact at chosen positions in any order."""
    prompt, response, positions, ids = _candidates(subject)
    served = await subject.candidates(prompt, response, positions, ids)
    exact = await subject.exact(prompt, response)
    nats = largest(served, of_tokens(exact[positions], ids))
    require_close(nats, subject.tolerance_nats, "log-probabilities of candidates")
    none = await subject.candidates(prompt, response, EMPTY, EMPTY.reshape(0, OF_POSITION))
    require(none.shape == (0, OF_POSITION), f"no positions gave shape {none.shape}")
    return Finding(
        f"{ids.size} candidates ({subject.capabilities.candidate_logprobs}), down to {served.min():.3g}", nats
    )


@check(CANDIDATES, after=["candidates"])
async def test_candidate_temperature(subject: Subject) -> Finding:
    """Candidates are at the temperature of rollouts. Otherwise the two could not be compared."""
    convention = subject.capabilities.generation_temperature
    prompt, response, positions, ids = _candidates(subject)
    try:
        served = await subject.candidates(prompt, response, positions, ids, temperature=COOL)
    except PermanentError as refusal:
        require(convention == "one", f"temperature {COOL} is refused, though generations are served at it: {refusal}")
        return Finding(f"1, as generations; {COOL} is refused")
    exact = await subject.exact(prompt, response, temperature=COOL, convention=convention)
    nats = largest(served, of_tokens(exact[positions], ids))
    require_close(nats, subject.tolerance_nats / COOL, f"candidates at temperature {COOL}")
    return Finding("as generations", nats)


@check(CANDIDATES, after=["candidates"])
async def test_candidate_version(subject: Subject) -> Finding:
    """Candidates of weights that are not served are refused by name, and those of whichever are served are exact."""
    if subject.version is None:
        raise not_offered("nobody knows which weights the server holds, and it takes no others")
    other = WeightVersion(subject.version.lineage + 7, subject.version.step + 7)
    prompt, response, positions, ids = _candidates(subject)
    request = subject.candidates(prompt, response, positions, ids, version=other)
    answered = f"asked of {other} while {subject.version} is served, but answered"
    await require_refusal(request, VersionMismatchError, answered)
    live = await subject.candidates(prompt, response, positions, ids, is_live=True)
    exact = await subject.exact(prompt, response)
    nats = largest(live, of_tokens(exact[positions], ids))
    require_close(
        nats, subject.tolerance_nats, "log-probabilities of candidates, asked of whichever weights are served"
    )
    return Finding(f"asked of {other} while {subject.version} is served: VersionMismatchError", nats)


def _responses(subject: Subject) -> list[tuple[IntArray, IntArray]]:
    return [
        (subject.prompt(i, PROMPT_TOKENS + 3 * i), subject.tokens(RESPONSE_TOKENS + i, seed=i))
        for i in range(RESPONSES)
    ]


async def _score(subject: Subject) -> list[tuple[tuple[IntArray, IntArray], TokenScores, Rows]]:
    """Return responses with their scores and the exact rows."""
    given = _responses(subject)
    scores = await gather(subject.score(prompt, response) for prompt, response in given)
    exact = [await subject.exact(prompt, response) for prompt, response in given]
    return list(zip(given, scores, exact, strict=True))


def _candidates(subject: Subject) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return a prompt, a response, positions (N,) with both ends among them, and candidates (N, k)."""
    prompt, response = subject.prompt(3), subject.tokens(RESPONSE_TOKENS, seed=3)
    draw = np.random.default_rng(3)
    inner = 1 + draw.choice(RESPONSE_TOKENS - 2, CANDIDATE_POSITIONS - 2, replace=False)
    positions = draw.permutation(np.array([0, RESPONSE_TOKENS - 1, *inner], np.int32)).astype(np.int32)
    ids = np.stack([draw.choice(subject.capabilities.vocab_size, OF_POSITION, replace=False) for _ in positions])
    ids[:, 0] = response[positions]
    return prompt, response, positions, ids.astype(np.int32)
