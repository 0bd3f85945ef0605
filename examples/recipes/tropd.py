"""TrOPD's region of trust (arXiv 2606.01249): OPD on tokens that the teacher would accept, forward KL on the others.

paper: OPD on y_t with probability min(1, p_T(y_t) / p_S(y_t)), as in speculative decoding; forward KL on the others
ours:  weighted(pull(score(y)), near) and weighted(compared(score(y), forward_kl()), ~near), near drawn by the student
       in training. Its guidance is in guided_prefix.py.
"""

import random
from collections.abc import Sequence

import numpy as np

import spot_async as spot
from spot_async.protocols import PromptStages


class TrOpd:
    class Settings(spot.PluginSettings):
        top_k: int = 16

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.settings, self.seed, rows = settings, context.run_seed, spot.row_bytes(settings.top_k)
        self.needs = spot.PolicyNeeds(teacher_top_k=settings.top_k, outcomes=False, term_bytes_per_token=rows)

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        y = (rollout := await stages.rollout()).token_ids
        scores, judgement = await spot.both(stages.score(y, top_k=self.settings.top_k), stages.verify(y))
        drafts = {"pulls": (spot.pull(scores),), "soft_targets": (spot.compared(scores, spot.forward_kl()),)}
        return [spot.student_sample(prompt, stages, rollout, judgement, scores, **drafts)]

    def revise(self, batch: spot.LiveBatch) -> Sequence[spot.Sample]:
        samples = []
        for sample, live in zip(batch.samples, batch.live, strict=True):
            (targets,), (pull,) = sample.supervision.soft_targets, sample.supervision.pulls
            draw = random.Random(f"{self.seed} {batch.iteration} {sample.supervision.problem_id}")
            near = np.array([draw.random() for _ in live.where]) < np.exp(spot.difference(pull, live))
            terms = {"pulls": (spot.weighted(pull, near),), "soft_targets": (spot.weighted(targets, ~near),)}
            samples.append(spot.revised(sample, {"tropd/near": float(near.mean())}, **terms))
        return samples
