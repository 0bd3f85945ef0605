"""REOPOLD's clip (arXiv 2603.11137): no token may be punished beyond what a mixture with the teacher would be.

paper: A_t = max(log p_T(y_t) - log p_S(y_t), log(lambda / (1 - lambda)))
ours:  pulls = (pull(score(y), clip=(log(lambda / (1 - lambda)), inf)),). Its choice of tokens by the student's entropy
       and its two phases are not here.
"""

import math
from collections.abc import Sequence

import spot_async as spot
from spot_async.protocols import PromptStages


class Reopold:
    class Settings(spot.PluginSettings):
        mixture: float = 0.1  # lambda

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.least = math.log(settings.mixture / (1 - settings.mixture))
        self.needs = spot.PolicyNeeds(teacher_top_k=1, asked_top_k=0, outcomes=False)

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        rollout = await stages.rollout()
        y = rollout.token_ids
        scores, judgement = await spot.both(stages.score(y, top_k=0), stages.verify(y))
        pulls = (spot.pull(scores, clip=(self.least, math.inf)),)
        return [spot.student_sample(prompt, stages, rollout, judgement, scores, pulls=pulls)]
