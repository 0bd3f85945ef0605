"""GRPO: rewards relative to a group of samples of the same prompt. It needs no teacher.

As in verl, every token's advantage is its response's reward, normalised within the group (docs/methods.md). The KL
to the frozen initial student is part of the run's loss (`training.reference_kl`).
"""

from __future__ import annotations

from collections.abc import Sequence

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


class GrpoPolicy:
    """GRPO for one prompt at a time."""

    class Settings(PluginSettings):
        kind: str = "grpo"
        samples: int = Field(8, ge=2, description="responses per prompt, which are its group")

    def __init__(self, settings: Settings, context: PolicyContext) -> None:
        self.settings = settings
        self.needs = PolicyNeeds(samples_per_prompt=settings.samples, reference=context.reference_kl)

    async def supervise(self, prompt: Prompt, stages: PromptStages) -> Sequence[Sample]:
        group = await gather(self._attempt(n, stages) for n in range(self.settings.samples))
        rewards = [judgement.reward for _, judgement, _ in group]
        samples = []
        for n, (attempt, advantage) in enumerate(zip(group, group_advantages(rewards), strict=True)):
            rollout, judgement, reference = attempt
            advantages = np.full(len(rollout.token_ids), advantage, dtype=np.float32)
            sample = student_sample(
                prompt, stages, rollout, judgement, advantages=advantages, reference_logprobs=reference
            )
            # Missing evidence is not a reward of 0: such a response is not trained on.
            is_left_out = judgement.reward is None
            sample.metrics["grpo/left_out"] = float(is_left_out)
            if not is_left_out:
                sample.metrics["grpo/no_signal"] = float(advantage == 0.0)
            sample.record.update(
                sample=n,
                reward=judgement.reward,
                advantage=None if is_left_out else round(advantage, 6),
                left_out=f"verifier: {judgement.verdict.value}" if is_left_out else None,
                group_rewards=rewards,  # an advantage can be understood only beside them
            )
            samples.append(msgspec.structs.replace(sample, supervision=None) if is_left_out else sample)
        return samples

    async def _attempt(self, n: int, stages: PromptStages) -> tuple[Generation, Judgement, FloatArray | None]:
        """Return a response of the group, its verdict, and the reference's log-probabilities (T,), if it needs them."""
        rollout = await stages.rollout(n=n)
        judgement, reference = await both(stages.verify(rollout.token_ids), self._reference(rollout, stages))
        return rollout, judgement, reference

    async def _reference(self, rollout: Generation, stages: PromptStages) -> FloatArray | None:
        return await stages.reference_logprobs(rollout.token_ids) if self.needs.reference else None


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
