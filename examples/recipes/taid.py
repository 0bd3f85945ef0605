"""TAID (arXiv 2501.16937): a target that moves from the student's own distribution to the teacher's.

paper: KL(p_t || p_S),  p_t proportional to p_S^(1 - t) p_T^t, without a gradient,  t from t_0 to 1
ours:  retargeted(compared(score(y), forward_kl()), (1 - t) log p_S + t log p_T), p_S of the student in training and t
       by the iteration. The paper's t also adapts to the loss.
"""

from collections.abc import Sequence

import spot_async as spot
from spot_async.protocols import PromptStages


class Taid:
    class Settings(spot.PluginSettings):
        top_k: int = 16
        start: float = 0.4  # t_0

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.settings = settings
        rows = spot.row_bytes(settings.top_k)
        self.needs = spot.PolicyNeeds(teacher_top_k=settings.top_k, outcomes=False, term_bytes_per_token=rows)

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        rollout = await stages.rollout()
        y = rollout.token_ids
        scores, judgement = await spot.both(stages.score(y, top_k=self.settings.top_k), stages.verify(y))
        targets = spot.compared(scores, spot.forward_kl())
        return [spot.student_sample(prompt, stages, rollout, judgement, scores, soft_targets=(targets,))]

    def revise(self, batch: spot.LiveBatch) -> Sequence[spot.Sample]:
        t = self.settings.start + (1 - self.settings.start) * batch.progress
        samples = []
        for sample, live in zip(batch.samples, batch.live, strict=True):
            assert sample.supervision is not None
            (targets,) = sample.supervision.soft_targets
            log_p, log_q = spot.cells(targets, live.rows[0])
            moved = spot.retargeted(targets, (1 - t) * log_q + t * log_p)
            samples.append(spot.revised(sample, {"taid/t": t}, soft_targets=(moved,)))
        return samples
