"""Decides which positions are the M best when scores are only known within intervals, and what to ask to find out.

A state machine: evidence goes in, questions come out. At any time it has the best selection so far, and says which part
of it is certain. It knows no servers, tasks or clock. `score_bounds` computes the intervals, and `selection` asks the
servers.

The rows that count are those that a server gives when asked for single positions (a wide top-k of the teacher,
candidates of the student). The exact selection is what `acquisition.select_positions` would choose from them. All else
is evidence about those rows. A selection is certain when no other selection fits the evidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spot_async.types import BoolArray, Int64Array, ScoredPositions

from ..acquisition import select_positions
from .intervals import Interval
from .score_bounds import (
    ScoreBounds,
    ScoreRule,
    StudentRows,
    TeacherRows,
    interchangeable,
    score_bounds,
)

WIDENING = 8  # each question about a position asks for a top-k this many times wider than the last
SMALL = 1e-30  # keeps logarithms of bounds finite


class Decision(NamedTuple):
    """What is certain about the selection, wherever the scores lie in their intervals."""

    chosen: BoolArray  # (T,) surely among the best
    ruled_out: BoolArray  # (T,) surely not among them


def decide(score: Interval, budget: int) -> Decision:
    """Decide which positions are surely, and which surely not, among the `budget` best.

    As in `select_positions`, ties go to the earlier position, and a score of 0 is never chosen. Only the `budget` + 1
    largest upper bounds, and the `budget` largest lower bounds, can settle a position.
    """
    order = np.arange(len(score.lower))
    if budget == 0 or not len(order):
        return Decision(np.zeros(len(order), np.bool_), np.ones(len(order), np.bool_))
    ahead = np.zeros(len(order), dtype=np.int64)  # how many others may come before this one
    for j in np.lexsort((order, -score.upper))[: budget + 1]:
        before = (score.upper[j] > score.lower) | ((score.upper[j] == score.lower) & (j < order))
        ahead += before & (j != order) & (score.upper[j] > 0.0)
    chosen = (score.lower > 0.0) & (ahead < budget)
    behind = np.zeros(len(order), dtype=np.int64)  # how many others surely come before this one
    for j in np.lexsort((order, -score.lower))[:budget]:
        before = (score.lower[j] > score.upper) | ((score.lower[j] == score.upper) & (j < order))
        behind += before & (score.lower[j] > 0.0)
    return Decision(chosen, (score.upper <= 0.0) | (behind >= budget))


@dataclass(frozen=True)
class Questions:
    """Rows to ask about next, the most decisive first. False when there is nothing to ask."""

    student: Int64Array  # rows whose candidates the student should score
    teacher: dict[int, Int64Array]  # rows that the teacher should give with a wider top-k, by that top-k

    def __bool__(self) -> bool:
        return len(self.student) > 0 or len(self.teacher) > 0


class Evidence:
    """All that is known about one response, with a row for each position that may be selected."""

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
        """`teacher_top_k` is the widest top-k that the teacher can be asked for; 0 if it cannot be asked again."""
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
        # Bounds of JS take most of the time, so they are computed only where they can matter.
        self._update(np.flatnonzero(~self.decision.ruled_out))

    @property
    def undecided(self) -> Int64Array:
        """Rows that are neither chosen nor ruled out yet, largest upper bound first."""
        rows = np.flatnonzero(~self.decision.chosen & ~self.decision.ruled_out)
        return rows[np.argsort(-self.bounds.score.upper[rows], kind="stable")]

    @property
    def certain(self) -> bool:
        """Whether only one selection fits the evidence."""
        return len(self.undecided) == 0

    @property
    def selected(self) -> Int64Array:
        """The selection by the intervals' midpoints. It always agrees with `decision`."""
        return select_positions(self.bounds.score.middle, ~self.decision.ruled_out, self.budget)

    def questions(self, among: BoolArray, limit: int) -> Questions:
        """Return what to ask next, about at most `limit` of the rows where `among` (T,) is true."""
        width = np.minimum(self._width * WIDENING, self._widest)
        settled = ~self.teacher.is_noisy & self.teacher.exact_entropy
        ask_teacher = ~settled & (width > self._width)
        ask_student = self._student_answers & ~self.student.is_exact_at(self.teacher.ids[:, : self.rule.candidates])
        rows = self.undecided
        rows = rows[(ask_teacher | ask_student)[rows] & among[rows]][:limit]
        # Ask about the larger source of doubt first. Only the teacher can settle which tokens are candidates.
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
        """Take exact log-probabilities (N, k) at the candidates of `rows` (N,)."""
        self.student.put(rows, self.teacher.ids[rows, : self.rule.candidates], logprobs)
        self._update(rows)

    def refuse_student(self, rows: Int64Array) -> None:
        """Note that the student cannot answer for these rows, because it holds other weights by now."""
        self._student_answers[rows] = False

    def take_teacher(self, rows: Int64Array, reply: ScoredPositions, top_k: int) -> None:
        """Take the teacher's reply about single positions, for which `top_k` tokens were asked. These rows count.

        The reply has fewer tokens where the student does not have some of the top-k. With fewer than k it is not used.
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
        self.teacher.noise_nats[rows] = self.teacher.spread_nats[rows] = 0.0
        now = np.sort(self.teacher.ids[rows, :k], axis=-1)
        self.student.drop(rows[(now != before).any(axis=-1)], k)
        self._update(rows)

    def _update(self, rows: Int64Array) -> None:
        if len(rows):
            bounds = score_bounds(self.teacher.at(rows), self.student.at(rows), self.rule)
            self.bounds = self.bounds.replaced(rows, bounds)
            self.decision = decide(self.bounds.score, self.budget)
