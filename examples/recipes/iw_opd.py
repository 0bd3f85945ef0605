"""IW-OPD (arXiv 2606.22600): the further a response has drifted from the teacher, the less its later tokens teach.

paper: A_t = g_t d_t,  g_t = 1 + gamma (1 - sum_{k<t} |d_k| / sum_k |d_k|),  d_t = log p_T(y_t) - log p_S(y_t)
ours:  pulls = (weighted(pull(score(y)), g),), d of the student in training
"""

from collections.abc import Sequence

import numpy as np

import spot_async as spot
from spot_async.protocols import PromptStages


class IwOpd:
    class Settings(spot.PluginSettings):
        gamma: float = 0.5

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.gamma = settings.gamma
        self.needs = spot.PolicyNeeds(teacher_top_k=1, asked_top_k=0, outcomes=False)

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        y = (rollout := await stages.rollout()).token_ids
        scores, judgement = await spot.both(stages.score(y, top_k=0), stages.verify(y))
        return [spot.student_sample(prompt, stages, rollout, judgement, scores, pulls=(spot.pull(scores),))]

    def revise(self, batch: spot.LiveBatch) -> Sequence[spot.Sample]:
        samples = []
        for sample, live in zip(batch.samples, batch.live, strict=True):
            (pull,) = sample.supervision.pulls
            gaps = np.abs(spot.difference(pull, live))
            drift = (np.cumsum(gaps) - gaps) / max(gaps.sum(), 1e-8)
            weighted = spot.weighted(pull, 1 + self.gamma * (1 - drift))
            samples.append(spot.revised(sample, pulls=(weighted,)))
        return samples
