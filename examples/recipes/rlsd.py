"""RLSD (arXiv 2604.03128): the reward says in which direction, the privileged self how far.

paper: A_t = sign(A_group) |log p(y_t | x, y*, y_<t) - log p(y_t | x, y_<t)|, p the frozen student
ours:  advantages of two scores of the student's directory, behind `prompt.teacher.text` and `prompt_ids`, not clipped
"""

from collections.abc import Iterable, Sequence

import numpy as np

import spot_async as spot
from spot_async.protocols import PromptStages


class Rlsd:
    class Settings(spot.PluginSettings):
        samples: int = 8

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.samples = n = settings.samples
        self.needs = spot.PolicyNeeds(teacher_top_k=1, samples_per_prompt=n, scores_per_prompt=2 * n)

    def check(self, prompts: Iterable[spot.Prompt]) -> None:
        if any(prompt.teacher_ids is None for prompt in prompts):
            raise spot.ConfigError("prompt.teacher.text: RLSD compares two contexts; give one that names {solution}")

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        async def attempt(n: int) -> tuple:
            y = (rollout := await stages.rollout(n=n)).token_ids
            scores = spot.both(stages.score(y, top_k=0), stages.score(y, top_k=0, prompt_ids=prompt.token_ids))
            (informed, plain), judgement = await spot.both(scores, stages.verify(y))
            size = np.abs(informed.logprobs - plain.logprobs) * plain.known
            return rollout, judgement, informed, size

        group = await spot.gather(attempt(n) for n in range(self.samples))
        signs = np.sign(spot.group_advantages([judgement.reward for _, judgement, *_ in group]))
        return [
            spot.student_sample(prompt, stages, *answers, advantages=np.float32(sign) * size)
            for (*answers, size), sign in zip(group, signs, strict=True)
        ]
