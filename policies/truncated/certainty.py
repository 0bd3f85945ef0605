"""Which positions are the M best when scores are only known within intervals, and what to ask to find out.

A state machine: evidence goes in, questions come out. At any time it has the best selection so far, and says what of
it is certain. It knows no servers, tasks or clock. `score_bounds` computes the intervals, `selection` asks the servers.

The exact selection is what `acquisition.select_positions` chooses from the rows that count: those that a server gives
when it is asked for single positions (a wide top-k of the teacher, candidates of the student). Everything else is
evidence about those rows. A selection is certain when every selection that fits the evidence is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spot_async.types import BoolArray, Int64Array, ScoredPositions

from ..acquisition import select_positions
from .score_bounds import (
    Interval,
    ScoreBounds,
    ScoreRule,
    StudentRows,
    TeacherRows,
    interchangeable,
    score_bounds,
)

WIDENING = 8  # factor on the teacher's top-k from one question about a position to the next
SMALL = 1e-30  # keeps logarithms of bounds finite


class Decision(NamedTuple):
    """What is settled, whatever the scores are within their intervals."""

    chosen: BoolArray  # (T,) among the best
    ruled_out: BoolArray  # (T,) not among them


def decide(score: Interval, budget: int) -> Decision:
    """Which positions are surely, and which surely not, among the `budget` best.

    As `select_positions`: ties go to the earlier position, and a score of 0 is never chosen.
    """
    order = np.arange(len(score.lower))
    if budget == 0 or not len(order):
        return Decision(np.zeros(len(order), np.bool_), np.ones(len(order), np.bool_))
    ahead = np.zeros(len(order), dtype=np.int64)  # how many others may come before it
    for j in np.lexsort((order, -score.upper))[: budget + 1]:
        before = (score.upper[j] > score.lower) | ((score.upper[j] == score.lower) & (j < order))
        ahead += before & (j != order) & (score.upper[j] > 0.0)
    chosen = (score.lower > 0.0) & (ahead < budget)
    behind = np.zeros(len(order), dtype=np.int64)  # how many others surely come before it
    for j in np.lexsort((order, -score.lower))[:budget]:
        before = (score.lower[j] > score.upper) | ((score.lower[j] == score.upper) & (j < order))
        behind += before & (score.lower[j] > 0.0)
    return Decision(chosen, (score.upper <= 0.0) | (behind >= budget))


@dataclass(frozen=True)
class Questions:
    """Rows to ask for next, those first whose answers can decide most. False when there is nothing to ask."""

    student: Int64Array  # the student's log-probabilities at the teacher's candidates
    teacher: dict[int, Int64Array]  # wider rows of the teacher, by their top-k

    def __bool__(self) -> bool:
        return len(self.student) > 0 or len(self.teacher) > 0


class Evidence:
    """All that is known of one response. It has a row for each position that may be selected."""

    def __init__(
        self,
        teacher: TeacherRows,
        student: StudentRows,
        rule: ScoreRule,
        budget: int,
        *,
        teacher_top_k: int = 0,
        ask_student: bool = False,
    ) -> None:
        """`teacher_top_k`: the widest row that the teacher can be asked for; 0 where it cannot be asked again."""
        rows, served = teacher.ids.shape
        self.rule = rule
        self.budget = budget
        self.teacher = teacher
        self.student = student.with_room(rule.candidates)
        self._widest = min(teacher_top_k, rule.vocab_size)
        self._width = np.full(rows, served)
        self._student_answers = np.full(rows, ask_student and rule.asks_student)
        self.bounds: ScoreBounds = score_bounds(self.teacher, self.student, rule, shape=False)
        self.decision = decide(self.bounds.score, budget)
        self._update(np.flatnonzero(~self.decision.ruled_out))  # the shape only where it can matter

    @property
    def undecided(self) -> Int64Array:
        """Rows that may be chosen or not, largest upper bound first."""
        rows = np.flatnonzero(~self.decision.chosen & ~self.decision.ruled_out)
        return rows[np.argsort(-self.bounds.score.upper[rows], kind="stable")]

    @property
    def certain(self) -> bool:
        """Whether every selection that fits the evidence is the same."""
        return len(self.undecided) == 0

    @property
    def selected(self) -> Int64Array:
        """The selection by midpoints. It agrees with `decision`, which holds for any scores within the intervals."""
        return select_positions(self.bounds.score.middle, ~self.decision.ruled_out, self.budget)

    def questions(self, among: BoolArray, limit: int) -> Questions:
        """What to ask next about at most `limit` of the rows where `among` (T,) is true; false when nothing is left."""
        width = np.minimum(self._width * WIDENING, self._widest)
        settled = (self.teacher.noise_nats == 0.0) & self.teacher.exact_entropy
        ask_teacher = ~settled & (width > self._width)
        ask_student = self._student_answers & ~self.student.is_exact_at(self.teacher.ids[:, : self.rule.candidates])
        rows = self.undecided
        rows = rows[(ask_teacher | ask_student)[rows] & among[rows]][:limit]
        # The larger source of doubt is asked about first. Only the teacher can settle which tokens are candidates.
        score, entropy = self.bounds.score.at(rows), self.bounds.entropy.at(rows)
        of_score, of_entropy = (
            np.log(np.maximum(x.upper, SMALL) / np.maximum(x.lower, SMALL)) for x in (score, entropy)
        )
        unnamed = interchangeable(self.teacher.at(rows), self.rule).rank.any(axis=-1)
        to_teacher = ask_teacher[rows] & (unnamed | (of_entropy > of_score / 2.0) | ~ask_student[rows])
        widths = width[rows]
        wider = {int(k): rows[to_teacher & (widths == k)] for k in np.unique(widths[to_teacher])}
        return Questions(rows[~to_teacher], wider)

    def take_student(self, rows: Int64Array, logprobs: npt.ArrayLike) -> None:
        """Exact log-probabilities (N, k) at the candidates of `rows`."""
        self.student.put(rows, self.teacher.ids[rows, : self.rule.candidates], logprobs)
        self._update(rows)

    def refuse_student(self, rows: Int64Array) -> None:
        """The student will not answer for these rows: it holds other weights by now."""
        self._student_answers[rows] = False

    def take_teacher(self, rows: Int64Array, reply: ScoredPositions, top_k: int) -> None:
        """The teacher's reply about single positions, `top_k` tokens each: from now on the rows that count.

        It may show fewer, where tokens of the top-k are not the student's too. Without k of them it decides nothing.
        """
        k, shown = self.rule.candidates, min(self.teacher.ids.shape[-1], reply.topk_ids.shape[-1])
        self._width[rows] = top_k
        if shown < k:
            return
        before = np.sort(self.teacher.ids[rows, :k], axis=-1)
        self.teacher.ids[rows, :shown] = reply.topk_ids[:, :shown]
        self.teacher.logprobs[rows, :shown] = reply.topk_logprobs[:, :shown]
        self.teacher.entropy_lower[rows] = reply.entropy_lower
        self.teacher.entropy_upper[rows] = reply.entropy_upper
        self.teacher.exact_entropy[rows] = top_k >= self.rule.vocab_size
        self.teacher.noise_nats[rows] = 0.0
        now = np.sort(self.teacher.ids[rows, :k], axis=-1)
        self.student.drop(rows[(now != before).any(axis=-1)], k)
        self._update(rows)

    def _update(self, rows: Int64Array) -> None:
        if len(rows):
            bounds = score_bounds(self.teacher.at(rows), self.student.at(rows), self.rule)
            self.bounds = self.bounds.replaced(rows, bounds)
            self.decision = decide(self.bounds.score, self.budget)
