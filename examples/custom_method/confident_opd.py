"""A method of your own, as a package: on-policy distillation that learns only where the teacher is sure."""

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from spot_async import PluginSettings, PolicyContext, PolicyNeeds, Prompt, Sample, Supervision, both
from spot_async.protocols import PromptStages


class ConfidentOpd:
    """OPD whose advantages are 0 where the teacher's entropy is above a limit."""

    class Settings(PluginSettings):
        max_entropy_nats: float = Field(0.5, gt=0, description="above it a token teaches nothing")

    def __init__(self, settings: Settings, context: PolicyContext) -> None:
        self.settings = settings
        self.needs = PolicyNeeds(teacher_top_k=1, exact_entropy=True)  # checked against the backends at start-up

    async def supervise(self, prompt: Prompt, stages: PromptStages) -> Sequence[Sample]:
        rollout = await stages.rollout()
        scores, judgement = await both(stages.score(rollout.token_ids, top_k=1), stages.verify(rollout.token_ids))
        # (T,) Where a teacher that reads text could not be asked, its numbers mean nothing.
        known = np.ones(len(rollout.token_ids), dtype=np.bool_) if scores.valid is None else scores.valid
        sure = known & (scores.entropy <= self.settings.max_entropy_nats)
        advantages = np.where(sure, scores.logprobs - rollout.logprobs, 0.0).astype(np.float32)
        supervision = Supervision(
            prompt_ordinal=prompt.ordinal,
            problem_id=prompt.problem.id,
            prompt_ids=prompt.token_ids,
            response_ids=rollout.token_ids,
            behavior_logprobs=rollout.logprobs,
            version=min(span.version for span in rollout.version_spans),
            version_spans=rollout.version_spans,
            advantages=advantages,
            policy_mask=scores.valid,
        )
        metrics = {
            "confident_opd/sure": float(sure.mean()),
            "teacher/masked": 1.0 - float(known.mean()),
            "rollout/tokens": float(len(rollout.token_ids)),
        }
        verdict = judgement.verdict
        if verdict.reward is not None:  # None: the verifier could not decide, which is no evidence
            metrics["rollout/accuracy"] = verdict.reward
        record = {"response": stages.decode(rollout.token_ids), "verdict": verdict.value}
        return [Sample(supervision=supervision, metrics=metrics, record=record)]
