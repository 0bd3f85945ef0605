"""Computes what to distil: the teacher's prior over its best candidates, as it is or calibrated by outcomes.

All in float64. The policy decides which positions get a target and how much it weighs.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from spot_async.types import Float64Array


def teacher_prior(teacher_logprobs: npt.ArrayLike) -> Float64Array:
    """Return the teacher renormalised on its candidates: (..., k) natural logs to (..., k) probabilities."""
    logprobs = np.asarray(teacher_logprobs, dtype=np.float64)
    return calibrated_target(logprobs, np.zeros_like(logprobs), gamma=0.0)


def target_entropy(target: npt.ArrayLike) -> Float64Array:
    """Return the entropy (...), in nats, of targets (..., k). Cross-entropy minus this is the KL divergence."""
    probabilities = np.asarray(target, dtype=np.float64)
    return np.asarray(-(probabilities * np.log(np.where(probabilities > 0.0, probabilities, 1.0))).sum(axis=-1))


def calibrated_target(teacher_logprobs: npt.ArrayLike, values: npt.ArrayLike, gamma: float) -> Float64Array:
    """Return `p(v) exp(gamma V(v)) / Z` over the candidates, where `p` is the teacher renormalised on them.

    `teacher_logprobs` (..., k_p) are natural logs, in which any common offset cancels. `values` (..., k_p) are mean
    rewards. The result has the same shape, and rows that sum to 1. It maximises `E_rho[V] - KL(rho || p) / gamma`
    (paper Eq. (10)). `gamma = 0` gives `p`.

    Raises `ValueError` for a gamma that is negative or not finite.
    """
    if not (math.isfinite(gamma) and gamma >= 0.0):
        raise ValueError(f"gamma must be finite and >= 0, not {gamma}")
    logprobs = np.asarray(teacher_logprobs, dtype=np.float64)
    rewards = np.asarray(values, dtype=np.float64)
    # A common shift of the values does not change the target. Shifting the best value to 0 keeps exponents from growing
    # with gamma, and candidates that tie for the best keep the teacher's odds to the last bit.
    bonus = gamma * (rewards - rewards.max(axis=-1, keepdims=True))
    logits = logprobs + bonus
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))
