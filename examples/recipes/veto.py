"""Veto, a forward KL to a geometric mean of teacher and student, which the student itself can veto.

paper: KL(p_t || p_S),  p_t proportional to p_T^beta p_S^(1 - beta), without a gradient, beta the same all along
ours:  retargeted(compared(score(y), forward_kl()), beta log p_T + (1 - beta) log p_S), p_S of the student in training
"""

from collections.abc import Sequence

from pydantic import Field

import spot_async as spot
from spot_async.protocols import PromptStages


class Veto:
    class Settings(spot.PluginSettings):
        top_k: int = 16
        beta: float = Field(0.5, gt=0, le=1)  # the teacher's share

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.settings, rows = settings, spot.row_bytes(settings.top_k)
        needs = {"teacher_top_k": settings.top_k, "teacher_top_k_key": "top_k", "term_bytes_per_token": rows}
        self.needs = spot.PolicyNeeds(outcomes=False, **needs)

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        y = (rollout := await stages.rollout()).token_ids
        scores, judgement = await spot.both(stages.score(y, top_k=self.settings.top_k), stages.verify(y))
        targets = spot.compared(scores, spot.forward_kl())
        return [spot.student_sample(prompt, stages, rollout, judgement, scores, soft_targets=(targets,))]

    def revise(self, batch: spot.LiveBatch) -> Sequence[spot.Sample]:
        samples, beta = [], self.settings.beta
        for sample, live in zip(batch.samples, batch.live, strict=True):
            (targets,) = sample.supervision.soft_targets
            log_p, log_q = spot.cells(targets, live.rows[0])
            moved = spot.retargeted(targets, beta * log_p + (1 - beta) * log_q)
            samples.append(spot.revised(sample, soft_targets=(moved,)))
        return samples
