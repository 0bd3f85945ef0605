"""SPOT: sparse probing and outcome calibration (Algorithm 1's inner loop).

Acquisition decides where to probe. Exploration finds out what each of the teacher's candidates leads to when the
student continues from it. Exploitation tilts the teacher's prior by those outcomes. With `positions: 0` it is OPD. The
paper's ablations, and two controls for the choice of positions, are settings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, field_validator

from spot_async.base import registry
from spot_async.base.seeds import derive_seed
from spot_async.base.tasks import both, gather
from spot_async.config import NonNegativeFloat, PositiveInt, RoutedSettings
from spot_async.errors import ConfigError, RequestError
from spot_async.models.responses import token_of
from spot_async.protocols import PromptStages
from spot_async.terms import pull, row_bytes
from spot_async.types import (
    NO_TOKEN,
    BoolArray,
    Generation,
    Int64Array,
    Judgement,
    PolicyContext,
    PolicyNeeds,
    Prompt,
    Sample,
    SoftTargets,
    TokenScores,
)

from .acquisition import (
    PositionScores,
    ScoreVariant,
    probeable_tokens,
    rule_scores,
    select_positions,
)
from .samples import student_sample
from .spot_records import probe_metrics, probe_record
from .targets import Branch
from .truncated.score_bounds import ScoreRule
from .truncated.selection import NOTHING_SELECTED, OUTCOMES, Selection, certified_selection, is_batched, is_exact

# Upper limits of the bytes in a record for each branch, candidate and continuation, without their texts.
BRANCH_BYTES, CANDIDATE_BYTES, CONTINUATION_BYTES = 1536, 768, 128
RULES = ("score", "entropy", "earliest", "random")
Share = Annotated[float, Field(ge=0, le=1)]


class SpotSettings(RoutedSettings):
    """Settings. Descriptions begin with the paper's symbols."""

    kind: str = "spot"
    positions: int = Field(2, ge=0, description="M: positions probed per rollout")
    score_top_k: PositiveInt = Field(16, description="k_s: teacher candidates behind the acquisition score")
    probe_top_k: PositiveInt = Field(4, description="k_p: teacher candidates probed per position")
    probes: PositiveInt = Field(1, description="N_p: continuations per candidate")
    lambda_mass: Share = Field(0.5, description="weight of the student's missing mass in the gap G")
    lambda_shape: Share = Field(0.5, description="weight of the shape mismatch (JS) in the gap G")
    score_variant: ScoreVariant = Field(
        "Full", description="acquisition score; those other than Full are its ablations"
    )
    selection: str = Field(
        "score",
        description="positions by acquisition `score` or, as controls, by teacher `entropy` alone, the `earliest`, or "
        "at `random`; or by a function of your own, `module:function`",
    )
    skip_answer: bool = Field(
        False, description="true: nothing is selected from the box on that the verifier reads the answer from"
    )
    verifier_guidance: bool = Field(
        True, description="false: no probes; the teacher's prior is the target at every selected position"
    )
    gate: bool = Field(
        True, description="B+: only positions where some probe is correct are trained; false: all that have evidence"
    )
    shuffle_outcomes: bool = Field(
        False, description="a control: the candidates of a position trade their values at random before the tilt"
    )
    served_top_k: PositiveInt = Field(
        20,
        description="log-probabilities per token to ask of servers that give no whole distributions: in the teacher's "
        "scores (at least k_s) and in the student's rollouts; fewer if the server's limit is lower",
    )
    refine_positions: int = Field(
        32, ge=0, description="positions per rollout to ask such servers about again, to make the selection certain"
    )
    gamma: NonNegativeFloat = Field(1.0, description="inverse temperature of the outcome tilt; 0: no tilt")
    beta: NonNegativeFloat = Field(0.1, description="weight of the branch loss")
    baseline: Share = Field(0.0, description="alpha, not the paper's: share of the prior taken off the target")

    @field_validator("selection")
    @classmethod
    def _is_rule(cls, value: str) -> str:
        if value not in RULES and not (":" in value and callable(registry.named(value))):
            raise ValueError(f"{value!r} is none of {', '.join(RULES)}, and names no function as module:function")
        return value

    def _check(self) -> None:
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
        if self.shuffle_outcomes and not self.verifier_guidance:
            raise ValueError("shuffle_outcomes=true needs verifier_guidance=true: without probes there are no outcomes")
        if self.baseline and not self.verifier_guidance:
            raise ValueError(
                f"baseline={self.baseline:g} needs verifier_guidance=true: without outcomes there is only the prior"
            )

    @property
    def doubts(self) -> Sequence[str]:
        if self.baseline and not self.gamma:
            weaker = "without a tilt the branch teaches the teacher's prior, only weaker: set gamma above 0"
            return (f"baseline={self.baseline:g} beside gamma=0: {weaker}, or baseline to 0",)
        return ()


