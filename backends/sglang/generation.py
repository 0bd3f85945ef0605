"""Samples responses below a `vocab_limit`, with log-probabilities of the whole softmax.

SGLang has no mask that leaves log-probabilities alone: a `logit_bias` renormalises them over the other tokens. So a
response is first sampled without one. If an id beyond the limit comes, the response is cut off before it. The next few
tokens are sampled with a bias, and their log-probabilities are asked for again without it.

This is the right distribution: a token that is drawn again until it is below the limit is distributed like one drawn
among the tokens below. Padding rows are hardly ever sampled, so nearly every response takes only one request.
"""

from __future__ import annotations

from itertools import takewhile

import msgspec
import numpy as np

from spot_async.base.seeds import derive_seed
from spot_async.models.responses import first_tokens, joined
from spot_async.types import Generation, IntArray, SamplingSettings

from ..shared.replies import check_generation
from .replies import NextToken
from .requests import SglangRequests

MASKED_TOKENS = 32  # so many tokens are sampled with a bias before the next try without one


async def generate_below(
    server: SglangRequests,
    prompt_ids: IntArray,
    sampling: SamplingSettings,
    vocab_size: int,
    *,
    top_k: int,
    deadline: float,
) -> Generation:
    """Sample a response with only tokens below `sampling.vocab_limit`."""
    limit = sampling.vocab_limit
    if limit is None or limit >= vocab_size:
        return await server.sample(prompt_ids, sampling, top_k=top_k, deadline=deadline)
    # Stop at ids beyond the limit, because anything after them is useless. Without stop ids of the request's own this
    # would not work: stop ids make SGLang also stop at the model's end tokens.
    left_out = tuple(range(limit, vocab_size)) if sampling.stop_token_ids else ()
    parts: list[Generation] = []
    while True:
        context_ids, rest = _rest(prompt_ids, sampling, parts, "freely")
        free = msgspec.structs.replace(rest, vocab_limit=None, stop_token_ids=(*sampling.stop_token_ids, *left_out))
        reply = await server.sample(context_ids, free, top_k=top_k, deadline=deadline)
        parts.append(first_tokens(reply, allowed_tokens(reply, limit)))
        if _is_complete(parts, sampling):
            break
        context_ids, rest = _rest(prompt_ids, sampling, parts, "masked")
        masked = msgspec.structs.replace(rest, max_tokens=min(MASKED_TOKENS, rest.max_tokens))
        reply = await server.sample(context_ids, masked, top_k=0, deadline=deadline)
        parts.append(await _unmasked(server, context_ids, masked, reply, top_k=top_k, deadline=deadline))
        if _is_complete(parts, sampling):
            break
    return check_generation(joined(*parts), sampling, top_k=top_k, vocab_size=vocab_size)


def _rest(
    prompt_ids: IntArray, sampling: SamplingSettings, parts: list[Generation], how: str
) -> tuple[IntArray, SamplingSettings]:
    """Return the context and settings for the tokens still to be sampled. Only the first request has the given seed."""
    if not parts:
        return prompt_ids, sampling
    sampled = np.concatenate([part.token_ids for part in parts])
    seed = derive_seed(sampling.seed, how, len(sampled))
    rest = msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens - len(sampled), seed=seed)
    return np.concatenate([prompt_ids, sampled]), rest


def _is_complete(parts: list[Generation], sampling: SamplingSettings) -> bool:
    last = parts[-1].token_ids[-1:]
    stopped = bool(np.isin(last, sampling.stop_token_ids).any())
    return stopped or sum(len(part.token_ids) for part in parts) == sampling.max_tokens


async def _unmasked(
    server: SglangRequests,
    context_ids: IntArray,
    sampling: SamplingSettings,
    masked: Generation,
    *,
    top_k: int,
    deadline: float,
) -> Generation:
    """Return `masked` with log-probabilities of the whole softmax, as far as the server still has its weights."""
    sequence = np.concatenate([context_ids, masked.token_ids])
    prefixes = [sequence[: len(context_ids) + n] for n in range(len(masked.token_ids))]
    chosen = [np.array([token_id]) for token_id in masked.token_ids]
    own = await server.next_tokens(zip(prefixes, chosen, strict=True), 0, sampling.temperature, deadline)
    tops: list[NextToken] = []
    if top_k:
        tops = await server.next_tokens(((each, None) for each in prefixes), top_k, sampling.temperature, deadline)
    versions = [span.version for span in masked.version_spans for _ in range(span.start, span.end)]
    answers = zip(versions, own, tops or own, strict=True)
    count = sum(1 for _ in takewhile(lambda row: row[0] == row[1].version == row[2].version, answers))
    return msgspec.structs.replace(
        first_tokens(masked, count),
        logprobs=np.array([row.chosen[0] for row in own if row.chosen is not None][:count], np.float32),
        topk_ids=np.concatenate([row.top.ids for row in tops if row.top is not None])[:count] if top_k else None,
        topk_logprobs=np.concatenate([row.top.logprobs for row in tops if row.top is not None])[:count]
        if top_k
        else None,
    )


def allowed_tokens(reply: Generation, vocab_limit: int) -> int:
    """Return how many tokens come before the first id that is not below `vocab_limit`."""
    banned = np.flatnonzero(reply.token_ids >= vocab_limit)
    return int(banned[0]) if len(banned) else len(reply.token_ids)
