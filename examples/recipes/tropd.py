"""TrOPD's region of trust (arXiv 2606.01249): OPD where the teacher is near, forward KL where it is far.

paper: OPD on y_t with |log p_T(y_t) - log p_S(y_t)| <= delta; on the others forward KL, or nothing
ours:  weighted(pull(score(y)), near) and weighted(compared(score(y), forward_kl()), ~near), near by the student in
       training. Its guidance is in guided_prefix.py.
"""

from collections.abc import Sequence

import numpy as np

import spot_async as spot
from spot_async.protocols import PromptStages


class TrOpd:
    class Settings(spot.PluginSettings):
        top_k: int = 16
        delta: float = 2.0  # nats

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.settings, rows = settings, spot.row_bytes(settings.top_k)
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
            near = np.abs(spot.difference(pull, live)) <= self.settings.delta
            terms = {"pulls": (spot.weighted(pull, near),), "soft_targets": (spot.weighted(targets, ~near),)}
            samples.append(spot.revised(sample, {"tropd/near": float(near.mean())}, **terms))
        return samples
