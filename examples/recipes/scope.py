"""SCOPE (arXiv 2604.10688): likelihood where the student was right, the teacher where it was not.

paper: right y: -PPL_S(y) mean over t of log p_S(y_t);  wrong y: OPD weighted by 1 / PPL_T(y), PPL the perplexity
ours:  right: written(y, exp(-mean log p_S)), of the student in training;  wrong: pull(score(y), exp(mean log p_T)). The
       paper also normalises the weights in a prompt's group; here each response is by itself.
"""

from collections.abc import Sequence

import numpy as np

import spot_async as spot
from spot_async.protocols import PromptStages


class Scope:
    Settings = spot.PluginSettings

    def __init__(self, settings: Settings, context: spot.PolicyContext) -> None:
        self.needs = spot.PolicyNeeds(teacher_top_k=1, asked_top_k=0, term_bytes_per_token=spot.row_bytes(1))

    async def supervise(self, prompt: spot.Prompt, stages: PromptStages) -> Sequence[spot.Sample]:
        y = (rollout := await stages.rollout()).token_ids
        scores, judgement = await spot.both(stages.score(y, top_k=0), stages.verify(y))
        if judgement.verdict is spot.Verdict.CORRECT:
            likelihood = (spot.written(rollout),)
            return [spot.student_sample(prompt, stages, rollout, judgement, scores, soft_targets=likelihood)]
        if judgement.verdict.reward is None:  # neither right nor wrong
            left = spot.student_sample(prompt, stages, rollout, judgement, scores)
            record = left.record | {"left_out": f"verifier: {judgement.verdict}"}
            return [spot.Sample(supervision=None, metrics=left.metrics, record=record)]
        known = scores.logprobs[scores.known]
        pull = spot.pull(scores, np.exp(known.sum() / max(1, len(known))))
        return [spot.student_sample(prompt, stages, rollout, judgement, scores, pulls=(pull,))]

    def revise(self, batch: spot.LiveBatch) -> Sequence[spot.Sample]:
        weights = [np.exp(-np.nanmean(live.logprobs)) for live in batch.live]
        drafts = [sample.supervision.soft_targets for sample in batch.samples]
        targets = [tuple(spot.weighted(each, w) for each in own) for own, w in zip(drafts, weights, strict=True)]
        return [spot.revised(s, soft_targets=own) for s, own in zip(batch.samples, targets, strict=True)]
