"""On-policy distillation: the student's own tokens, judged one by one by the teacher.

A plain pull towards the teacher: the advantage of each sampled token is `log pi_T - log pi_old` (SPOT's without the
branch term).
"""

from __future__ import annotations

from collections.abc import Sequence

from spot_async.base.tasks import both
from spot_async.config import RoutedSettings
from spot_async.protocols import PromptStages
from spot_async.types import PolicyContext, PolicyNeeds, Prompt, Sample

from .samples import pulls, scored, student_sample


class OpdPolicy:
    """OPD as the paper runs it: the sampled-token form of its equation 1."""

    class Settings(RoutedSettings):
        kind: str = "opd"

    def __init__(self, settings: Settings, context: PolicyContext) -> None:
        self.needs = PolicyNeeds(teacher_top_k=1, asked_top_k=0, outcomes=False, teachers=context.teachers)

    async def supervise(self, prompt: Prompt, stages: PromptStages) -> Sequence[Sample]:
        rollout = await stages.rollout()
        scores, judgement = await both(scored(stages, rollout.token_ids, top_k=0), stages.verify(rollout.token_ids))
        return [student_sample(prompt, stages, rollout, judgement, scores, pulls=pulls(stages, scores))]
