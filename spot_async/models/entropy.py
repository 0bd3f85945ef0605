"""Bounds the entropy of a distribution of which only the top is known. Pure numpy in float64.

Axes: T rows, K shown log-probabilities, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from spot_async.types import Float64Array


def entropy_bounds(topk_logprobs: npt.ArrayLike, vocab_size: int) -> tuple[Float64Array, Float64Array]:
    """Return lower and upper bounds (T,), in nats, of the entropy of rows with top-K log-probabilities (T, K).

    The remaining mass lies on V - K tokens, none likelier than the K-th. The entropy is largest when that mass is
    spread evenly, and smallest when it is packed into as few tokens as possible. Widen the bounds
    by the server's numerical noise before relying on them.
    """
    probabilities = np.exp(np.asarray(topk_logprobs, dtype=np.float64))  # (T, K)
    unseen = vocab_size - probabilities.shape[-1]
    if unseen < 0:
        raise ValueError(f"{probabilities.shape[-1]} log-probabilities a row exceed the vocabulary of {vocab_size}")
    shown_entropy = -plogp(probabilities).sum(axis=-1)
    cap = probabilities.min(axis=-1)
    # The upper limit changes nothing for exact numbers. It keeps rounding out of the bounds, and covers K = V and a
    # K-th probability of 0, where nothing can be missing.
    missing = np.clip(1.0 - probabilities.sum(axis=-1), 0.0, unseen * cap)
    upper = shown_entropy - plogp(missing) + missing * np.log(max(unseen, 1))
    full_tokens, remainder = np.divmod(missing, np.where(cap > 0.0, cap, 1.0))
    lower = shown_entropy - full_tokens * plogp(cap) - plogp(remainder)
    return lower, upper


def plogp(p: Float64Array) -> Float64Array:
    """Return p log p, with 0 log 0 = 0."""
    return p * np.log(np.where(p > 0.0, p, 1.0))
