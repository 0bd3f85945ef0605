"""Position-weighted OPSD (arXiv 2605.21606): OPSD that trusts the privileged teacher more, the later the token.

paper: mean over t of w_t D(p(. | x, y*, y_<t) || p(. | x, y_<t)), D OPSD's clipped forward KL, w_t increasing
ours:  compared(score(y), forward_kl(clip=0.05), weight=w), w_t a power of t whose mean is 1
"""

from collections.abc import Sequence

import numpy as np

import spot_async as spot
from spot_async.protocols import PromptStages


class PositionWeightedOpsd:
    class Settings(spot.PluginSettings):
        top_k: int = 32
        clip: float = 0.05
        power: float = 1.0  # 0: OPSD

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
        weights = np.arange(1, len(y) + 1) ** self.settings.power
        targets = spot.compared(scores, spot.forward_kl(clip=self.settings.clip), weight=weights / weights.mean())
        return [spot.student_sample(prompt, stages, rollout, judgement, scores, soft_targets=(targets,))]
