"""Knowledge distillation, off-policy: the student learns from what the teacher writes.

The teacher writes one response per problem, which is reused in every epoch. The loss at each position is cross-entropy
on the written token plus forward KL to the teacher, renormalised on its top-k (docs/methods.md). There is no policy
term: everything is soft targets.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Self

import numpy as np
from pydantic import Field, model_validator

from spot_async.base.tasks import both
from spot_async.config import PluginSettings, PositiveInt
from spot_async.errors import ConfigError, DataError, PermanentError
from spot_async.models.responses import foreign
from spot_async.protocols import PromptStages
from spot_async.terms import compared, forward_kl, on_policy, row_bytes, written
from spot_async.types import (
    Generation,
    PolicyContext,
    PolicyNeeds,
    Prompt,
    Sample,
    SoftTargets,
    TokenScores,
)

from .samples import response_record, teacher_metrics, teacher_record
from .teacher_responses import ResponseFile, TeacherResponse


class KdSettings(PluginSettings):
    kind: str = "kd"
    top_k: PositiveInt = Field(16, description="teacher candidates of the forward KL")
    forward_kl_weight: Annotated[float, Field(ge=0, le=1)] = Field(
        0.5,
        description="weight of the forward KL; cross-entropy on the teacher's tokens has the rest. With 0 the teacher "
        "is asked for no log-probabilities",
    )
    save: str | None = Field(
        None,
        description="file to write the teacher's responses and scores to; continues the file of a run with the same "
        "settings",
    )
    load: str | None = Field(None, description="file written by `save`: train from it, without a teacher")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.save is not None and self.load is not None:
            raise ValueError("give only one of save and load: a loaded file is complete")
        return self


class KdPolicy:
    """KD for one prompt at a time. It remembers each problem's response for later epochs."""

    Settings = KdSettings

    def __init__(self, settings: KdSettings, context: PolicyContext) -> None:
        self.settings = settings
        self._top_k = settings.top_k if settings.forward_kl_weight > 0 else 0  # 0: cross-entropy alone, no scores
        self._responses: dict[str, TeacherResponse] = {}  # by problem, with the teacher's end token
        # Epochs may overlap. The lock of a problem keeps a second epoch from asking for its response again.
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._file: ResponseFile | None = None
        if settings.load is not None:
            self._responses = ResponseFile(Path(settings.load), context, self._top_k).read()
        elif settings.save is not None:
            self._file, self._responses = ResponseFile.to_save(Path(settings.save), context, self._top_k)
        asks_teacher = settings.load is None
        self.needs = PolicyNeeds(
            teacher_top_k=self._top_k if asks_teacher else 0,
            teacher_top_k_key="top_k",
            rollouts_per_prompt=0,
            teacher_responses=int(asks_teacher),
            outcomes=False,
            term_bytes_per_token=row_bytes(1) + row_bytes(self._top_k),
        )

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Refuse a loaded file without a response to a scheduled problem, and any file written for other prompts."""
        if not self._responses and self.settings.load is None:
            return
        scheduled = {prompt.problem.id: prompt for prompt in prompts}
        missing = [problem_id for problem_id in scheduled if problem_id not in self._responses]
        if missing and self.settings.load is not None:
            raise ConfigError(
                f"policy.load: {self.settings.load} has no response to {len(missing)} of {len(scheduled)} scheduled "
                f"problems, the first is {missing[0]!r}; leave them out of data.train or load a complete file"
            )
        for problem_id, prompt in scheduled.items():
            if problem_id in self._responses:
                self._check_rendering(prompt, self._responses[problem_id])

    async def supervise(self, prompt: Prompt, stages: PromptStages) -> Sequence[Sample]:
        async with self._turns[prompt.problem.id]:
            taught = self._responses.get(prompt.problem.id) or await self._ask_teacher(prompt, stages)
        self._check_rendering(prompt, taught)
        return [self._sample(prompt, stages, taught)]

    def _check_rendering(self, prompt: Prompt, taught: TeacherResponse) -> None:
        if not np.array_equal(taught.prompt_ids, prompt.read_by_teacher):
            key, path = ("load", self.settings.load) if self.settings.load is not None else ("save", self.settings.save)
            raise DataError(
                f"policy.{key}: problem {prompt.problem.id!r} was rendered differently when {path} was written; use "
                "the same prompt section and template"
            )

    async def _ask_teacher(self, prompt: Prompt, stages: PromptStages) -> TeacherResponse:
        if self.settings.load is not None:
            raise PermanentError(f"policy.load: {self.settings.load} has no response to problem {prompt.problem.id!r}")
        response = await stages.teacher_response()
        scores, judgement = await both(self._score(response, stages), stages.verify(response.token_ids))
        given = TeacherResponse(
            problem_id=prompt.problem.id,
            prompt_ids=prompt.read_by_teacher,
            end_token_id=stages.ends.theirs,
            response=response,
            scores=scores,
            verdict=judgement,
        )
        taught = given.respelled(stages.ends.ours)
        self._responses[prompt.problem.id] = taught
        if self._file is not None:
            self._file.append(taught)
        return taught

    async def _score(self, response: Generation, stages: PromptStages) -> TokenScores | None:
        return await stages.score(response.token_ids, top_k=self._top_k) if self._top_k else None

    def _sample(self, prompt: Prompt, stages: PromptStages, taught: TeacherResponse) -> Sample:
        taught = taught.respelled(stages.ends.ours)
        response, scores = taught.response, taught.scores
        metrics = {
            "teacher/tokens": float(len(response.token_ids)),
            "teacher/truncated": float(response.finish_reason == "length"),
            **(teacher_metrics(scores) if scores is not None else {}),
        }
        verdict = taught.judgement.verdict
        if verdict.reward is not None:
            metrics["teacher/accuracy"] = verdict.reward
        return Sample(
            supervision=on_policy(prompt, foreign(response), soft_targets=self._terms(taught)),
            metrics=metrics,
            record=response_record(prompt, stages, response, taught.judgement)
            | (teacher_record(scores) if scores is not None else {}),
        )

    def _terms(self, taught: TeacherResponse) -> tuple[SoftTargets, ...]:
        """Return `(1 - w)` of the cross-entropy at each position, and w of the forward KL where there are scores."""
        share, scores, response_ids = self.settings.forward_kl_weight, taught.scores, taught.response.token_ids
        likelihood = written(response_ids, 1 - share)
        if scores is None or not self._top_k:
            return (likelihood,)
        return likelihood, compared(scores, forward_kl(), top_k=self._top_k, weight=share, has_tail=False)
