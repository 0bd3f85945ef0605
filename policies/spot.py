"""SPOT: sparse probing and outcome calibration (Algorithm 1's inner loop).

Acquisition decides where to probe, exploration what each teacher candidate leads to when the student
carries on, exploitation tilts the teacher's prior by those outcomes. With `positions: 0` it is OPD.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from spot_async.concurrency import both, gather
from spot_async.config import NonNegativeFloat, PluginSettings, PositiveInt
from spot_async.protocols import PromptStages
from spot_async.types import (
    Generation,
    PolicyContext,
    PolicyNeeds,
    Prompt,
    Sample,
    SoftTargets,
    TokenScores,
    Verdict,
)

from .acquisition import PositionScores, ScoreVariant, probeable_tokens, score_positions, select_positions
from .distillation import distillation_sample, rounded
from .targets import calibrated_target

Lambda = Annotated[float, Field(ge=0, le=1)]


class SpotSettings(PluginSettings):
    """Keys carry the paper's symbols in their descriptions."""

    kind: Literal["spot"] = "spot"
    positions: int = Field(2, ge=0, description="M: positions probed per rollout")
    score_top_k: PositiveInt = Field(16, description="k_s: teacher candidates behind the acquisition score")
    probe_top_k: PositiveInt = Field(4, description="k_p: teacher candidates probed per position")
    probes: PositiveInt = Field(1, description="N_p: continuations per candidate")
    lambda_mass: Lambda = Field(0.5, description="weight of the student's missing mass in the gap G")
    lambda_shape: Lambda = Field(0.5, description="weight of the shape mismatch (JS) in the gap G")
    score_variant: ScoreVariant = Field("Full", description="acquisition score; the others are its ablations")
    gamma: NonNegativeFloat = Field(1.0, description="inverse temperature of the outcome tilt")
    beta: NonNegativeFloat = Field(0.1, description="weight of the branch loss")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.probe_top_k > self.score_top_k:
            raise ValueError(
                f"probe_top_k={self.probe_top_k} (k_p) must not exceed score_top_k={self.score_top_k} (k_s): "
                "candidates are taken from the scored ones"
            )
        if abs(self.lambda_mass + self.lambda_shape - 1.0) > 1e-9:
            raise ValueError(
                f"lambda_mass={self.lambda_mass} and lambda_shape={self.lambda_shape} must sum to 1: "
                f"set lambda_shape to {1 - self.lambda_mass:g}"
            )
        return self


@dataclass(frozen=True)
class Selection:
    """Where to probe, and the score of every eligible position (the rest are masked)."""

    positions: npt.NDArray[np.int64]  # (N,) response positions, ascending
    eligible: npt.NDArray[np.int64]  # (E,) response positions that were scored
    scores: PositionScores | None  # of the eligible positions; None when there were none
    student_logprobs: npt.NDArray[np.float32] | None = None  # (E, k_s) at the teacher's candidates


NOTHING_SELECTED = Selection(positions=np.zeros(0, np.int64), eligible=np.zeros(0, np.int64), scores=None)


@dataclass(frozen=True)
class Branch:
    """One probed position: the teacher's candidates, the prior, and what came of each candidate."""

    position: int
    candidate_ids: npt.NDArray[np.int32]  # (k_p,)
    teacher_logprobs: npt.NDArray[np.float32]  # (k_p,) full-vocabulary
    verdicts: list[list[Verdict]]  # k_p x N_p
    continuations: list[list[Generation]]  # k_p x N_p

    @cached_property
    def values(self) -> npt.NDArray[np.float64] | None:
        """(k_p,) mean reward of each candidate; None when a candidate has no evidence left."""
        means = []
        for verdicts in self.verdicts:
            rewards = outcome_rewards(verdicts)
            if not rewards:
                return None
            means.append(sum(rewards) / len(rewards))
        return np.array(means)

    @property
    def viable(self) -> bool:
        """Whether the position belongs to B+: some candidate has a positive value."""
        return self.values is not None and bool((self.values > 0).any())


