"""The one place that knows which model output row decides which response token.

A causal model's output row `i` is its distribution after reading token `i`. So row `prompt_length + t - 1` decides
response position `t` (0-based). Scores, masks, candidates, entropies, losses and branch roots all ask this module: an
error of one row crashes nothing and ruins everything.
"""

from __future__ import annotations

import numpy as np

from spot_async.types import IntArray


def decision_row(prompt_length: int, position: int) -> int:
    """Return the output row (0-based, over prompt + response) that decides response position `position`."""
    if prompt_length < 1:
        raise ValueError("a response needs at least one prompt token before it")
    return prompt_length + position - 1


def decision_rows(prompt_length: int, response_length: int) -> slice:
    """Return the rows of all response positions, in order: `logits[decision_rows(P, T)]` is `(T, V)`."""
    first = decision_row(prompt_length, 0)
    return slice(first, first + response_length)


def branch_prefix_length(prompt_length: int, position: int) -> int:
    """Return how many tokens of prompt + response come before the decision at `position`: the length of context c_t."""
    return decision_row(prompt_length, position) + 1


def branch_root(prompt_ids: IntArray, response_ids: IntArray, position: int, candidate_id: int) -> IntArray:
    """Return the context c_t with a candidate for response position `position` behind it, as int32."""
    chosen = np.array([candidate_id], np.int32)
    before = response_ids[: branch_prefix_length(len(prompt_ids), position) - len(prompt_ids)]
    return np.concatenate([prompt_ids, before, chosen]).astype(np.int32, copy=False)
