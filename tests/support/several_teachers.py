"""A policy that asks several teachers by name, for tests of whatever a run has for each of them."""

from __future__ import annotations

from collections.abc import Sequence

from spot_async.base.tasks import gather
from spot_async.config import PluginSettings
from spot_async.policies.samples import student_sample
from spot_async.protocols import PromptStages
from spot_async.terms import pull
from spot_async.types import PolicyContext, PolicyNeeds, Prompt, Sample


class AsksAll:
    """Pulls towards the mean of all teachers that the run has, or towards those of `names`."""

    class Settings(PluginSettings):
        kind: str
        names: tuple[str, ...] = ()

    def __init__(self, settings: Settings, context: PolicyContext) -> None:
        self._names = settings.names or context.teachers
        self.needs = PolicyNeeds(teachers=self._names, teacher_top_k=1, term_bytes_per_token=16, outcomes=False)

    async def supervise(self, prompt: Prompt, stages: PromptStages) -> Sequence[Sample]:
        rollout = await stages.rollout()
        scores = await gather(stages.score(rollout.token_ids, top_k=0, teacher=name) for name in self._names)
        judgement = await stages.verify(rollout.token_ids)
        pulls = tuple(pull(each, 1 / len(scores)) for each in scores)
        return [student_sample(prompt, stages, rollout, judgement, scores[0], pulls=pulls)]