def outcome_rewards(verdicts: Iterable[Verdict]) -> list[float]:
    """Rewards of the verdicts that are outcomes; missing evidence is left out."""
    return [reward for verdict in verdicts if (reward := verdict.reward) is not None]


class SpotPolicy:
    """Algorithm 1 for one prompt."""

    Settings = SpotSettings

    def __init__(self, settings: SpotSettings, context: PolicyContext) -> None:
        self.settings = settings
        probing = settings.positions > 0
        self._vocab_size = context.vocab_size
        self._probeable = probeable_tokens(context.tokenizer, context.vocab_size) if probing else None  # (V,)
        self.needs = PolicyNeeds(
            teacher_top_k=settings.score_top_k if probing else 1,
            exact_entropy=probing,
            candidate_logprobs=probing,
            probes_per_prompt=settings.positions * settings.probe_top_k * settings.probes,
            soft_target_bytes=settings.positions * (8 + 8 * settings.probe_top_k),
        )

    async def supervise(self, prompt: Prompt, stages: PromptStages) -> Sequence[Sample]:
        rollout = await stages.rollout()
        scores, verdict = await both(
            stages.score(rollout.token_ids, top_k=self.needs.teacher_top_k), stages.verify(rollout.token_ids)
        )
        selection = await self._acquire(rollout, scores, stages)
        branches = await gather(
            self._explore(rollout, scores, int(position), stages) for position in selection.positions
        )
        retained = [branch for branch in branches if branch.viable]  # B+
        targets = self._exploit(retained)
        return [
            distillation_sample(
                prompt,
                stages,
                rollout,
                scores,
                verdict,
                soft_targets=targets,
                metrics=self._metrics(selection, branches, targets),
                record=self._record(rollout, stages, selection, branches),
            )
        ]

    async def _acquire(self, rollout: Generation, scores: TokenScores, stages: PromptStages) -> Selection:
        """Where to probe: the top M of s = H C G over the eligible positions (equations 5 to 7)."""
        if self._probeable is None:
            return NOTHING_SELECTED
        eligible = np.flatnonzero(self._probeable[rollout.token_ids])
        if len(eligible) == 0:
            return NOTHING_SELECTED
        student_logprobs = await stages.candidate_logprobs(
            rollout.token_ids,
            eligible.astype(np.int32),
            scores.topk_ids[eligible],
            version=rollout.version_spans[0].version,
        )
        position_scores = score_positions(
            scores.topk_logprobs[eligible],
            student_logprobs,
            scores.entropy[eligible],
            self._vocab_size,
            lambda_mass=self.settings.lambda_mass,
            lambda_shape=self.settings.lambda_shape,
            variant=self.settings.score_variant,
        )
        valid = np.ones(len(eligible), dtype=np.bool_)
        selected = select_positions(position_scores.score, valid, self.settings.positions)
        return Selection(
            positions=eligible[selected], eligible=eligible, scores=position_scores, student_logprobs=student_logprobs
        )

    async def _explore(self, rollout: Generation, scores: TokenScores, position: int, stages: PromptStages) -> Branch:
        """What each of the teacher's top k_p candidates leads to (equation 8)."""
        k, n = self.settings.probe_top_k, self.settings.probes
        candidate_ids = scores.topk_ids[position, :k]

        async def outcome(candidate_id: int, n: int) -> tuple[Generation, Verdict]:
            continuation = await stages.probe(rollout.token_ids, position, candidate_id, n=n)
            branch_ids = np.concatenate(
                [rollout.token_ids[:position], np.array([candidate_id]), continuation.token_ids], dtype=np.int32
            )
            return continuation, await stages.verify(branch_ids)

        outcomes = await gather(outcome(int(candidate), i) for candidate in candidate_ids for i in range(n))
        return Branch(
            position=position,
            candidate_ids=candidate_ids,
            teacher_logprobs=scores.topk_logprobs[position, :k],
            verdicts=[[verdict for _, verdict in outcomes[c * n : (c + 1) * n]] for c in range(len(candidate_ids))],
            continuations=[[text for text, _ in outcomes[c * n : (c + 1) * n]] for c in range(len(candidate_ids))],
        )

    def _exploit(self, retained: Sequence[Branch]) -> SoftTargets | None:
        """What to distil: outcome-calibrated targets, weighted beta / |B+| (equations 10 and 12)."""
        if not retained:
            return None
        return SoftTargets(
            positions=np.array([branch.position for branch in retained], dtype=np.int32),
            token_ids=np.stack([branch.candidate_ids for branch in retained]).astype(np.int32),
            probabilities=np.stack([self._target(branch) for branch in retained]).astype(np.float32),
            weights=np.full(len(retained), self.settings.beta / len(retained), dtype=np.float32),
        )

    def _target(self, branch: Branch, gamma: float | None = None) -> npt.NDArray[np.float64]:
        values = branch.values
        assert values is not None
        return calibrated_target(branch.teacher_logprobs, values, self.settings.gamma if gamma is None else gamma)

    def _metrics(
        self, selection: Selection, branches: Sequence[Branch], targets: SoftTargets | None
    ) -> dict[str, float]:
        probes = [continuation for branch in branches for each in branch.continuations for continuation in each]
        verdicts = [verdict for branch in branches for each in branch.verdicts for verdict in each]
        metrics = {
            "spot/selected": float(len(selection.positions)),
            "spot/retained": 0.0 if targets is None else float(len(targets.positions)),
            "spot/no_evidence": float(sum(branch.values is None for branch in branches)),
            "probe/tokens": float(sum(len(continuation.token_ids) for continuation in probes)),
            "probe/requests": float(len(probes)),
        }
        rewards = outcome_rewards(verdicts)
        if rewards:
            metrics["probe/accuracy"] = sum(rewards) / len(rewards)
        viable = [branch for branch in branches if branch.viable]
        if viable:
            shifts = [np.abs(self._target(branch) - self._target(branch, gamma=0.0)).sum() / 2 for branch in viable]
            metrics["spot/calibration_shift"] = float(np.mean(shifts))
        return metrics

    def _record(
        self, rollout: Generation, stages: PromptStages, selection: Selection, branches: Sequence[Branch]
    ) -> dict[str, Any]:
        """What SPOT saw, for `samples.jsonl`: the score of each position (null where masked) and each branch."""
        score: list[float | None] = [None] * len(rollout.token_ids)
        if selection.scores is not None:
            for position, value in zip(selection.eligible, rounded(selection.scores.score), strict=True):
                score[int(position)] = value
        return {
            "acquisition_score": score,
            "selected_positions": selection.positions.tolist(),
            "branches": [self._branch_record(rollout, stages, selection, branch) for branch in branches],
        }

    def _branch_record(
        self, rollout: Generation, stages: PromptStages, selection: Selection, branch: Branch
    ) -> dict[str, Any]:
        """Probabilities are of the full vocabulary but for `prior` and `target`, which sum to 1 over the candidates."""
        row = int(np.searchsorted(selection.eligible, branch.position))
        parts = {} if selection.scores is None else selection.scores._asdict()
        student = None if selection.student_logprobs is None else np.exp(selection.student_logprobs[row])
        values = branch.values
        target = None if values is None else self._target(branch)
        prior = calibrated_target(branch.teacher_logprobs, np.zeros(len(branch.candidate_ids)), 0.0)
        return {
            "position": branch.position,
            "sampled": stages.decode(rollout.token_ids[branch.position : branch.position + 1]),
            "retained": branch.viable,
            "score_parts": {name: round(float(part[row]), 6) for name, part in parts.items()},
            "candidates": [
                {
                    "token_id": int(token_id),
                    "token": stages.decode(np.array([token_id], dtype=np.int32)),
                    "teacher": round(float(np.exp(branch.teacher_logprobs[c])), 6),
                    "student": None if student is None else round(float(student[c]), 6),
                    "prior": round(float(prior[c]), 6),
                    "value": None if values is None else float(values[c]),
                    "target": None if target is None else round(float(target[c]), 6),
                    "verdicts": [verdict.value for verdict in branch.verdicts[c]],
                    "continuations": [stages.decode(each.token_ids) for each in branch.continuations[c]],
                }
                for c, token_id in enumerate(branch.candidate_ids)
            ],
        }
