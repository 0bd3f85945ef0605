"""Ids that a request must not sample, as servers are told, and responses put together from several requests. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from spot_async.types import Generation, SamplingSettings, VersionSpan

BAN = -1e4  # below whatever a model gives a token
OPENAI_BAN = -100.0  # the lowest bias of OpenAI's API


def logit_bias(sampling: SamplingSettings, vocab_size: int, ban: float = BAN) -> dict[str, Any]:
    """What bans the ids from `vocab_limit` on, in the words of OpenAI's API; empty where the softmax ends before."""
    left_out = range(sampling.vocab_limit or vocab_size, vocab_size)
    return {"logit_bias": {str(token_id): ban for token_id in left_out}} if left_out else {}


def allowed_tokens(reply: Generation, vocab_limit: int) -> int:
    """How many tokens come before the first from `vocab_limit` on."""
    banned = np.flatnonzero(reply.token_ids >= vocab_limit)
    return int(banned[0]) if len(banned) else len(reply.token_ids)


def first_tokens(reply: Generation, count: int) -> Generation:
    """The first `count` tokens of a response."""
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
    """One response of parts that continue each other; it finishes as the last one does."""
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
