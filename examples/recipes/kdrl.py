"""KDRL (arXiv 2506.02208), in verl and ms-swift OPD with rewards: GRPO's advantage beside the teacher's.

paper: A_t = (R - mean R) / std R + alpha (log p_T(y_t) - log p_S(y_t)), R over a prompt's group of responses
ours:  advantages = group_advantages(rewards), pulls = (pull(score(y), alpha),)
"""

from collections.abc import Sequence

import numpy as np

import spot_async as spot
from spot_async.protocols import PromptStages


class Kdrl:
    class Settings(spot.PluginSettings):
        samples: int = 8
        alpha: float = 1.0

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.settings = settings
        self.needs = spot.PolicyNeeds(teacher_top_k=1, asked_top_k=0, samples_per_prompt=settings.samples)

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        async def attempt(n: int) -> tuple[spot.Generation, spot.Judgement, spot.TokenScores]:
            rollout = await stages.rollout(n=n)
            y = rollout.token_ids
            scores, judgement = await spot.both(stages.score(y, top_k=0), stages.verify(y))
            return rollout, judgement, scores

        group = await spot.gather(attempt(n) for n in range(self.settings.samples))
        advantages = spot.group_advantages([judgement.reward for _, judgement, _ in group])
        samples = []
        for (rollout, judgement, scores), given in zip(group, advantages, strict=True):
            reward, teacher = np.full_like(scores.logprobs, given), spot.pull(scores, self.settings.alpha)
            terms = {"advantages": reward, "pulls": (teacher,), "policy_mask": None}  # rewards are of all tokens
            samples.append(spot.student_sample(prompt, stages, rollout, judgement, scores, **terms))
        return samples
