"""Knowledge distillation, off-policy: the student learns from what the teacher writes.

The teacher writes one response per problem, which is reused in every epoch. Where a prompt has several teachers, one
that is drawn by their shares writes it, and all score it. The loss at each position is cross-entropy on the written
token plus forward KL to each teacher, renormalised on its top-k (docs/methods.md). There is no policy term: everything
is soft targets.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated

import msgspec
from pydantic import Field

from spot_async.base.tasks import both
from spot_async.config import PositiveInt, RoutedSettings, teacher_area
from spot_async.models.responses import counted_tokens, foreign
from spot_async.protocols import PromptStages
from spot_async.terms import compared, forward_kl, on_policy, row_bytes, written
from spot_async.types import (
    Generation,
    Judgement,
    PolicyContext,
    PolicyNeeds,
    Prompt,
    Sample,
    SoftTargets,
    TokenScores,
)

from .samples import response_record, scored, teacher_metrics, teacher_record, writer


class Taught(msgspec.Struct, frozen=True):
    """What a teacher wrote for one problem, how the teachers score its tokens, and what the verifier says."""

    writer: str  # the teacher's name
    response: Generation
    scores: dict[str, TokenScores]  # by teacher; empty when no log-probabilities are asked for
    judgement: Judgement


class KdPolicy:
    """KD for one prompt at a time. It remembers each problem's response for later epochs."""

    class Settings(RoutedSettings):
        kind: str = "kd"
        top_k: PositiveInt = Field(16, description="teacher candidates of the forward KL")
        forward_kl_weight: Annotated[float, Field(ge=0, le=1)] = Field(
            0.5,
            description="weight of the forward KL; cross-entropy on the teacher's tokens has the rest. With 0 the "
            "teacher is asked for no log-probabilities",
        )

    def __init__(self, settings: Settings, context: PolicyContext) -> None:
        self.settings = settings
        self._top_k = settings.top_k if settings.forward_kl_weight > 0 else 0  # 0: cross-entropy alone, no scores
        self._run_seed = context.run_seed
        self._taught: dict[str, Taught] = {}  # by problem
        # Epochs may overlap. The lock of a problem keeps a second epoch from asking for its response again.
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.needs = PolicyNeeds(
            teacher_top_k=self._top_k,
            teacher_top_k_key="top_k",
            renormalised_rows=self._top_k > 0,
            rollouts_per_prompt=0,
            teacher_responses=1,
            outcomes=False,
            teachers=context.teachers,
            term_bytes_per_token=row_bytes(1) + row_bytes(self._top_k) * max(1, len(context.teachers)),
        )

    async def supervise(self, prompt: Prompt, stages: PromptStages) -> Sequence[Sample]:
        async with self._turns[prompt.problem.id]:
            taught = self._taught.get(prompt.problem.id)
            if taught is None:
                taught = self._taught[prompt.problem.id] = await self._ask_teachers(prompt, stages)
        return [self._sample(prompt, stages, taught)]

    async def _ask_teachers(self, prompt: Prompt, stages: PromptStages) -> Taught:
        name = writer(prompt, stages, self._run_seed)
        response = await stages.teacher_response(teacher=name)
        scores, judgement = await both(self._scores(response, stages), stages.verify(response.token_ids))
        return Taught(name, response, scores, judgement)

    async def _scores(self, response: Generation, stages: PromptStages) -> dict[str, TokenScores]:
        return await scored(stages, response.token_ids, top_k=self._top_k) if self._top_k else {}

    def _sample(self, prompt: Prompt, stages: PromptStages, taught: Taught) -> Sample:
        response, area = taught.response, teacher_area(taught.writer)
        metrics = {
            f"{area}/tokens": float(counted_tokens(response).sum()),
            f"{area}/truncated": float(response.finish_reason == "length"),
            **teacher_metrics(taught.scores),
        }
        verdict = taught.judgement.verdict
        if verdict.reward is not None:
            metrics[f"{area}/accuracy"] = verdict.reward
        record = response_record(prompt, stages, response, taught.judgement) | teacher_record(taught.scores)
        if not len(response.token_ids):  # as where it begins with a special token that the student does not have
            record["left_out"] = "nothing of the teacher's response is in the student's tokens"
            return Sample(supervision=None, metrics=metrics, record=record)
        supervision = on_policy(prompt, foreign(response), soft_targets=self._terms(taught, stages))
        return Sample(supervision=supervision, metrics=metrics, record=record)

    def _terms(self, taught: Taught, stages: PromptStages) -> tuple[SoftTargets, ...]:
        """Return `(1 - w)` of the cross-entropy at each position, and w of the forward KL where there are scores."""
        share, top_k = self.settings.forward_kl_weight, self._top_k
        forward = (
            compared(scores, forward_kl(), top_k=top_k, weight=share * stages.teachers[name], has_tail=False)
            for name, scores in taught.scores.items()
        )
        return written(taught.response, 1 - share), *forward
