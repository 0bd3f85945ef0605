"""TIP (arXiv 2604.14084): OPD on the tokens of a batch at which the student is least sure.

paper: OPD on the share of the batch's tokens with the highest student entropy
ours:  pulls = (pull(score(y), (H_S >= quantile of the batch) / share),), H_S of the student in training. The paper's
       other score, which adds tokens that a sure student has wrong, is not here.
"""

from collections.abc import Sequence

import numpy as np
from pydantic import Field

import spot_async as spot
from spot_async.protocols import PromptStages


class Tip:
    class Settings(spot.PluginSettings):
        share: float = Field(0.5, gt=0, le=1)

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.share = settings.share
        self.needs = spot.PolicyNeeds(teacher_top_k=1, asked_top_k=0, outcomes=False)

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        rollout = await stages.rollout()
        y = rollout.token_ids
        scores, judgement = await spot.both(stages.score(y, top_k=0), stages.verify(y))
        return [spot.student_sample(prompt, stages, rollout, judgement, scores, pulls=(spot.pull(scores),))]

    def revise(self, batch: spot.LiveBatch) -> Sequence[spot.Sample]:
        least = np.quantile(np.concatenate([live.entropy[live.where] for live in batch.live]), 1 - self.share)
        samples = []
        for sample, live in zip(batch.samples, batch.live, strict=True):
            assert sample.supervision is not None
            kept = live.entropy >= least  # false where it is NaN
            pulls = [spot.weighted(each, kept / self.share) for each in sample.supervision.pulls]
            samples.append(spot.revised(sample, {"tip/kept": float(kept[live.where].mean())}, pulls=tuple(pulls)))
        return samples
