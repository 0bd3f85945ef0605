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
from spot_async.config import NonNegativeFloat, PluginSettings, PositiveInt
from spot_async.protocols import PromptStages
from spot_async.types import BoolArray, Int64Array, PolicyContext, PolicyNeeds, Prompt, Sample, SoftTargets, TokenScores

from .samples import distillation_sample
from .targets import target_entropy, teacher_prior
from .truncated.noise import of_entropy, split


class EopdSettings(PluginSettings):
    """Settings. Descriptions begin with the paper's symbols."""

    kind: str = "eopd"
    top_k: PositiveInt = Field(16, description="teacher candidates of the forward KL")
    alpha: NonNegativeFloat = Field(1.0, description="alpha: weight of the forward KL")
    tau_nats: NonNegativeFloat = Field(
        0.8, description="tau: teacher entropy, in nats, above which there is a forward KL"
    )


class EopdPolicy:
    """EOPD for one prompt at a time."""

    Settings = EopdSettings

    def __init__(self, settings: EopdSettings, context: PolicyContext) -> None:
        self.settings = settings
        self.needs = PolicyNeeds(
            teacher_top_k=settings.top_k,
            teacher_top_k_key="top_k",
            outcomes=False,
            term_bytes_per_token=12 + 8 * settings.top_k,
        )

    async def supervise(self, prompt: Prompt, stages: PromptStages) -> Sequence[Sample]:
        rollout = await stages.rollout()
        scores, judgement = await both(
            stages.score(rollout.token_ids, top_k=self.settings.top_k), stages.verify(rollout.token_ids)
        )
        known = np.ones(len(scores.entropy), np.bool_) if scores.valid is None else scores.valid
        gated = np.flatnonzero(known & (scores.entropy > self.settings.tau_nats))
        targets = self._forward_kl(scores, gated)
        sample = distillation_sample(prompt, stages, rollout, scores, judgement, soft_targets=targets)
        sample.metrics["eopd/gated"] = len(gated) / len(scores.entropy)
        sample.metrics["eopd/uncertain"] = float((known & self._uncertain(scores, stages)).mean())
        sample.record["gated_positions"] = gated.astype(np.int32)
        return [sample]

    def _uncertain(self, scores: TokenScores, stages: PromptStages) -> BoolArray:
        """Return (T,) true where tau lies within the entropy's bounds, so that only their midpoint decides.

        The bounds are widened by the teacher's noise (see `truncated/noise.py`).
        """
        noise = stages.teacher.logprob_noise_nats if stages.teacher is not None else 0.0
        sure, spread = split(noise, len(scores.entropy))
        moved = of_entropy(scores.topk_logprobs, scores.entropy_lower, scores.entropy_upper, spread)
        tau, factor = self.settings.tau_nats, math.exp(sure)
        return (scores.entropy_lower / factor - moved <= tau) & (tau < scores.entropy_upper * factor + moved)

    def _forward_kl(self, scores: TokenScores, gated: Int64Array) -> SoftTargets:
        """Return the forward KL at the gated positions (N,), weighted alpha / T (the paper's Eqs. (3) and (4)).

        The method takes the mean over all T positions, but the trainer sums soft targets over a trajectory.
        """
        target = teacher_prior(scores.topk_logprobs[gated])  # (N, k)
        return SoftTargets(
            positions=gated.astype(np.int32),
            token_ids=scores.topk_ids[gated],
            probabilities=target.astype(np.float32),
            weights=np.full(len(gated), self.settings.alpha / len(scores.entropy), dtype=np.float32),
            offsets=-target_entropy(target).astype(np.float32),
        )
