"""Rethinking OPD (arXiv 2604.13016): reverse KL on the tokens that the student itself finds likely.

paper: mean over t of sum_{v in S_t} p_S(v) log(p_S(v) / p_T(v)), S_t the student's top-k at t
ours:  soft_targets(all t, S, p_T, 1 / T, reverse_kl()), S now, of the likely ones when it wrote, a cell for others
"""

from collections.abc import Sequence

import numpy as np

import spot_async as spot
from spot_async.protocols import PromptStages


class RethinkingOpd:
    class Settings(spot.PluginSettings):
        top_k: int = 24  # tokens of the student about which the teacher is asked
        candidates: int = 16  # the k of S_t

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.asked, self.k, self.limit = settings.top_k, settings.candidates, context.vocab_limit
        needs = {"teacher_candidates": True, "outcomes": False, "term_bytes_per_token": spot.row_bytes(self.asked)}
        self.needs = spot.PolicyNeeds(rollout_top_k=self.asked, teacher_top_k_key="top_k", **needs)

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        y = (rollout := await stages.rollout(top_k=self.asked)).token_ids
        at, kl = np.flatnonzero(spot.counted_tokens(rollout)).astype(np.int32), spot.reverse_kl()
        likely, _ = spot.common_candidates(rollout.topk_ids[at], rollout.topk_logprobs[at], self.limit)
        logprobs, judgement = await spot.both(stages.teacher_candidates(y, at, likely), stages.verify(y))
        targets = spot.soft_targets(at, likely, logprobs, np.full(len(at), 1 / len(at)), kl)
        return [spot.student_sample(prompt, stages, rollout, judgement, soft_targets=(targets,))]

    def revise(self, batch: spot.LiveBatch) -> Sequence[spot.Sample]:
        def likeliest(sample: spot.Sample, live: spot.Live) -> spot.Sample:
            (asked,), order = sample.supervision.soft_targets, np.argsort(-live.rows[0].logprobs, axis=1)[:, : self.k]
            ids, p = (np.take_along_axis(each, order, axis=1) for each in (asked.token_ids, asked.probabilities))
            targets = spot.soft_targets(asked.positions, ids, np.log(p), asked.weights, asked.divergence)
            return spot.revised(sample, soft_targets=(targets,))

        return [*map(likeliest, batch.samples, batch.live)]
