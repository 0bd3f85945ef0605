"""GRPO: rewards relative to a group of samples of the same prompt. It needs no teacher.

As in verl, every token's advantage is its response's reward, normalised within the group (docs/methods.md). The KL
to the frozen initial student is part of the run's loss (`training.reference_kl`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from pydantic import Field

from spot_async.base.tasks import both, gather
from spot_async.config import PluginSettings
from spot_async.protocols import PromptStages
from spot_async.types import (
    FloatArray,
    Generation,
    Judgement,
    PolicyContext,
    PolicyNeeds,
    Prompt,
    Sample,
)

from .samples import student_sample

STANDARD_DEVIATION_FLOOR = 1e-6


class GrpoSettings(PluginSettings):
    kind: str = "grpo"
    samples: int = Field(8, ge=2, description="responses per prompt, which are its group")


@dataclass(frozen=True)
class Attempt:
    """One response of the group."""

    rollout: Generation
    judgement: Judgement
    reference_logprobs: FloatArray | None  # (T,)


class GrpoPolicy:
    """GRPO for one prompt at a time."""

    Settings = GrpoSettings

    def __init__(self, settings: GrpoSettings, context: PolicyContext) -> None:
        self.settings = settings
        self.needs = PolicyNeeds(samples_per_prompt=settings.samples, reference=context.reference_kl)

    async def supervise(self, prompt: Prompt, stages: PromptStages) -> Sequence[Sample]:
        group = await gather(self._attempt(n, stages) for n in range(self.settings.samples))
        rewards = [attempt.judgement.reward for attempt in group]
        # An advantage can be understood only beside the rewards of the whole group.
        return [
            self._sample(prompt, stages, n, attempt, advantage, {"group_rewards": rewards})
            for n, (attempt, advantage) in enumerate(zip(group, group_advantages(rewards), strict=True))
        ]

    async def _attempt(self, n: int, stages: PromptStages) -> Attempt:
        rollout = await stages.rollout(n=n)
        judgement, reference = await both(stages.verify(rollout.token_ids), self._reference(rollout, stages))
        return Attempt(rollout, judgement, reference)

    async def _reference(self, rollout: Generation, stages: PromptStages) -> FloatArray | None:
        return await stages.reference_logprobs(rollout.token_ids) if self.needs.reference else None

    def _sample(
        self,
        prompt: Prompt,
        stages: PromptStages,
        n: int,
        attempt: Attempt,
        advantage: float,
        of_group: dict[str, Any],
    ) -> Sample:
        sample = student_sample(
            prompt,
            stages,
            attempt.rollout,
            attempt.judgement,
            advantages=np.full(len(attempt.rollout.token_ids), advantage, dtype=np.float32),
            reference_logprobs=attempt.reference_logprobs,
        )
        # Missing evidence is not a reward of 0: such a response is not trained on.
        is_left_out = attempt.judgement.reward is None
        sample.metrics["grpo/left_out"] = float(is_left_out)
        if not is_left_out:
            sample.metrics["grpo/no_signal"] = float(advantage == 0.0)
        sample.record.update(
            sample=n,
            reward=attempt.judgement.reward,
            advantage=None if is_left_out else round(advantage, 6),
            left_out=f"verifier: {attempt.judgement.verdict.value}" if is_left_out else None,
            **of_group,
        )
        return msgspec.structs.replace(sample, supervision=None) if is_left_out else sample


def group_advantages(rewards: Sequence[float | None]) -> list[float]:
    """Return `(R - mean) / (std + 1e-6)` of a group's rewards (N,), with the sample standard deviation (ddof 1).

    A response without a reward is left out of the group's mean, and has 0. All are 0 where the group gives no
    direction: equal rewards, or a single response with evidence.
    """
    values = np.array([reward for reward in rewards if reward is not None], dtype=np.float64)
    if len(values) < 2 or (values == values[0]).all():  # rounding could move the mean of equal ones
        return [0.0] * len(rewards)
    advantages = iter(((values - values.mean()) / (values.std(ddof=1) + STANDARD_DEVIATION_FLOOR)).tolist())
    return [0.0 if reward is None else next(advantages) for reward in rewards]
