"""`forward_kl_topk_tail`, proposed for verl: forward KL on the teacher's top-k, and on all other tokens as one.

verl: mean over t of sum_{v in top-k} p_T(v) log(p_T(v) / p_S(v)) + (1 - P) log((1 - P) / (1 - Q)), P and Q the sums
      of p_T and p_S over the top-k
ours: compared(score(y), forward_kl())
"""

from collections.abc import Sequence

import spot_async as spot
from spot_async.protocols import PromptStages


class ForwardKlTail:
    class Settings(spot.PluginSettings):
        top_k: int = 16

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.settings = settings
        self.needs = spot.PolicyNeeds(
            teacher_top_k=settings.top_k,
            teacher_top_k_key="top_k",
            outcomes=False,
            term_bytes_per_token=spot.row_bytes(settings.top_k),
        )

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        rollout = await stages.rollout()
        y = rollout.token_ids
        scores, judgement = await spot.both(stages.score(y, top_k=self.settings.top_k), stages.verify(y))
        targets = spot.compared(scores, spot.forward_kl())
        return [spot.student_sample(prompt, stages, rollout, judgement, scores, soft_targets=(targets,))]
