"""Selects positions to probe where servers give truncated distributions, by asking them about single positions.

This is a thin shell around `certainty.Evidence`. It puts in what servers said, asks stages the questions that come out,
and stops when the selection is certain, nothing is left to ask, or the limit of positions is reached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from spot_async.base.tasks import both
from spot_async.errors import VersionMismatchError
from spot_async.protocols import PromptStages
from spot_async.types import BoolArray, Capabilities, Float64Array, Generation, Int64Array, TokenScores, WeightVersion

from ..acquisition import PositionScores
from .certainty import Evidence
from .noise import split
from .score_bounds import ScoreRule, StudentRows, TeacherRows, asked_student, served_student

# exact: nothing was estimated. certain: decided by what was served first. refined: decided after asking about single
# positions. uncertain: not decided, so selected by the midpoints of intervals.
Outcome = Literal["exact", "certain", "refined", "uncertain"]
OUTCOMES: tuple[Outcome, ...] = ("exact", "certain", "refined", "uncertain")


@dataclass(frozen=True)
class Selection:
    """The positions to probe, and what is known of every eligible position. All others are masked."""

    positions: Int64Array  # (N,) response positions, ascending
    eligible: Int64Array  # (E,) response positions that could be selected
    score: Float64Array | None  # (E,) midpoints where only intervals are known; None for a rule without scores
    gap: Float64Array | None = None  # (E,) G; NaN where the student's row is not known; None: it was not asked
    parts: PositionScores | None = None  # (N,) the acquisition score's; None if the student was not asked
    student_logprobs: npt.NDArray[np.floating] | None = None  # (N, K) at the teacher's top-k; NaN where unknown
    outcome: Outcome = "exact"
    certain: BoolArray = field(default_factory=lambda: np.zeros(0, np.bool_))  # (N,) surely among the best
    asked: Mapping[str, int] | None = None  # `Refinement.counts`; None where nothing was estimated


LARGE_EVIDENCE = 8192  # with more entries of the teacher's top-k the work takes over 10 ms and goes to a thread
NOTHING_SELECTED = Selection(positions=np.zeros(0, np.int64), eligible=np.zeros(0, np.int64), score=np.zeros(0))


def is_batched(student: Capabilities | None) -> bool:
    """Return whether the student gives exact candidate log-probabilities of all positions in one forward pass."""
    return student is None or student.candidate_logprobs == "batched"


def is_exact(teacher: Capabilities | None) -> bool:
    """Return whether the teacher's scores have exact entropies."""
    return teacher is None or teacher.exact_entropy


async def certified_selection(
    rollout: Generation,
    scores: TokenScores,
    eligible: Int64Array,
    stages: PromptStages,
    rule: ScoreRule,
    *,
    budget: int,
    max_asked: int,
) -> Selection:
    """Select the `budget` best of the eligible positions (E,) when scores are only known within intervals.

    Servers are asked again about at most `max_asked` positions. Raises the `RequestError` of a question that failed.
    """
    student = await _student_rows(rollout, scores, eligible, stages, rule)

    def gather() -> Evidence:
        return Evidence(
            _teacher_rows(scores, eligible, stages.teacher),
            student,
            rule,
            budget,
            teacher_top_k=stages.teacher.max_position_top_k if stages.teacher is not None else 0,
            ask_student=stages.student is None or stages.student.candidate_logprobs != "none",
        )

    large = len(eligible) * scores.topk_ids.shape[-1] > LARGE_EVIDENCE
    evidence = await asyncio.to_thread(gather) if large else gather()
    at_once = evidence.certain
    refinement = Refinement(evidence, rollout, eligible, stages)
    await refinement.run(round_size=2 * budget, max_asked=max_asked)
    chosen = evidence.selected
    is_placed = scores.rows is not None  # by `models/own_rows.py`: others may be likelier than the last of a row
    known = Selection(
        positions=eligible[chosen],
        eligible=eligible,
        score=evidence.bounds.score.middle,
        outcome="uncertain" if is_placed or not evidence.certain else "certain" if at_once else "refined",
        certain=evidence.decision.chosen[chosen] & (not is_placed),
        asked=refinement.counts,
    )
    if not rule.asks_student:
        return known
    logprobs = evidence.student.logprobs_at(scores.topk_ids[eligible].astype(np.int64))
    top = slice(rule.candidates)
    of_served = rule.parts(scores.topk_logprobs[eligible, top], logprobs[:, top], scores.entropy[eligible])
    parts = evidence.bounds.middle.at(chosen)
    return replace(known, gap=of_served.gap, parts=parts, student_logprobs=logprobs[chosen])


