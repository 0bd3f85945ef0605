"""Policies of unusual wishes: whose responses others write too, or whose teacher reads what they say."""

from __future__ import annotations

from collections.abc import Sequence

from spot_async.config import PluginSettings
from spot_async.models.responses import first_tokens, foreign, joined
from spot_async.policies.opd import OpdPolicy
from spot_async.policies.samples import (
    rollout_metrics,
    rollout_record,
    teacher_metrics,
)
from spot_async.protocols import PromptStages
from spot_async.terms import on_policy, pull, written
from spot_async.types import LiveBatch, PolicyContext, PolicyNeeds, Prompt, Sample


class TakesTurns:
    """The student writes three tokens of five that it was asked for, the teacher two, and the student the rest."""

    needs = PolicyNeeds(teacher_top_k=1, teacher_responses=1, rounds=2, outcomes=False)

    async def supervise(self, prompt: Prompt, stages: PromptStages) -> Sequence[Sample]:
        begun = first_tokens(await stages.rollout(max_tokens=5), 3)
        helped = joined(begun, foreign(await stages.teacher_response(prefix_ids=begun.token_ids, max_tokens=2)))
        response = joined(helped, await stages.rollout(prefix_ids=helped.token_ids))
        scores = await stages.score(response.token_ids, top_k=0)
        judgement = await stages.verify(response.token_ids)
        supervision = on_policy(prompt, response, pulls=(pull(scores),))
        metrics = rollout_metrics(response, judgement) | teacher_metrics({"": scores})
        return [
            Sample(supervision=supervision, metrics=metrics, record=rollout_record(prompt, stages, response, judgement))
        ]


class Reads:
    """Learns from the responses in the data, and asks no server."""

    class Settings(PluginSettings):
        kind: str

    needs = PolicyNeeds(written_responses=True, rollouts_per_prompt=0, outcomes=False)

    def __init__(self, settings: Settings | None = None, context: PolicyContext | None = None) -> None:
        """Ignore both: there is nothing to set."""

    async def supervise(self, prompt: Prompt, stages: PromptStages) -> Sequence[Sample]:
        response = stages.written_response()
        targets = (written(response.token_ids),)
        return [Sample(supervision=on_policy(prompt, response, soft_targets=targets), metrics={}, record={})]


class Hints:
    """Pulls towards a teacher that reads a prompt which the policy makes."""

    class Settings(PluginSettings):
        kind: str

    needs = PolicyNeeds(teacher_top_k=1, teacher_prompt_tokens=16, outcomes=False)

    def __init__(self, settings: Settings, context: PolicyContext) -> None:
        """Ignore both: there is nothing to set."""

    async def supervise(self, prompt: Prompt, stages: PromptStages) -> Sequence[Sample]:
        rollout, read = await stages.rollout(), stages.teacher_prompt("a hint")
        scores = await stages.score(rollout.token_ids, top_k=0, prompt_ids=read)
        return [Sample(supervision=on_policy(prompt, rollout, pulls=(pull(scores),)), metrics={}, record={})]


class Revises(OpdPolicy):
    """OPD that looks at the student in training, and changes nothing."""

    def revise(self, batch: LiveBatch) -> Sequence[Sample]:
        return batch.samples
