"""Translates end tokens between student and teacher, who may end a response with different ids.

To end is one decision, whichever token says so. Pure maps for scores and for candidates; stages ask the teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from spot_async.types import FloatArray, IntArray, TokenScores

EndScore: TypeAlias = Literal["replace", "sum"]


class EndTokens:
    """The end tokens of both models. The first of each is the one that the model writes by itself."""

    def __init__(self, student: Sequence[int], teacher: Sequence[int], score: EndScore) -> None:
        self.ours, self.theirs = student[0], teacher[0]
        # The student's own token is replaced even if it is among the teacher's stop ids. A teacher that only stops at
        # it, and never writes it, would score it as nearly impossible.
        self._foreign = ({*student} - {*teacher} | {self.ours}) - {self.theirs}
        self._others = np.array(teacher[1:] if score == "sum" else (), np.int32)

    @property
    def may_sum(self) -> bool:
        """Whether `summed_with_last` can return anything, for any response."""
        return bool(self._foreign) and len(self._others) > 0

    def as_teachers(self, response_ids: IntArray) -> IntArray:
        """Return the response (T,) for the teacher to score: a student's end token at its end becomes the teacher's."""
        if not self._ends_foreign(response_ids):
            return response_ids
        return np.concatenate([response_ids[:-1], np.array([self.theirs])], dtype=np.int32)

    def summed_with_last(self, response_ids: IntArray) -> IntArray:
        """Return the teacher's other end tokens (E,). `sum` adds their probabilities to that of the last token."""
        return self._others if self._ends_foreign(response_ids) else self._others[:0]

    def swapped(self, token_ids: IntArray) -> IntArray:
        """Return the ids with the two models' end tokens swapped: the teacher's candidates, targets or responses."""
        return swap_tokens(token_ids, self.ours, self.theirs)

    def _ends_foreign(self, response_ids: IntArray) -> bool:
        return len(response_ids) > 0 and int(response_ids[-1]) in self._foreign


def swap_tokens(token_ids: IntArray, one: int, other: int) -> IntArray:
    """Swap two token ids in an array of any shape.

    Swapping, unlike replacing, keeps candidates distinct. Applied twice it is the identity.
    """
    if one == other:
        return token_ids
    others = np.where(token_ids == one, other, token_ids)
    return np.where(token_ids == other, one, others).astype(np.int32)


def with_summed_last(scores: TokenScores, logprobs: FloatArray) -> TokenScores:
    """Add to the last token's probability those of other tokens in its place, with log-probabilities (E,)."""
    summed = scores.logprobs.copy()
    # Rounding may take the sum past 1.
    summed[-1] = min(np.logaddexp.reduce([summed[-1], *logprobs], dtype=np.float64), 0.0)
    return msgspec.structs.replace(scores, logprobs=summed)
