"""Keeps servers from sampling ids beyond a limit, and joins responses that were sampled in several requests. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from spot_async.types import Generation, SamplingSettings, VersionSpan

BAN = -1e4  # outweighs any logit
OPENAI_BAN = -100.0  # the lowest bias that OpenAI's API allows


def logit_bias(sampling: SamplingSettings, vocab_size: int, ban: float = BAN) -> dict[str, Any]:
    """Return the request fields of OpenAI's API that ban ids from `vocab_limit` on; none if there are no such ids."""
    left_out = range(sampling.vocab_limit or vocab_size, vocab_size)
    return {"logit_bias": {str(token_id): ban for token_id in left_out}} if left_out else {}


def allowed_tokens(reply: Generation, vocab_limit: int) -> int:
    """Return how many tokens come before the first id that is not below `vocab_limit`."""
    banned = np.flatnonzero(reply.token_ids >= vocab_limit)
    return int(banned[0]) if len(banned) else len(reply.token_ids)


def first_tokens(reply: Generation, count: int) -> Generation:
    """Return the first `count` tokens of a response."""
    spans = [msgspec.structs.replace(span, end=min(span.end, count)) for span in reply.version_spans]
    return msgspec.structs.replace(
        reply,
        token_ids=reply.token_ids[:count],
        logprobs=reply.logprobs[:count],
        version_spans=tuple(span for span in spans if span.start < span.end),
        topk_ids=None if reply.topk_ids is None else reply.topk_ids[:count],
        topk_logprobs=None if reply.topk_logprobs is None else reply.topk_logprobs[:count],
    )


def joined(parts: Sequence[Generation]) -> Generation:
    """Join parts that continue each other into one response. It finishes as the last part does."""
    spans, start = [], 0
    for part in parts:
        spans += [VersionSpan(start + span.start, start + span.end, span.version) for span in part.version_spans]
        start += len(part.token_ids)
    has_topk = all(part.topk_ids is not None for part in parts)
    return msgspec.structs.replace(
        parts[-1],
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        version_spans=tuple(spans),
        topk_ids=np.concatenate([part.topk_ids for part in parts if part.topk_ids is not None]) if has_topk else None,
        topk_logprobs=np.concatenate([part.topk_logprobs for part in parts if part.topk_logprobs is not None])
        if has_topk
        else None,
    )
