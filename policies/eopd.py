"""Entropy-aware on-policy distillation: OPD, plus a forward KL where the teacher is uncertain.

At positions whose teacher entropy exceeds tau it adds the forward KL from the teacher, renormalised on its top-k, to
the student's full-vocabulary distribution (the paper's Eqs. (3) and (4)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from pydantic import Field

from spot_async.base.tasks import both
from spot_async.config import NonNegativeFloat, PositiveInt, RoutedSettings
from spot_async.models.responses import counted_tokens
from spot_async.protocols import PromptStages
from spot_async.terms import compared, forward_kl, row_bytes
from spot_async.types import BoolArray, PolicyContext, PolicyNeeds, Prompt, Sample, SoftTargets, TokenScores

from .samples import pulls, scored, student_sample
from .truncated.noise import of_entropy, split


class EopdPolicy:
    """EOPD for one prompt at a time."""

    class Settings(RoutedSettings):
        """Settings. Descriptions begin with the paper's symbols."""

        kind: str = "eopd"
        top_k: PositiveInt = Field(16, description="teacher candidates of the forward KL")
        alpha: NonNegativeFloat = Field(1.0, description="alpha: weight of the forward KL")
        tau_nats: NonNegativeFloat = Field(
            0.8, description="tau: teacher entropy, in nats, above which there is a forward KL"
        )

    def __init__(self, settings: Settings, context: PolicyContext) -> None:
        self.settings = settings
        self.needs = PolicyNeeds(
            teacher_top_k=settings.top_k,
            teacher_top_k_key="top_k",
            renormalised_rows=True,
            outcomes=False,
            teachers=context.teachers,
            term_bytes_per_token=row_bytes(settings.top_k) * max(1, len(context.teachers)),
        )

    async def supervise(self, prompt: Prompt, stages: PromptStages) -> Sequence[Sample]:
        rollout = await stages.rollout()
        scores, judgement = await both(
            scored(stages, rollout.token_ids, top_k=self.settings.top_k), stages.verify(rollout.token_ids)
        )
        rows = {name: self._forward(scores[name], share) for name, share in stages.teachers.items()}
        terms = {"pulls": pulls(stages, scores), "soft_targets": tuple(rows.values())}
        sample = student_sample(prompt, stages, rollout, judgement, scores, **terms)
        counted = counted_tokens(rollout)
        gated = {name: len(each.positions) / counted.sum() for name, each in rows.items()}
        unsure = {name: (each.known & self._uncertain(each, stages))[counted].mean() for name, each in scores.items()}
        for figure, values in (("gated", gated), ("uncertain", unsure)):
            mean = sum(share * values[name] for name, share in stages.teachers.items())
            sample.metrics[f"eopd/{figure}"] = float(mean)
        sample.record["gated_positions"] = np.unique(np.concatenate([each.positions for each in rows.values()]))
        return [sample]

    def _forward(self, scores: TokenScores, share: float) -> SoftTargets:
        """Return the forward KL from a teacher, where that one is uncertain."""
        gate = scores.known & (scores.entropy > self.settings.tau_nats)
        weight = self.settings.alpha * share
        return compared(scores, forward_kl(), top_k=self.settings.top_k, where=gate, weight=weight, has_tail=False)

    def _uncertain(self, scores: TokenScores, stages: PromptStages) -> BoolArray:
        """Return (T,) true where tau lies within the entropy's bounds, so that only their midpoint decides.

        The bounds are widened by the teacher's noise (see `truncated/noise.py`).
        """
        noise = stages.teacher.logprob_noise_nats if stages.teacher is not None else 0.0
        sure, spread = split(noise, len(scores.entropy))
        moved = of_entropy(scores.topk_logprobs, scores.entropy_lower, scores.entropy_upper, spread)
        tau, factor = self.settings.tau_nats, math.exp(sure)
        return (scores.entropy_lower / factor - moved <= tau) & (tau < scores.entropy_upper * factor + moved)
