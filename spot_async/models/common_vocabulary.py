"""What a token means to all models of a run, where softmaxes have different widths, or responses different ends.

Every end token means one decision, to stop: `EndTokens` swaps the student's and the teacher's in scores and
candidates.

An id below the narrowest softmax's width means the same to all models. Some model has no row for an id beyond it, so
such an id is never sampled and never a candidate. Its probability stays where the model put it: every log-probability
and entropy is still that of the model's own whole softmax (docs/methods.md). Pure.

Axes: T response positions, N positions, K served top-k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from spot_async.errors import ContractError
from spot_async.models.chunks import Reading
from spot_async.models.responses import foreign
from spot_async.types import BoolArray, FloatArray, Generation, IntArray, ScoredPositions, TokenScores

EndScore: TypeAlias = Literal["replace", "sum"]


@dataclass(frozen=True)
class CommonVocabulary:
    """The token ids that all models of a run have rows for."""

    widths: Mapping[str, int] = field(default_factory=dict)  # rows of each model's softmax, by role

    @cached_property
    def limit(self) -> int | None:
        """Ids below this are common to all models. None where all softmaxes are equally wide."""
        return min(self.widths.values()) if len(set(self.widths.values())) > 1 else None

    def left_out(self, role: str) -> int:
        """Return how many rows of the role's softmax some other model does not have."""
        return self.widths[role] - self.limit if self.limit is not None and role in self.widths else 0

    @property
    def words(self) -> list[str]:
        """One line for people for each model that has rows to leave out."""
        narrow = " and ".join(role for role, width in self.widths.items() if width == self.limit)
        return [
            f"ids {self.limit} to {width - 1} of the {role} are left out, {self.left_out(role)} of its {width} softmax "
            f"rows: the {narrow} has no such rows"
            for role, width in self.widths.items()
            if self.left_out(role)
        ]

    def wider(self, scores: TokenScores, top_k: int, widest: int | None, role: str = "teacher") -> int | None:
        """Return the top-k to ask this teacher for instead, if ids that are left out stand among `scores`; else None.

        It is wider by as many as may be in the way, but not beyond `widest`, the teacher's limit (None: unknown).
        """
        if self.limit is None or not top_k or _is_known(scores, self.limit, top_k).all():
            return None
        wanted = top_k + self.left_out(role)
        wider = min(wanted, widest or wanted)
        return wider if wider > top_k else None

    def known_to_all(self, scores: TokenScores, top_k: int) -> TokenScores:
        """Return the scores with a top-k of ids that all models have. Top-k 0 is not filtered.

        Positions that have too few such candidates are masked. All other ids belong to the tail, those left out too.
        """
        if self.limit is None or not top_k:
            return scores
        if scores.valid is None and scores.topk_ids.shape[1] == top_k and scores.topk_ids.max(initial=0) < self.limit:
            return scores
        known = _is_known(scores, self.limit, top_k)
        ids, logprobs = _common_first(scores.topk_ids, scores.topk_logprobs, self.limit)
        return msgspec.structs.replace(
            scores,
            # A masked row holds ids that every model has.
            topk_ids=np.where(known[:, None], ids[:, :top_k], np.arange(top_k)).astype(np.int32),
            topk_logprobs=logprobs[:, :top_k],
            valid=scores.valid if known.all() else known,
            tail_logprobs=tails_with(scores.tail_logprobs, logprobs[:, top_k:]),
        )


def tails_with(tails: FloatArray | None, cut: FloatArray) -> FloatArray | None:
    """Return the tails (T,) of rows from whose top-k some tokens were cut, with log-probabilities `cut` (T, C)."""
    return None if tails is None else np.logaddexp.reduce(np.column_stack([tails, cut]), axis=1)


def common_candidates(ids: IntArray, logprobs: FloatArray, limit: int | None) -> tuple[IntArray, FloatArray]:
    """Return candidates (N, K), likeliest first, without those that only some models have: ids from `limit` on.

    All rows are cut to the shortest row's number. What is cut belongs to the tail.
    """
    if limit is None:
        return ids, logprobs
    ids, logprobs = _common_first(ids, logprobs, limit)
    least = int((ids < limit).sum(axis=1).min(initial=ids.shape[1]))
    return ids[:, :least], logprobs[:, :least]


