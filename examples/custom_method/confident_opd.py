"""A method of your own, as a package: on-policy distillation that learns only where the teacher is sure."""

from collections.abc import Sequence

from pydantic import Field

from spot_async import PluginSettings, PolicyContext, PolicyNeeds, Prompt, Sample, both, pull, student_sample
from spot_async.protocols import PromptStages


class ConfidentOpd:
    """OPD in which the teacher pulls only where its entropy is below a limit."""

    class Settings(PluginSettings):
        max_entropy_nats: float = Field(0.5, gt=0, description="above it a token teaches nothing")

    def __init__(self, settings: Settings, context: PolicyContext) -> None:
        self.settings = settings
        self.needs = PolicyNeeds(teacher_top_k=1, exact_entropy=True)  # checked against the backends at start-up

    async def supervise(self, prompt: Prompt, stages: PromptStages) -> Sequence[Sample]:
        rollout = await stages.rollout()
        scores, judgement = await both(stages.score(rollout.token_ids, top_k=1), stages.verify(rollout.token_ids))
        sure = scores.entropy <= self.settings.max_entropy_nats  # (T,)
        sample = student_sample(prompt, stages, rollout, judgement, scores, pulls=(pull(scores, sure),))
        sample.metrics["confident_opd/sure"] = float((scores.known & sure).mean())
        return [sample]
