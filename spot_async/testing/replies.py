"""Makes replies of servers for tests: responses, scores, capabilities. A test gives only what it is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from spot_async.types import (
    Capabilities,
    FinishReason,
    Float64Array,
    Generation,
    IntArray,
    TokenScores,
    VersionSpan,
    WeightVersion,
)

INITIAL_VERSION = WeightVersion(0, 0)


def generation(
    token_ids: Sequence[int] | IntArray,
    logprobs: npt.ArrayLike | None = None,
    *,
    version: WeightVersion = INITIAL_VERSION,
    finish_reason: FinishReason = "stop",
) -> Generation:
    """Make a response of one weight version. Its log-probabilities are 0 by default."""
    tokens = len(token_ids)
    return Generation(
        token_ids=np.asarray(token_ids, np.int32),
        logprobs=np.asarray(np.zeros(tokens) if logprobs is None else logprobs, np.float32),
        finish_reason=finish_reason,
        version_spans=(VersionSpan(0, tokens, version),),
    )


def token_scores(
    logprobs: npt.ArrayLike,
    *,
    entropy: npt.ArrayLike = 0.0,
    topk_ids: npt.ArrayLike = 0,
    topk_logprobs: npt.ArrayLike = 0.0,
    **changes: Any,
) -> TokenScores:
    """Make a teacher's scores with exact entropies. A single value holds for all tokens."""
    own = np.asarray(logprobs, np.float32)
    nats = np.broadcast_to(entropy, own.shape).astype(np.float32)
    shape = (len(own), np.shape(topk_ids)[-1] if np.ndim(topk_ids) else 1)
    scores = {
        "logprobs": own,
        "topk_ids": np.broadcast_to(topk_ids, shape).astype(np.int32),
        "topk_logprobs": np.broadcast_to(topk_logprobs, shape).astype(np.float32),
        "entropy": nats,
        "entropy_lower": nats,
        "entropy_upper": nats,
        "version": INITIAL_VERSION,
    }
    return TokenScores(**{**scores, **changes})


def whole_scores(logprobs: Float64Array, response_ids: IntArray, top_k: int) -> TokenScores:
    """Make the scores of a response from the whole distribution of each of its tokens, `logprobs` (T, V)."""
    order = np.argsort(-logprobs, axis=-1)[:, :top_k]
    return token_scores(
        logprobs[np.arange(len(response_ids)), response_ids],
        entropy=-(np.exp(logprobs) * logprobs).sum(-1),
        topk_ids=order,
        topk_logprobs=np.take_along_axis(logprobs, order, -1),
    )


def capabilities(vocab_size: int, **changes: Any) -> Capabilities:
    """Make the capabilities of our own server: whole distributions, batched candidates, and weight updates."""
    return Capabilities(
        **{
            "model": "simulated",
            "vocab_size": vocab_size,
            "vocab_fingerprint": "simulated",
            "max_context_tokens": 1 << 20,
            "max_top_k": vocab_size,
            "exact_entropy": True,
            "candidate_logprobs": "batched",
            "weight_update": True,
            "in_flight_updates": True,
            **changes,
        }
    )
