"""Makes scores from a served top-K, for servers that give no entropy. They have bounds of it instead. Pure.

All K served tokens tighten the bounds, also those beyond the requested k.
"""

from __future__ import annotations

import math

import numpy as np

from spot_async.models.entropy import entropy_bounds
from spot_async.types import FloatArray, IntArray, ScoredPositions, TokenScores, WeightVersion

from .replies import check_logprobs


def bounded_scores(
    logprobs: FloatArray,
    topk_ids: IntArray,
    topk_logprobs: FloatArray,
    *,
    top_k: int,
    vocab_size: int,
    version: WeightVersion,
) -> TokenScores:
    """Return scores of T tokens from log-probabilities (T,) and a served top-K (T, K), cut to the requested `top_k`.

    Raises `PoisonedReplyError` for numbers that are not log-probabilities, from which no bounds could be computed.
    """
    check_logprobs("topk_logprobs", topk_logprobs, topk_logprobs.shape)
    lower, upper = _bounds(topk_logprobs, vocab_size)
    return TokenScores(
        logprobs=logprobs,
        topk_ids=topk_ids[:, :top_k],
        topk_logprobs=topk_logprobs[:, :top_k],
        entropy=((lower + upper) / 2).astype(np.float32),
        entropy_lower=lower,
        entropy_upper=upper,
        version=version,
    )


def scored_positions(topk_ids: IntArray, topk_logprobs: FloatArray, *, vocab_size: int) -> ScoredPositions:
    """Return positions from a top-K (N, K) that was asked for singly.

    Raises `PoisonedReplyError`, as `bounded_scores`.
    """
    check_logprobs("topk_logprobs", topk_logprobs, topk_logprobs.shape)
    lower, upper = _bounds(topk_logprobs, vocab_size)
    return ScoredPositions(topk_ids=topk_ids, topk_logprobs=topk_logprobs, entropy_lower=lower, entropy_upper=upper)


def _bounds(topk_logprobs: FloatArray, vocab_size: int) -> tuple[FloatArray, FloatArray]:
    """Return bounds (T,) of the served row's entropy. Whoever means another computation of it widens them by noise."""
    if not topk_logprobs.size:  # nothing was served
        rows = len(topk_logprobs)
        return np.zeros(rows, np.float32), np.full(rows, math.log(vocab_size), np.float32)
    lower, upper = (
        np.clip(each, 0.0, math.log(vocab_size)).astype(np.float32)
        for each in entropy_bounds(topk_logprobs, vocab_size)
    )
    return np.minimum(lower, upper), upper
