"""Veto (arXiv 2601.07155): a forward KL to the teacher times a power of the student, which so can veto its tokens.

paper: KL(p_t || p_S),  p_t proportional to p_T p_S^b, without a gradient,  b falls linearly from beta to 0
ours:  retargeted(compared(score(y), forward_kl()), log p_T + b log p_S), p_S of the student in training
"""

from collections.abc import Sequence

from pydantic import Field

import spot_async as spot
from spot_async.protocols import PromptStages


class Veto:
    class Settings(spot.PluginSettings):
        top_k: int = 16
        beta: float = Field(0.8, ge=0)

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
        samples, b = [], self.settings.beta * (1 - batch.progress)
        for sample, live in zip(batch.samples, batch.live, strict=True):
            (targets,) = sample.supervision.soft_targets
            log_p, log_q = spot.cells(targets, live.rows[0])
            moved = spot.retargeted(targets, log_p + b * log_q)
            samples.append(spot.revised(sample, {"veto/b": b}, soft_targets=(moved,)))
        return samples