class Refinement:
    """Asks servers about positions of which it is not certain whether they are selected."""

    def __init__(self, evidence: Evidence, rollout: Generation, eligible: Int64Array, stages: PromptStages) -> None:
        self._evidence = evidence
        self._rollout = rollout
        self._eligible = eligible
        self._stages = stages
        self._asked_student = np.zeros(len(eligible), np.bool_)
        self._asked_teacher = np.zeros(len(eligible), np.bool_)
        self._mismatched = np.zeros(len(eligible), np.bool_)

    @property
    def counts(self) -> dict[str, int]:
        """How many positions student and teacher were asked about, and for how many the student held other weights."""
        return {
            "refined_by_student": int(self._asked_student.sum()),
            "refined_by_teacher": int(self._asked_teacher.sum()),
            "version_mismatches": int(self._mismatched.sum()),
        }

    async def run(self, *, round_size: int, max_asked: int) -> None:
        """Ask in rounds until the selection is certain or nothing is left to ask.

        Asks about `round_size` positions in each round, and `max_asked` different ones in all, at most.
        """
        while not self._evidence.certain:
            asked = self._asked_student | self._asked_teacher
            left = max_asked - int(asked.sum())
            among = np.ones_like(asked) if left > 0 else asked
            questions = self._evidence.questions(among, min(round_size, left) if left > 0 else round_size)
            if not questions:
                return
            await both(self._ask_student(questions.student), self._ask_teacher(questions.teacher))

    async def _ask_student(self, rows: Int64Array) -> None:
        for version, some in _by_version(self._rollout, self._eligible, rows).items():
            candidates = self._evidence.teacher.ids[some, : self._evidence.rule.candidates]
            try:
                logprobs = await self._stages.candidate_logprobs(
                    self._rollout.token_ids,
                    self._eligible[some].astype(np.int32),
                    candidates.astype(np.int32),
                    version=version,
                )
            except VersionMismatchError:
                self._mismatched[some] = True
                self._evidence.refuse_student(some)
            else:
                self._asked_student[some] = True
                self._evidence.take_student(some, logprobs)

    async def _ask_teacher(self, wider: Mapping[int, Int64Array]) -> None:
        for top_k, rows in wider.items():
            reply = await self._stages.score_at(
                self._rollout.token_ids, self._eligible[rows].astype(np.int32), top_k=top_k
            )
            self._asked_teacher[rows] = True
            self._evidence.take_teacher(rows, reply, top_k)


async def _student_rows(
    rollout: Generation, scores: TokenScores, eligible: Int64Array, stages: PromptStages, rule: ScoreRule
) -> StudentRows:
    """Return exact log-probabilities at the teacher's top-K if one pass gives them, else what the rollout served."""
    if rule.asks_student and is_batched(stages.student):
        ids = scores.topk_ids[eligible]
        version = rollout.version_spans[0].version
        logprobs = await stages.candidate_logprobs(rollout.token_ids, eligible.astype(np.int32), ids, version=version)
        return asked_student(ids, logprobs)
    none = np.zeros((len(eligible), 0))
    served = rollout.topk_ids is not None and rollout.topk_logprobs is not None
    return served_student(
        rollout.topk_ids[eligible] if rollout.topk_ids is not None and served else none,
        rollout.topk_logprobs[eligible] if rollout.topk_logprobs is not None and served else none,
        rollout.token_ids[eligible],
        rollout.logprobs[eligible],
        *split(stages.student.logprob_noise_nats if stages.student is not None else 0.0, len(eligible)),
    )


def _teacher_rows(scores: TokenScores, eligible: Int64Array, teacher: Capabilities | None) -> TeacherRows:
    sure, spread = split(teacher.logprob_noise_nats if teacher is not None else 0.0, len(eligible))
    return TeacherRows(
        ids=scores.topk_ids[eligible].astype(np.int64),
        logprobs=scores.topk_logprobs[eligible].astype(np.float64),
        entropy_lower=scores.entropy_lower[eligible].astype(np.float64),
        entropy_upper=scores.entropy_upper[eligible].astype(np.float64),
        exact_entropy=np.full(len(eligible), is_exact(teacher)),
        noise_nats=np.full(len(eligible), sure),
        spread_nats=np.full(len(eligible), spread),
    )


def _by_version(rollout: Generation, eligible: Int64Array, rows: Int64Array) -> dict[WeightVersion | None, Int64Array]:
    """Group rows by the weights that sampled their tokens. Only those weights give log-probabilities of pi_old."""
    ends = [span.end for span in rollout.version_spans]
    span = np.searchsorted(ends, eligible[rows], side="right")
    versions = [each.version for each in rollout.version_spans]
    return {versions[i]: rows[[versions[j] == versions[i] for j in span]] for i in np.unique(span)}
