"""Distillation by keys: one pull towards the teacher, one divergence from it, and a reward, each with its weight.

It only composes terms (`spot_async/terms.py`). What the keys cannot say is a policy of 10 to 40 lines
(examples/recipes). docs/methods.md lists the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from spot_async.base.seeds import derive_seed
from spot_async.base.tasks import both, gather
from spot_async.config import NonNegativeFloat, PositiveFloat, PositiveInt, RoutedSettings
from spot_async.models.common_vocabulary import common_candidates
from spot_async.models.responses import counted_tokens, foreign, sampled_tokens
from spot_async.protocols import PromptStages
from spot_async.terms import (
    compared,
    forward_kl,
    jsd,
    reverse_kl,
    reverse_skew,
    row_bytes,
    skew,
    soft_targets,
)
from spot_async.types import (
    Divergence,
    FloatArray,
    Generation,
    Judgement,
    PolicyContext,
    PolicyNeeds,
    Prompt,
    Sample,
    SoftTargets,
)

from .grpo import group_advantages
from .samples import Scores, pulls, scored, student_sample, writer

DIVERGENCES: dict[str, Callable[..., Divergence]] = {
    "forward_kl": lambda beta, **how: forward_kl(**how),
    "reverse_kl": lambda beta, **how: reverse_kl(**how),
    "jsd": jsd,
    "skew": skew,
    "reverse_skew": reverse_skew,
}
# What other programs' losses are in these keys; docs/coming-from.md says how far, and of which functions and versions.
PRESETS: dict[str, dict[str, Any]] = {
    "gkd@trl": {
        "divergence": "jsd",
        "beta": 0.5,
        "support": "whole",
        "tail": "conditional",
        "student_share": 0.5,
        "written_by": "data",
    },
    "opd@verl": {"pull": 1.0},
    "opd@prime-rl": {"pull": 1.0},
    "opsd@ms-swift": {"divergence": "jsd", "beta": 0.5, "support": "whole", "tail": "conditional"},
}


class DistillSettings(RoutedSettings):
    """Settings. Keys that a preset gives may be given beside it, and then count."""

    kind: str = "distill"
    preset: Literal["gkd@trl", "opd@verl", "opd@prime-rl", "opsd@ms-swift"] | None = Field(
        None,
        description="the keys below as another program has them; those given beside it count. All four have "
        "`training.loss_aggregation: token_mean`. TRL has `sampling.temperature: 0.9` with `temperature: 1.111`, verl "
        "`training.clip: 0.2` and `dual_clip: 3`, prime-rl no clip, ms-swift `sampling.temperature: 1.2`; see "
        "docs/coming-from.md",
    )
    pull: float | None = Field(
        None,
        description="weight of `log pi_T - log pi_old` in each sampled token's advantage; default: 1, or 0 with a "
        "`divergence`",
    )
    pull_clip: Annotated[list[float], Field(min_length=2, max_length=2)] | None = Field(
        None, description="least and most of that difference, in nats, before its weight; `.inf` for none"
    )
    divergence: Literal["forward_kl", "reverse_kl", "jsd", "skew", "reverse_skew"] | None = Field(
        None, description="of the student from the teacher at each token; default: none"
    )
    weight: NonNegativeFloat = Field(1.0, description="weight of the divergence's mean over a response's tokens")
    beta: float = Field(
        0.5, gt=0, lt=1, description="of `jsd`: the teacher's share; of `skew` and `reverse_skew`: their alpha"
    )
    support: Literal["teacher", "student", "whole"] = Field(
        "teacher",
        description="the tokens that are compared: the teacher's top-k, the student's top-k as it sampled, or all",
    )
    top_k: PositiveInt = Field(16, description="how many tokens `support` has, unless it is `whole`")
    tail: bool | Literal["conditional"] = Field(
        True,
        description="true: all other tokens together are compared too; false: the teacher is renormalised, which "
        "teaches that there are no others; `conditional`: both are renormalised, so others are left alone",
    )
    clip: PositiveFloat | None = Field(
        None, description="the most that a cell, a token or the tail, adds to the divergence, in nats"
    )
    temperature: PositiveFloat = Field(1.0, description="of both distributions, beside `sampling.temperature`")
    samples: PositiveInt = Field(1, description="responses per prompt")
    reward: NonNegativeFloat = Field(0.0, description="weight of GRPO's advantage, over the prompt's responses")
    student_share: float = Field(1.0, ge=0, le=1, description="share of responses that the student writes")
    written_by: Literal["teacher", "data"] = Field(
        "teacher", description="who writes the others; `data`: `data.train.fields.response`"
    )

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, given: Any) -> Any:
        preset = PRESETS.get(given.get("preset") or "", {}) if isinstance(given, dict) else {}
        return {**preset, **given} if preset else given

    def _check(self) -> None:
        if self.reward and self.samples < 2:
            raise ValueError(f"reward={self.reward:g} compares a prompt's responses: set samples to 2 or more")
        if self.divergence is None and not self.pull_weight and not self.reward:
            raise ValueError("nothing would be learnt: give a divergence, a pull or a reward")
        if self.student_share < 1 and self.divergence is None:
            raise ValueError(
                f"student_share={self.student_share:g}: tokens of others have no pull and no reward, so only a "
                "divergence can teach them: set divergence"
            )
        if self.divergence == "reverse_kl" and self.tail is False:
            raise ValueError(
                "divergence=reverse_kl with tail=false is infinite, since the student has other tokens too: set "
                "tail=true or tail=conditional"
            )
        if self.temperature != 1 and (self.support != "whole" or self.tail != "conditional"):
            raise ValueError(
                f"temperature={self.temperature:g} is exact over the whole vocabulary only: set support=whole and "
                "tail=conditional, or sampling.temperature, which is of all log-probabilities"
            )

    @property
    def pull_weight(self) -> float:
        return float(self.divergence is None) if self.pull is None else self.pull


@dataclass(frozen=True)
class Attempt:
    """One response of a prompt, and what was found out about it."""

    response: Generation
    scores: Scores  # by teacher; empty where none is asked
    rows: tuple[SoftTargets, ...]
    judgement: Judgement
    reference_logprobs: FloatArray | None  # (T,) for `training.reference_kl`


class DistillPolicy:
    """Distillation by keys, for one prompt at a time."""

    Settings = DistillSettings

    def __init__(self, settings: DistillSettings, context: PolicyContext) -> None:
        self.settings = settings
        self._run_seed, self._vocab_limit = context.run_seed, context.vocab_limit
        self._k = (context.vocab_limit or context.vocab_size) if settings.support == "whole" else settings.top_k
        self._is_compared = settings.divergence is not None and settings.weight > 0
        others, of_student = settings.student_share < 1, self._is_compared and settings.support == "student"
        self.needs = PolicyNeeds(
            teacher_top_k=(self._k if self._is_compared else 1) if self._is_compared or settings.pull_weight else 0,
            asked_top_k=self._k if self._is_compared else 0,
            teacher_top_k_key="support" if settings.support == "whole" else "top_k",
            renormalised_rows=self._is_compared and settings.tail is not True,
            whole_softmax_key="temperature" if self._is_compared and settings.temperature != 1 else None,
            teacher_candidates=of_student,
            rollout_top_k=self._k if of_student else 0,
            teacher_responses=settings.samples if others and settings.written_by == "teacher" else 0,
            written_responses=others and settings.written_by == "data",
            reference=context.reference_kl,
            samples_per_prompt=settings.samples,
            rounds=2 if of_student else 1,
            outcomes=settings.reward > 0,
            teachers=context.teachers,
            term_bytes_per_token=row_bytes(self._k) * self._is_compared * max(1, len(context.teachers))
            + 4 * (settings.reward > 0),
        )

    async def supervise(self, prompt: Prompt, stages: PromptStages) -> Sequence[Sample]:
        attempts = await gather(self._attempt(n, prompt, stages) for n in range(self.settings.samples))
        rewards = [each.judgement.reward for each in attempts]
        samples = []
        for n, (each, advantage) in enumerate(zip(attempts, group_advantages(rewards), strict=True)):
            samples.append(self._sample(prompt, stages, each, advantage))
            if self.settings.reward:
                of_group = {"sample": n, "reward": rewards[n], "advantage": round(advantage, 6)}
                samples[-1].record.update(of_group, group_rewards=rewards)
        return samples

    async def _attempt(self, n: int, prompt: Prompt, stages: PromptStages) -> Attempt:
        response = await self._response(n, prompt, stages)
        (scores, rows), judgement = await both(self._compared(response, stages), stages.verify(response.token_ids))
        reference = await stages.reference_logprobs(response.token_ids) if self.needs.reference else None
        return Attempt(response, scores, rows, judgement, reference)

    async def _response(self, n: int, prompt: Prompt, stages: PromptStages) -> Generation:
        coin = np.random.default_rng(derive_seed(self._run_seed, prompt.ordinal, "who writes", n))
        if coin.random() < self.settings.student_share:
            return await stages.rollout(n=n, top_k=self.needs.rollout_top_k)
        if self.settings.written_by == "data":
            return stages.written_response()
        name = writer(prompt, stages, self._run_seed, n)
        return foreign(await stages.teacher_response(n=n, teacher=name))

    async def _compared(self, response: Generation, stages: PromptStages) -> tuple[Scores, tuple[SoftTargets, ...]]:
        """Return the teachers' scores of a response, and the rows that compare their distributions."""
        if not self.needs.teacher_top_k:
            return {}, ()
        scores = await scored(stages, response.token_ids, top_k=self._k if self._is_compared else 0)
        if not self._is_compared:
            return scores, ()
        if self.needs.rollout_top_k and sampled_tokens(response).any():
            rows = await gather(self._on_students(response, name, stages) for name in stages.teachers)
            return scores, tuple(rows)
        has_tail, weight = self.settings.tail is True, self.settings.weight
        return scores, tuple(
            compared(scores[name], self._divergence, top_k=self._k, weight=weight * share, has_tail=has_tail)
            for name, share in stages.teachers.items()
        )

    async def _on_students(self, response: Generation, teacher: str, stages: PromptStages) -> SoftTargets:
        """Return the rows that compare a teacher with the student on the student's own top-k."""
        assert response.topk_ids is not None
        assert response.topk_logprobs is not None
        positions = np.flatnonzero(counted_tokens(response)).astype(np.int32)
        students = response.topk_ids[positions], response.topk_logprobs[positions]
        ids, _ = common_candidates(*students, self._vocab_limit)
        logprobs = await stages.teacher_candidates(response.token_ids, positions, ids, teacher=teacher)
        weights = np.full(len(positions), self.settings.weight * stages.teachers[teacher] / len(positions))
        return soft_targets(positions, ids, logprobs, weights, self._divergence, has_tail=self.settings.tail is True)

    @property
    def _divergence(self) -> Divergence:
        settings = self.settings
        assert settings.divergence is not None
        return DIVERGENCES[settings.divergence](
            settings.beta,
            clip=settings.clip,
            is_conditional=settings.tail == "conditional",
            temperature=settings.temperature,
        )

    def _sample(self, prompt: Prompt, stages: PromptStages, attempt: Attempt, advantage: float) -> Sample:
        settings, response, scores = self.settings, attempt.response, attempt.scores
        terms: dict[str, Any] = {"soft_targets": attempt.rows, "reference_logprobs": attempt.reference_logprobs}
        if scores and settings.pull_weight:
            clip = None if settings.pull_clip is None else (settings.pull_clip[0], settings.pull_clip[1])
            terms["pulls"] = pulls(stages, scores, settings.pull_weight, clip=clip)
        else:
            terms["policy_mask"] = None  # what only a divergence or a reward teaches
        if settings.reward:
            given = settings.reward * advantage
            terms["advantages"] = np.full(len(response.token_ids), given, dtype=np.float32)
        return student_sample(prompt, stages, response, attempt.judgement, scores, **terms)
