"""REOPOLD (arXiv 2603.11137): no token may be punished beyond what a mixture with the teacher would be.

paper: A_t = max(log p_T(y_t) - log p_S(y_t), log(lambda / (1 - lambda))), first on all tokens, to explore, and later
       on those at which the student is least sure, to refine
ours:  pulls = (pull(score(y), clip=(log(lambda / (1 - lambda)), inf)),), later where H_S >= quantile of the batch, H_S
       of the student in training. "Later" is a share of the iterations. The paper's other parts are not here.
"""

import math
from collections.abc import Sequence

import numpy as np

import spot_async as spot
from spot_async.protocols import PromptStages


class Reopold:
    class Settings(spot.PluginSettings):
        mixture: float = 0.1  # lambda
        refines_from: float = 0.5
        share: float = 0.2  # of the tokens that are refined

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.settings, self.least = settings, math.log(settings.mixture / (1 - settings.mixture))
        self.needs = spot.PolicyNeeds(teacher_top_k=1, asked_top_k=0, outcomes=False)

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        y = (rollout := await stages.rollout()).token_ids
        scores, judgement = await spot.both(stages.score(y, top_k=0), stages.verify(y))
        clipped = spot.pull(scores, clip=(self.least, math.inf))
        return [spot.student_sample(prompt, stages, rollout, judgement, scores, pulls=(clipped,))]

    def revise(self, batch: spot.LiveBatch) -> Sequence[spot.Sample]:
        if batch.progress < self.settings.refines_from:
            return batch.samples
        least = np.quantile(np.concatenate([live.entropy[live.where] for live in batch.live]), 1 - self.settings.share)
        pulls = [sample.supervision.pulls[0] for sample in batch.samples]
        kept = [spot.weighted(pull, live.entropy >= least) for pull, live in zip(pulls, batch.live, strict=True)]
        return [spot.revised(sample, pulls=(pull,)) for sample, pull in zip(batch.samples, kept, strict=True)]
