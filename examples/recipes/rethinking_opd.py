"""Rethinking OPD (arXiv 2604.13016): reverse KL on the tokens that the student itself finds likely.

paper: mean over t of sum_{v in S_t} p_S(v) log(p_S(v) / p_T(v)), S_t the student's top-k at t
ours:  soft_targets(positions, S, teacher_candidates(y, positions, S), 1 / T, reverse_kl()): with all other tokens as
       one more cell. Without it the minimum is p_T / e, and the student loses mass on what it knows.
"""

from collections.abc import Sequence

import numpy as np

import spot_async as spot
from spot_async.protocols import PromptStages


class RethinkingOpd:
    class Settings(spot.PluginSettings):
        top_k: int = 16

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.settings, self.limit = settings, context.vocab_limit
        k, size = settings.top_k, spot.row_bytes(settings.top_k)
        self.needs = spot.PolicyNeeds(
            rollout_top_k=k,
            teacher_top_k_key="top_k",
            teacher_candidates=True,
            outcomes=False,
            term_bytes_per_token=size,
        )

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        rollout = await stages.rollout(top_k=self.settings.top_k)
        y = rollout.token_ids
        likely, _ = spot.common_candidates(rollout.topk_ids, rollout.topk_logprobs, self.limit)
        positions = np.arange(len(y), dtype=np.int32)
        asked = stages.teacher_candidates(y, positions, likely)
        logprobs, judgement = await spot.both(asked, stages.verify(y))
        targets = spot.soft_targets(positions, likely, logprobs, np.full(len(y), 1 / len(y)), spot.reverse_kl())
        return [spot.student_sample(prompt, stages, rollout, judgement, soft_targets=(targets,))]
