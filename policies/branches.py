"""What SPOT finds out at one probed position, and the target that follows: a `Branch`. Pure.

Asking for the probes, and deciding which branches are trained, is done in `spot.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from spot_async.types import Float64Array, Generation, Int64Array, Verdict

from .targets import calibrated_target, teacher_prior


@dataclass(frozen=True)
class Branch:
    """One probed position: the teacher's candidates, the prior, and the outcomes of each candidate."""

    position: int
    candidate_ids: npt.NDArray[np.int32]  # (k_p,)
    teacher_logprobs: npt.NDArray[np.float32]  # (k_p,) full-vocabulary
    verdicts: list[list[Verdict]]  # k_p x N_p; N_p is 0 without verifier guidance
    continuations: list[list[Generation]]  # k_p x N_p
    gamma: float
    credited_from: Int64Array | None = None  # (k_p,) a control: the candidate whose value each one is credited with

    @cached_property
    def mean_rewards(self) -> list[float | None]:
        """The k_p mean rewards; None for a candidate without any evidence."""
        rewards = [outcome_rewards(verdicts) for verdicts in self.verdicts]
        return [sum(each) / len(each) if each else None for each in rewards]

    @cached_property
    def values(self) -> Float64Array | None:
        """The mean reward of each candidate (k_p,). None if any candidate has no evidence."""
        known = [value for value in self.mean_rewards if value is not None]
        return np.array(known) if len(known) == len(self.mean_rewards) else None

    @property
    def viable(self) -> bool:
        """Whether the position belongs to B+, because some candidate has a positive value."""
        return self.values is not None and bool((self.values > 0).any())

    @cached_property
    def prior(self) -> Float64Array:
        """The teacher renormalised on its candidates (k_p,)."""
        return teacher_prior(self.teacher_logprobs)

    @cached_property
    def target(self) -> Float64Array:
        """The prior calibrated by the values (k_p,), or the prior itself where there are none."""
        if self.values is None:
            return self.prior
        credited = self.values if self.credited_from is None else self.values[self.credited_from]
        return calibrated_target(self.teacher_logprobs, credited, self.gamma)

    @property
    def value_variance(self) -> float | None:
        """The variance of the measured values under the prior. None without values."""
        if self.values is None:
            return None
        return float(self.prior @ (self.values - self.prior @ self.values) ** 2)


def outcome_rewards(verdicts: Iterable[Verdict]) -> list[float]:
    """Return the rewards of verdicts that are outcomes. Missing evidence is left out."""
    return [reward for verdict in verdicts if (reward := verdict.reward) is not None]
