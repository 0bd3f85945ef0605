"""The token ids that all models of a run have, where one tokenizer's models have softmaxes of different widths.

An id below the narrowest softmax's width means the same to all models. Some model has no row for an id beyond it, so
such an id is never sampled and never a candidate. Its probability stays where the model put it: every log-probability
and entropy is still that of the model's own whole softmax (docs/methods.md). Pure.

Axes: T response positions, N positions, K served top-k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from spot_async.types import BoolArray, FloatArray, IntArray, ScoredPositions, TokenScores


@dataclass(frozen=True)
class CommonVocabulary:
    """The token ids that all models of a run have rows for."""

    widths: Mapping[str, int] = field(default_factory=dict)  # rows of each model's softmax, by role

    @property
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

    def wider(self, scores: TokenScores, top_k: int, widest: int | None) -> int | None:
        """Return the top-k to ask the teacher for instead, if ids that are left out stand among `scores`; else None.

        It is wider by as many as may be in the way, but not beyond `widest`, the teacher's limit (None: unknown).
        """
        if self.limit is None or not top_k or _is_known(scores, self.limit, top_k).all():
            return None
        wanted = top_k + self.left_out("teacher")
        wider = min(wanted, widest or wanted)
        return wider if wider > top_k else None

    def known_to_all(self, scores: TokenScores, top_k: int) -> TokenScores:
        """Return the scores with a top-k of ids that all models have. Top-k 0 is not filtered.

        Positions that have too few such candidates are masked.
        """
        if self.limit is None or not top_k:
            return scores
        known = _is_known(scores, self.limit, top_k)
        ids, logprobs = _common_first(scores.topk_ids, scores.topk_logprobs, self.limit)
        return msgspec.structs.replace(
            scores,
            # A masked row holds ids that every model has.
            topk_ids=np.where(known[:, None], ids[:, :top_k], np.arange(top_k)).astype(np.int32),
            topk_logprobs=logprobs[:, :top_k],
            valid=scores.valid if known.all() else known,
        )


def known_positions(rows: ScoredPositions, limit: int) -> ScoredPositions:
    """Return the rows without ids that are left out, all cut to the shortest row's number of candidates."""
    ids, logprobs = _common_first(rows.topk_ids, rows.topk_logprobs, limit)
    least = int((ids < limit).sum(axis=1).min(initial=ids.shape[1]))
    return msgspec.structs.replace(rows, topk_ids=ids[:, :least], topk_logprobs=logprobs[:, :least])


def _is_known(scores: TokenScores, limit: int, top_k: int) -> BoolArray:
    """Return (T,) true where the scores are valid and the served top-k holds `top_k` common ids."""
    enough: BoolArray = (scores.topk_ids < limit).sum(axis=1) >= top_k
    return enough if scores.valid is None else enough & scores.valid


def _common_first(ids: IntArray, logprobs: FloatArray, limit: int) -> tuple[IntArray, FloatArray]:
    """Return each row (.., K) with its common ids first; both parts stay likeliest first."""
    order = np.argsort(ids >= limit, axis=1, kind="stable")
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(logprobs, order, axis=1)
