"""What ends a response, as student and teacher spell it: one decision, whichever tokens (method.md section 6).

Pure maps from one spelling to the other, for scores and for candidates. Asking the teacher is up to the stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from spot_async.types import FloatArray, IntArray, TokenScores

EndScore: TypeAlias = Literal["replace", "sum"]


class EndTokens:
    """The end tokens of both models, the one that each writes by itself first."""

    def __init__(self, student: Sequence[int], teacher: Sequence[int], score: EndScore) -> None:
        self.ours, self.theirs = student[0], teacher[0]
        # A teacher that only tolerates the student's token among its stop ids would score it as nearly impossible.
        self._foreign = ({*student} - {*teacher} | {self.ours}) - {self.theirs}
        self._others = np.array(teacher[1:] if score == "sum" else (), np.int32)

    @property
    def may_sum(self) -> bool:
        """Whether any response has a last token to which `summed_with_last` adds something."""
        return bool(self._foreign) and len(self._others) > 0

    def as_teachers(self, response_ids: IntArray) -> IntArray:
        """What the teacher is asked to score (T,): an end token only the student has is the teacher's (`replace`)."""
        if not self._ends_foreign(response_ids):
            return response_ids
        return np.concatenate([response_ids[:-1], np.array([self.theirs])], dtype=np.int32)

    def summed_with_last(self, response_ids: IntArray) -> IntArray:
        """The teacher's further end tokens (E,) that `sum` adds to the one that `as_teachers` put last."""
        return self._others if self._ends_foreign(response_ids) else self._others[:0]

    def swapped(self, token_ids: IntArray) -> IntArray:
        """What the teacher says of its own end token, said of the student's: candidates, targets, KD's responses."""
        return swap_tokens(token_ids, self.ours, self.theirs)

    def _ends_foreign(self, response_ids: IntArray) -> bool:
        return len(response_ids) > 0 and int(response_ids[-1]) in self._foreign


def swap_tokens(token_ids: IntArray, one: int, other: int) -> IntArray:
    """Each in the other's place (any shape), so that candidates stay different from one another; its own inverse."""
    if one == other:
        return token_ids
    others = np.where(token_ids == one, other, token_ids)
    return np.where(token_ids == other, one, others).astype(np.int32)


def with_summed_last(scores: TokenScores, logprobs: FloatArray) -> TokenScores:
    """The last token's probability and those of `logprobs` (E,), of other tokens in its place, added up."""
    summed = scores.logprobs.copy()
    summed[-1] = min(np.logaddexp.reduce([summed[-1], *logprobs], dtype=np.float64), 0.0)  # 1 but for rounding
    return msgspec.structs.replace(scores, logprobs=summed)