def _is_known(scores: TokenScores, limit: int, top_k: int) -> BoolArray:
    """Return (T,) true where the scores are valid and the served top-k holds `top_k` common ids."""
    enough: BoolArray = (scores.topk_ids < limit).sum(axis=1) >= top_k
    return enough if scores.valid is None else enough & scores.valid


def _common_first(ids: IntArray, logprobs: FloatArray, limit: int) -> tuple[IntArray, FloatArray]:
    """Return each row (.., K) with its common ids first; both parts stay likeliest first."""
    order = np.argsort(ids >= limit, axis=1, kind="stable")
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(logprobs, order, axis=1)


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
        """Return ids of any shape with the two end tokens swapped: the teacher's candidates, targets or responses.

        Swapping, unlike replacing, keeps candidates distinct. Applied twice it is the identity.
        """
        if self.ours == self.theirs:
            return token_ids
        others = np.where(token_ids == self.ours, self.theirs, token_ids)
        return np.where(token_ids == self.theirs, self.ours, others).astype(np.int32)

    def _ends_foreign(self, response_ids: IntArray) -> bool:
        return len(response_ids) > 0 and int(response_ids[-1]) in self._foreign


class SameTokens:
    """Reads the responses of a student that has the same tokens, except for their ends and rows of its own.

    `OwnTokens` has the same methods for a teacher with another tokenizer. What the teacher says becomes what it says of
    the student's tokens (`scores`, `positions`, `written`), and what it is asked becomes its own (the others).
    """

    ends: tuple[int, ...] | None = None  # what ends its responses ends the student's
    most_for_one = 1

    def __init__(self, ends: EndTokens, common: CommonVocabulary, role: str = "teacher") -> None:
        self._ends, self._common, self._role = ends, common, role
        self.prefix = self.stop = ends.swapped
        self.limit = common.limit

    def read(self, response_ids: IntArray, most_tokens: int | None = None) -> Reading:
        """Return the response (T,) as the teacher scores it. The plan has seen to it that it is not too long."""
        ids = self._ends.as_teachers(response_ids)
        chunks = np.arange(len(ids), dtype=np.int32)
        starts = np.zeros(len(ids), np.int32)
        return Reading(ids, chunks, chunks, starts, starts, self._ends.summed_with_last(response_ids))

    def wider(self, said: TokenScores, top_k: int, widest: int | None) -> int | None:
        """Return the top-k to ask for instead of `top_k`, if the student has too few of those that were served."""
        return self._common.wider(self._in_ours(said), top_k, widest, self._role)

    def scores(self, said: TokenScores, reading: Reading, top_k: int) -> TokenScores:
        return self._common.known_to_all(self._in_ours(said), top_k)

    def positions(self, said: ScoredPositions) -> ScoredPositions:
        ids, logprobs = common_candidates(self._ends.swapped(said.topk_ids), said.topk_logprobs, self._common.limit)
        return msgspec.structs.replace(said, topk_ids=ids, topk_logprobs=logprobs)

    def candidates(self, token_ids: IntArray) -> IntArray:
        if (limit := self._common.limit) is not None and token_ids.max(initial=0) >= limit:
            raise ContractError(
                f"the policy asks teacher_candidates about token {token_ids.max()}, and only those below {limit} "
                "are common to all models: leave others out by `common_candidates`; they belong to the tail"
            )
        return self._ends.swapped(token_ids)

    def written(self, response: Generation, *, is_start: bool) -> Generation:
        return foreign(msgspec.structs.replace(response, token_ids=self._ends.swapped(response.token_ids)))

    def _in_ours(self, said: TokenScores) -> TokenScores:
        return msgspec.structs.replace(said, topk_ids=self._ends.swapped(said.topk_ids))


def with_summed_last(scores: TokenScores, logprobs: FloatArray) -> TokenScores:
    """Add to the last token's probability those of other tokens in its place, with log-probabilities (E,)."""
    summed = scores.logprobs.copy()
    # Rounding may take the sum past 1.
    summed[-1] = min(np.logaddexp.reduce([summed[-1], *logprobs], dtype=np.float64), 0.0)
    return msgspec.structs.replace(scores, logprobs=summed)