class SpotPolicy:
    """SPOT for one prompt at a time: `supervise` is Algorithm 1's inner loop."""

    Settings = SpotSettings

    def __init__(self, settings: SpotSettings, context: PolicyContext) -> None:
        self.settings = settings
        probing = settings.positions > 0
        self._probes = settings.probes if settings.verifier_guidance else 0  # N_p
        self._run_seed = context.run_seed
        self._vocab_size = context.vocab_size
        self._probeable = probeable_tokens(context.tokenizer, context.vocab_size) if probing else None  # (V,)
        self._score = ScoreRule(
            candidates=settings.score_top_k,
            vocab_size=context.vocab_size,
            lambda_mass=settings.lambda_mass,
            lambda_shape=settings.lambda_shape,
            variant=settings.score_variant,
        )
        self._rule = self._score if settings.selection == "score" else replace(self._score, variant="H")
        self._answer_start = context.answer_start if settings.skip_answer else None
        if settings.skip_answer and self._answer_start is None:
            raise ConfigError(
                "policy.skip_answer=true: the verifier reads no box, so nobody knows where an answer begins: set it to "
                "false, or verifier to boxed_match, math_verify or multiple_choice"
            )
        is_own = settings.selection not in RULES
        # Where the entropy is bounded from the top-k, more tokens give tighter bounds.
        widest = settings.score_top_k if is_own else max(settings.score_top_k, settings.served_top_k)
        self.needs = PolicyNeeds(
            teacher_top_k=settings.score_top_k if probing else 1,
            asked_top_k=widest if probing else 0,
            teacher_top_k_key="score_top_k" if probing else None,
            candidate_logprobs=probing and is_own,
            candidates_key="selection" if probing and (is_own or self._rule.asks_student) else None,
            outcomes=settings.verifier_guidance,
            probes_per_prompt=settings.positions * settings.probe_top_k * self._probes,
            term_bytes=settings.positions * row_bytes(settings.probe_top_k, has_baselines=settings.baseline > 0),
            record_bytes=settings.positions
            * (BRANCH_BYTES + settings.probe_top_k * (CANDIDATE_BYTES + self._probes * CONTINUATION_BYTES)),
        )

    async def supervise(self, prompt: Prompt, stages: PromptStages) -> Sequence[Sample]:
        rollout = await self._rollout(stages)
        scores, judgement = await both(
            stages.score(rollout.token_ids, top_k=self._teacher_top_k(stages)), stages.verify(rollout.token_ids)
        )
        selection = await self._acquire(prompt, rollout, scores, stages)
        explored = (self._explore(prompt, rollout, scores, int(position), stages) for position in selection.positions)
        selection, branches = await both(self._compared(selection, rollout, scores, stages), gather(explored))
        retained = [branch for branch in branches if self._keeps(branch)]  # B+
        targets = self._exploit(retained)
        sample = student_sample(prompt, stages, rollout, judgement, scores, pulls=(pull(scores),), soft_targets=targets)
        sample.metrics.update(self._metrics(rollout, selection, branches, retained))
        sample.record.update(probe_record(rollout, stages.decode, selection, branches, retained))
        return [sample]

    async def _rollout(self, stages: PromptStages) -> Generation:
        """Sample the student's response, with its top-k only if the student cannot score candidates in one pass."""
        if self._estimates(stages) and self._rule.asks_student and stages.student and not is_batched(stages.student):
            top_k = min(self.settings.served_top_k, stages.student.max_generation_top_k)
            return await stages.rollout(top_k=top_k)
        return await stages.rollout()

    def _teacher_top_k(self, stages: PromptStages) -> int:
        """Return k_s, or more where the entropy is bounded from the top-k."""
        if self._probeable is None:
            return 0  # OPD has no candidates
        needed = self.settings.score_top_k
        if self._estimates(stages) and stages.teacher:
            return max(needed, min(self.settings.served_top_k, stages.teacher.max_top_k))
        return needed

    def _estimates(self, stages: PromptStages) -> bool:
        """Return whether servers give only part of what the score needs, so that it is only known within intervals."""
        if self._probeable is None or self.settings.selection not in ("score", "entropy"):
            return False
        asks_student = self.settings.selection == "score" and not is_batched(stages.student)
        return asks_student or not is_exact(stages.teacher)

    async def _acquire(
        self, prompt: Prompt, rollout: Generation, scores: TokenScores, stages: PromptStages
    ) -> Selection:
        """Choose where to probe: the M best of the eligible positions."""
        if self._probeable is None:
            return NOTHING_SELECTED
        eligible = self._eligible(self._probeable[rollout.token_ids], rollout, scores, stages)
        if len(eligible) == 0:
            return NOTHING_SELECTED
        if self._estimates(stages):
            budget, max_asked = self.settings.positions, self.settings.refine_positions
            return await certified_selection(
                rollout, scores, eligible, stages, self._rule, budget=budget, max_asked=max_asked
            )
        student_logprobs, parts, score = None, None, None
        match self.settings.selection:
            case "score":
                student_logprobs, parts = await self._score_parts(eligible, rollout, scores, stages)
                by = score = parts.score
            case "entropy":
                by = score = scores.entropy[eligible] / np.log(self._vocab_size)
            case "earliest":
                by = np.arange(len(eligible), 0.0, -1.0)
            case "random":
                seed = derive_seed(self._run_seed, prompt.ordinal, "random positions")
                by = 1.0 - np.random.default_rng(seed).random(len(eligible))  # in (0, 1]
            case own:
                student_logprobs, parts = await self._score_parts(eligible, rollout, scores, stages)
                predictors = {
                    "position": eligible,
                    "token": np.array([stages.decode(rollout.token_ids[t : t + 1]) for t in eligible]),
                    "behavior_logprobs": rollout.logprobs[eligible],
                    "teacher_logprobs": scores.logprobs[eligible],
                    **parts._asdict(),
                }
                by = score = rule_scores(own, predictors)
        chosen = select_positions(by, np.ones(len(eligible), dtype=np.bool_), self.settings.positions)
        return Selection(
            positions=eligible[chosen],
            eligible=eligible,
            score=score,
            gap=None if parts is None else parts.gap,
            parts=None if parts is None else parts.at(chosen),
            student_logprobs=None if student_logprobs is None else student_logprobs[chosen],
            outcome="exact" if scores.rows is None else "uncertain",
            certain=np.full(len(chosen), scores.rows is None),
        )

    def _eligible(
        self, probeable: BoolArray, rollout: Generation, scores: TokenScores, stages: PromptStages
    ) -> Int64Array:
        """Return the positions (E,) where a probe may begin and the teacher has candidates."""
        has_choice = (scores.topk_ids[:, :2] != NO_TOKEN).all(axis=1)
        eligible = np.flatnonzero(probeable & scores.known_rows & has_choice)
        begin = max((span.end for span in rollout.version_spans if span.is_read), default=0)  # of the last turn
        last_turn = rollout.token_ids[begin:]
        if self._answer_start and (start := self._answer_start(stages.decode(last_turn))) is not None:
            eligible = eligible[eligible < begin + token_of(last_turn, start, stages.decode)]
        return eligible

    async def _compared(
        self, selection: Selection, rollout: Generation, scores: TokenScores, stages: PromptStages
    ) -> Selection:
        """Return the selection with the score's parts at its positions, if the student can be asked for them.

        A rule that does not need them gets them for the record, so that it can be compared with the score.
        """
        is_asked = stages.student is None or stages.student.candidate_logprobs != "none"
        if selection.parts is not None or not len(selection.positions) or not is_asked:
            return selection
        with contextlib.suppress(RequestError):  # a prompt is not given up for what changes nothing that is trained
            logprobs, parts = await self._score_parts(selection.positions, rollout, scores, stages)
            return replace(selection, parts=parts, student_logprobs=logprobs)
        return selection

    async def _score_parts(
        self, positions: Int64Array, rollout: Generation, scores: TokenScores, stages: PromptStages
    ) -> tuple[npt.NDArray[np.float32], PositionScores]:
        """Return the student's log-probabilities (N, k_s), and s = H C G with its parts (equations 5 to 7)."""
        top = slice(self.settings.score_top_k)
        student_logprobs = await stages.candidate_logprobs(
            rollout.token_ids,
            positions.astype(np.int32),
            scores.topk_ids[positions, top],
            version=rollout.version_spans[0].version,  # of all spans, where weights do not change within a response
        )
        parts = self._score.parts(scores.topk_logprobs[positions, top], student_logprobs, scores.entropy[positions])
        return student_logprobs, parts

    async def _explore(
        self, prompt: Prompt, rollout: Generation, scores: TokenScores, position: int, stages: PromptStages
    ) -> Branch:
        """Find out what each of the teacher's top k_p candidates leads to (equation 8)."""
        k, n = self.settings.probe_top_k, self._probes
        candidate_ids = scores.topk_ids[position, :k]
        candidate_ids = candidate_ids[candidate_ids != NO_TOKEN]

        async def outcome(candidate_id: int, n: int) -> tuple[Generation, Judgement]:
            continuation = await stages.probe(rollout.token_ids, position, candidate_id, n=n)
            branch_ids = np.concatenate(
                [rollout.token_ids[:position], np.array([candidate_id]), continuation.token_ids], dtype=np.int32
            )
            return continuation, await stages.verify(branch_ids)

        outcomes = await gather(outcome(int(candidate), i) for candidate in candidate_ids for i in range(n))
        return Branch(
            position=position,
            candidate_ids=candidate_ids,
            teacher_logprobs=scores.topk_logprobs[position, : len(candidate_ids)],
            judgements=[[judged for _, judged in outcomes[c * n : (c + 1) * n]] for c in range(len(candidate_ids))],
            continuations=[[text for text, _ in outcomes[c * n : (c + 1) * n]] for c in range(len(candidate_ids))],
            gamma=self.settings.gamma,
            credited_from=self._credits(prompt, position, len(candidate_ids)),
        )

    def _credits(self, prompt: Prompt, position: int, candidates: int) -> Int64Array | None:
        """Return whose value each candidate is credited with: None for its own, else a random order."""
        if not self.settings.shuffle_outcomes:
            return None
        seed = derive_seed(self._run_seed, prompt.ordinal, "shuffled outcomes", position)
        return np.random.default_rng(seed).permutation(candidates)

    def _exploit(self, retained: Sequence[Branch]) -> tuple[SoftTargets, ...]:
        """Return what to distil: outcome-calibrated targets, weighted beta / |B+| (equations 10 and 12).

        The share `baseline` of the prior is taken off in the loss, which is not the paper's.
        """
        if not retained:
            return ()
        alpha, k = self.settings.baseline, self.settings.probe_top_k

        def stacked(rows: Iterable[npt.NDArray[Any]], fill: float = 0.0) -> npt.NDArray[Any]:
            return np.stack([np.pad(row, (0, k - len(row)), constant_values=fill) for row in rows])

        branches = SoftTargets(
            positions=np.array([branch.position for branch in retained], dtype=np.int32),
            token_ids=stacked((branch.candidate_ids for branch in retained), NO_TOKEN).astype(np.int32),
            probabilities=stacked(branch.target for branch in retained).astype(np.float32),
            weights=np.full(len(retained), self.settings.beta / len(retained), dtype=np.float32),
            baselines=alpha * stacked(branch.prior for branch in retained).astype(np.float32) if alpha else None,
        )
        return (branches,)

    def _keeps(self, branch: Branch) -> bool:
        """Return whether the branch is distilled: if it is in B+.

        Without the gate it is enough that all candidates have values. Without verifier guidance every branch is.
        """
        if not self.settings.verifier_guidance:
            return True
        return branch.viable if self.settings.gate else branch.values is not None

    def _metrics(
        self, rollout: Generation, selection: Selection, branches: Sequence[Branch], retained: Sequence[Branch]
    ) -> dict[str, float]:
        metrics = probe_metrics(selection, branches, retained, self.settings.baseline)
        if self._probeable is not None:
            metrics |= {f"spot/selection_{outcome}": float(selection.outcome == outcome) for outcome in OUTCOMES}
            metrics["spot/branch_weight"] = self.settings.beta * len(rollout.token_ids) / self.settings.positions
        return metrics
