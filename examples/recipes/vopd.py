"""vOPD (arXiv 2605.07865): OPD's advantage less its value, so that its noise is less.

paper: A_t = log p_T(y_t) - log p_S(y_t) - V_t,  V_t = sum_v p_S(v) (log p_T(v) - log p_S(v)), minus the reverse KL
ours:  pulls = (pull(score(y)),), advantages = -V of the student in training, on the cells of the teacher's top-k
"""

from collections.abc import Sequence

import numpy as np

import spot_async as spot
from spot_async.protocols import PromptStages


class Vopd:
    class Settings(spot.PluginSettings):
        top_k: int = 16

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.top_k = settings.top_k
        rows = spot.row_bytes(settings.top_k)
        self.needs = spot.PolicyNeeds(teacher_top_k=settings.top_k, outcomes=False, term_bytes_per_token=rows)

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        rollout = await stages.rollout()
        y = rollout.token_ids
        scores, judgement = await spot.both(stages.score(y, top_k=self.top_k), stages.verify(y))
        drafts = {"pulls": (spot.pull(scores),), "soft_targets": (spot.compared(scores, spot.reverse_kl()),)}
        return [spot.student_sample(prompt, stages, rollout, judgement, scores, **drafts)]

    def revise(self, batch: spot.LiveBatch) -> Sequence[spot.Sample]:
        samples = []
        for sample, live in zip(batch.samples, batch.live, strict=True):
            assert sample.supervision is not None
            (targets,), advantages = sample.supervision.soft_targets, np.zeros_like(live.logprobs)
            log_p, log_q = spot.cells(targets, live.rows[0])
            advantages[targets.positions] = (np.exp(log_q) * (log_q - log_p)).sum(axis=1)
            samples.append(spot.revised(sample, advantages=advantages, soft_targets=()))
        return samples
