"""TA-OPD (arXiv 2605.26844): OPD where the teacher corrects among tokens that the student holds for likely itself.

paper: OPD on the 5 % of positions with the highest D_t sum_{v in S_t} p_T(v), D_t a divergence, S_t the student's top-k
ours:  pull(score(y), sum over S_t of p_T >= mass), without D_t; S_t of the student in training, of the teacher's top_k
"""

from collections.abc import Sequence

import numpy as np

import spot_async as spot
from spot_async.protocols import PromptStages


class TaOpd:
    class Settings(spot.PluginSettings):
        top_k: int = 32  # tokens of the teacher, more than of the student
        candidates: int = 4  # the k of S_t
        mass: float = 0.9

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
            likely = np.argsort(-live.rows[0].logprobs, axis=1)[:, : self.settings.candidates]
            kept = np.zeros(len(live.where))
            kept[targets.positions] = np.take_along_axis(targets.probabilities, likely, 1).sum(1) >= self.settings.mass
            metrics = {"ta_opd/kept": float(kept.mean())}
            samples.append(spot.revised(sample, metrics, pulls=(spot.weighted(pull, kept),), soft_targets=()))
        return samples
