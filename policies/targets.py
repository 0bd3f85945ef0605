"""Computes what to distil: the teacher's prior over its best candidates, as it is or calibrated by outcomes.

All in float64. A `Branch` is what SPOT finds out at one probed position, and the target that follows. The policy
decides which positions get a target and how much it weighs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from spot_async.terms import renormalised, value_variance
from spot_async.types import Float64Array, Generation, Int64Array, Judgement, Verdict


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
    return renormalised(logits)


@dataclass(frozen=True)
class Branch:
    """One probed position: the teacher's candidates, the prior, and the outcomes of each candidate."""

    position: int
    candidate_ids: npt.NDArray[np.int32]  # (k_p,)
    teacher_logprobs: npt.NDArray[np.float32]  # (k_p,) full-vocabulary
    judgements: list[list[Judgement]]  # k_p x N_p; N_p is 0 without verifier guidance
    continuations: list[list[Generation]]  # k_p x N_p
    gamma: float
    credited_from: Int64Array | None = None  # (k_p,) a control: the candidate whose value each one is credited with

    @cached_property
    def mean_rewards(self) -> list[float | None]:
        """The k_p mean rewards; None for a candidate without any evidence."""
        rewards = [outcome_rewards(judgements) for judgements in self.judgements]
        return [sum(each) / len(each) if each else None for each in rewards]

    @cached_property
    def values(self) -> Float64Array | None:
        """The mean reward of each candidate (k_p,). None if any candidate has no evidence."""
        known = [value for value in self.mean_rewards if value is not None]
        return np.array(known) if len(known) == len(self.mean_rewards) else None

    @cached_property
    def viable(self) -> bool:
        """Whether the position belongs to B+: some probe is right or, if the verifier gives numbers alone, above 0."""
        judged = [each for of_candidate in self.judgements for each in of_candidate]
        numbers = outcome_rewards(each.verdict for each in judged) or outcome_rewards(judged)
        return self.values is not None and max(numbers, default=0.0) > 0

    @cached_property
    def prior(self) -> Float64Array:
        """The teacher renormalised on its candidates (k_p,)."""
        return renormalised(self.teacher_logprobs)

    @cached_property
    def target(self) -> Float64Array:
        """The prior calibrated by the values (k_p,), or the prior itself where there are none."""
        if self.values is None:
            return self.prior
        credited = self.values if self.credited_from is None else self.values[self.credited_from]
        return calibrated_target(self.teacher_logprobs, credited, self.gamma)

    @property
    def value_variance(self) -> float | None:
        """An estimate of the variance of the candidates' values under the prior; None where the probes show none."""
        return value_variance(self.prior, [outcome_rewards(judgements) for judgements in self.judgements])


def outcome_rewards(judged: Iterable[Judgement | Verdict]) -> list[float]:
    """Return the rewards of those that are outcomes. Missing evidence is left out."""
    return [reward for each in judged if (reward := each.reward) is not None]
