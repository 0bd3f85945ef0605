"""What to distil: the outcome-calibrated target at a probed position.

One formula, in float64. Which positions get a target (those with a positive value, B+) and how much a
target weighs is the policy's business.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt


def calibrated_target(teacher_logprobs: npt.ArrayLike, values: npt.ArrayLike, gamma: float) -> npt.NDArray[np.float64]:
    """`p(v) exp(gamma V(v)) / Z` over the candidates, `p` the teacher renormalised on them.

    `teacher_logprobs` and `values` are (..., k_p), natural logs (any common offset cancels) and mean
    rewards; the result has the same shape and rows that sum to 1. It is the maximiser of
    `E_rho[V] - KL(rho || p) / gamma` (paper Eq. (10), method.md section 3). `gamma = 0` gives `p`.

    Raises `ValueError` for a gamma that is negative or not finite.
    """
    if not (math.isfinite(gamma) and gamma >= 0.0):
        raise ValueError(f"gamma must be finite and >= 0, not {gamma}")
    logprobs = np.asarray(teacher_logprobs, dtype=np.float64)
    rewards = np.asarray(values, dtype=np.float64)
    # The target ignores a common shift of the values. Taken from the best one, no exponent grows with
    # gamma, and ties for the best keep the teacher's odds to the last bit.
    bonus = gamma * (rewards - rewards.max(axis=-1, keepdims=True))
    logits = logprobs + bonus
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))
