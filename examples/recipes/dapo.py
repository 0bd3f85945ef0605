"""DAPO (arXiv 2503.14476): GRPO on groups whose rewards differ; for the others `training.refill` takes more prompts.

paper: A_t = (R - mean R) / std R, the mean over all tokens of a batch, without a KL; only groups with 0 < right < G
ours:  advantages = group_advantages(rewards), no supervision where all of a group's rewards are equal; the clip is even
"""

from collections.abc import Sequence

import numpy as np

import spot_async as spot
from spot_async.protocols import PromptStages


class Dapo:
    class Settings(spot.PluginSettings):
        samples: int = 8

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.settings = settings
        self.needs = spot.PolicyNeeds(samples_per_prompt=settings.samples)

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        async def attempt(n: int) -> tuple[spot.Generation, spot.Judgement]:
            rollout = await stages.rollout(n=n)
            return rollout, await stages.verify(rollout.token_ids)

        group = await spot.gather(attempt(n) for n in range(self.settings.samples))
        advantages = spot.group_advantages([judgement.reward for _, judgement in group])
        samples = []
        for (rollout, judgement), given in zip(group, advantages, strict=True):
            terms = {"advantages": np.full(len(rollout.token_ids), given, np.float32)}
            sample = spot.student_sample(prompt, stages, rollout, judgement, **terms)
            if judgement.reward is None or not any(advantages):
                why = sample.record | {"left_out": "no verdict, or the same reward as all of its group"}
                sample = spot.Sample(supervision=None, metrics=sample.metrics, record=why)
            samples.append(sample)
        return samples
