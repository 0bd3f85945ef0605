"""RLSD (arXiv 2604.03128): the reward says in which direction, the privileged self how far.

paper: A_t = A_group clip(exp(sign(A_group) d_t), 1 - e, 1 + e), d_t = log p(y_t | x, y*, y_<t) - log p(y_t | x, y_<t)
ours:  advantages of two scores behind `prompt.teacher.text` and `prompt_ids`; p is frozen, and live in the paper
"""

from collections.abc import Iterable, Sequence

import numpy as np

import spot_async as spot
from spot_async.protocols import PromptStages


class Rlsd:
    class Settings(spot.PluginSettings):
        samples: int = 8
        clip: float = 0.2  # e

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.settings, n = settings, settings.samples
        self.needs = spot.PolicyNeeds(teacher_top_k=1, asked_top_k=0, samples_per_prompt=n, scores_per_prompt=2 * n)

    def check(self, prompts: Iterable[spot.Prompt]) -> None:
        if any(prompt.teacher_ids is None for prompt in prompts):
            raise spot.ConfigError("prompt.teacher.text: RLSD compares two contexts; give one that names {solution}")

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        async def attempt(n: int) -> tuple:
            y = (rollout := await stages.rollout(n=n)).token_ids
            scores = spot.both(stages.score(y, top_k=0), stages.score(y, top_k=0, prompt_ids=prompt.token_ids))
            (informed, plain), judgement = await spot.both(scores, stages.verify(y))
            return rollout, judgement, informed, (informed.logprobs - plain.logprobs) * plain.known

        group = await spot.gather(attempt(n) for n in range(self.settings.samples))
        a, e = spot.group_advantages([judgement.reward for _, judgement, *_ in group]), self.settings.clip
        return [
            spot.student_sample(prompt, stages, *answers, advantages=a * np.exp(np.sign(a) * d).clip(1 - e, 1 + e))
            for (*answers, d), a in zip(group, np.float32(a), strict=True)
        ]
