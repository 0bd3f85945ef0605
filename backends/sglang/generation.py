"""Samples responses below a `vocab_limit`, with log-probabilities of the whole softmax.

SGLang has no mask that leaves log-probabilities alone: a `logit_bias` renormalises them over the other tokens. So a
response is sampled without one. If an id beyond the limit comes, the response is cut off before it, and the rest is
asked for again. Only at temperature 0, where the same id would come again, that rest is sampled with a bias, and its
log-probabilities are of the ids below.

This is the right distribution: a token that is drawn again until it is below the limit is distributed like one drawn
among the tokens below. Padding rows are hardly ever sampled, so nearly every response takes only one request.
"""

from __future__ import annotations

import msgspec
import numpy as np

from spot_async.base.seeds import derive_seed
from spot_async.models.responses import first_tokens, joined
from spot_async.types import Generation, IntArray, SamplingSettings

from ..shared.replies import check_generation
from .requests import SglangRequests


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
    while not _is_complete(parts, sampling):
        context_ids, rest = _rest(prompt_ids, sampling, parts)
        if not parts or sampling.temperature:
            stops = (*sampling.stop_token_ids, *left_out)
            rest = msgspec.structs.replace(rest, vocab_limit=None, stop_token_ids=stops)
        reply = await server.sample(context_ids, rest, top_k=top_k, deadline=deadline)
        parts.append(first_tokens(reply, allowed_tokens(reply, limit)))
    return check_generation(joined(*parts), sampling, top_k=top_k, vocab_size=vocab_size)


def _rest(
    prompt_ids: IntArray, sampling: SamplingSettings, parts: list[Generation]
) -> tuple[IntArray, SamplingSettings]:
    """Return the context and settings for the tokens still to be sampled. Only the first request has the given seed."""
    if not parts:
        return prompt_ids, sampling
    sampled = np.concatenate([part.token_ids for part in parts])
    seed = derive_seed(sampling.seed, "rest", len(parts))
    rest = msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens - len(sampled), seed=seed)
    return np.concatenate([prompt_ids, sampled]), rest


def _is_complete(parts: list[Generation], sampling: SamplingSettings) -> bool:
    stopped = bool(parts) and bool(np.isin(parts[-1].token_ids[-1:], sampling.stop_token_ids).any())
    return stopped or sum(len(part.token_ids) for part in parts) == sampling.max_tokens


def allowed_tokens(reply: Generation, vocab_limit: int) -> int:
    """Return how many tokens come before the first id that is not below `vocab_limit`."""
    banned = np.flatnonzero(reply.token_ids >= vocab_limit)
    return int(banned[0]) if len(banned) else len(reply.token_ids)
