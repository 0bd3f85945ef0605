"""OPD with its advantage compressed (arXiv 2607.13399), so that few tokens cannot outweigh a response, nor its length.

paper: A_t = sgn(d_t) log(1 + |d_t|),  d_t = log p_T(y_t) - log p_S(y_t);  or d_t clipped to [-c, c]
ours:  advantages = sign(d) log1p(|d|), d = difference(pull(score(y)), live) of the student in training. The clip needs
       no code: `policy: {kind: distill, pull_clip: [-c, c]}`
"""

from collections.abc import Sequence

import numpy as np

import spot_async as spot
from spot_async.protocols import PromptStages


class DemystifyingOpd:
    Settings = spot.PluginSettings

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.needs = spot.PolicyNeeds(teacher_top_k=1, asked_top_k=0, outcomes=False)

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        y = (rollout := await stages.rollout()).token_ids
        scores, judgement = await spot.both(stages.score(y, top_k=0), stages.verify(y))
        return [spot.student_sample(prompt, stages, rollout, judgement, scores, pulls=(spot.pull(scores),))]

    def revise(self, batch: spot.LiveBatch) -> Sequence[spot.Sample]:
        samples = []
        for sample, live in zip(batch.samples, batch.live, strict=True):
            (pull,) = sample.supervision.pulls
            d = spot.difference(pull, live)
            samples.append(spot.revised(sample, pulls=(), advantages=np.sign(d) * np.log1p(np.abs(d))))
        return samples
