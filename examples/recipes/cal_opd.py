"""Cal-OPD (arXiv 2609.21619): OPD's advantage less what it would be, in the mean, for the teacher's own tokens.

paper: A_t = log p_T(y_t) - log p_S(y_t) - D_t,  D_t = sum_v p_T(v) (log p_T(v) - log p_S(v)), the teacher's deviation
ours:  pulls = (pull(score(y)),), advantages = -D of the student in training, on the cells of the teacher's top-k
"""

from collections.abc import Sequence

import numpy as np

import spot_async as spot
from spot_async.protocols import PromptStages


class CalOpd:
    class Settings(spot.PluginSettings):
        top_k: int = 16

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
            (targets,), advantages = sample.supervision.soft_targets, np.zeros_like(live.logprobs)
            log_p, log_q = spot.cells(targets, live.rows[0])
            advantages[targets.positions] = -(np.exp(log_p) * (log_p - log_q)).sum(axis=1)
            samples.append(spot.revised(sample, advantages=advantages, soft_targets=()))
        return samples
