"""What models of one tokenizer have in common where their softmaxes are padded to different widths.

A token id means the same to all of them as far as the narrowest softmax goes. Ids beyond it are rows that some model
lacks: they are sampled by nobody and are nobody's candidates. Their probability stays where the model put it, so every
log-probability and entropy is still that of a model's own whole softmax (docs/methods.md). Pure but for `known_to_all`.

Axes: T response positions, N positions, K served top-k.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
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
        """Ids below it are common to all; None where all softmaxes are equally wide, and nothing is left out."""
        return min(self.widths.values()) if len(set(self.widths.values())) > 1 else None

    def left_out(self, role: str) -> int:
        """Rows of the role's softmax that some other model lacks."""
        return self.widths[role] - self.limit if self.limit is not None and role in self.widths else 0

    @property
    def words(self) -> list[str]:
        """A line for each model that has rows to leave out."""
        narrow = " and ".join(role for role, width in self.widths.items() if width == self.limit)
        return [
            f"ids {self.limit} to {width - 1} of the {role} are left out, {self.left_out(role)} of its {width} softmax "
            f"rows: the {narrow} has no such rows"
            for role, width in self.widths.items()
            if self.left_out(role)
        ]


async def known_to_all(
    ask: Callable[[int], Awaitable[TokenScores]], common: CommonVocabulary, top_k: int, widest: int | None
) -> TokenScores:
    """What `ask` gives of the teacher's top-k, with candidates that all models know; with `top_k` 0 as it comes.

    Asked once more, for as many more as could be in the way, where left-out ids stand among the likeliest. `widest` is
    what the teacher serves at most; None where nobody said. Positions that even this gives too few candidates are
    masked.
    """
    asked = max(1, top_k)
    scores = await ask(asked)
    if common.limit is None or not top_k:
        return scores
    wider = min(asked + common.left_out("teacher"), widest or asked + common.left_out("teacher"))
    if wider > asked and not _is_known(scores, common.limit, top_k).all():
        scores = await ask(wider)
    known = _is_known(scores, common.limit, top_k)
    ids, logprobs = _common_first(scores.topk_ids, scores.topk_logprobs, common.limit)
    return msgspec.structs.replace(
        scores,
        # A masked row holds ids that every model has.
        topk_ids=np.where(known[:, None], ids[:, :top_k], np.arange(top_k)).astype(np.int32),
        topk_logprobs=logprobs[:, :top_k],
        valid=scores.valid if known.all() else known,
    )


def known_positions(rows: ScoredPositions, limit: int) -> ScoredPositions:
    """The same rows without left-out ids: as many candidates as every one of them has."""
    ids, logprobs = _common_first(rows.topk_ids, rows.topk_logprobs, limit)
    least = int((ids < limit).sum(axis=1).min(initial=ids.shape[1]))
    return msgspec.structs.replace(rows, topk_ids=ids[:, :least], topk_logprobs=logprobs[:, :least])


def _is_known(scores: TokenScores, limit: int, top_k: int) -> BoolArray:
    """(T,) where the served top-k holds as many common ids as were asked for, and the scores say anything at all."""
    enough: BoolArray = (scores.topk_ids < limit).sum(axis=1) >= top_k
    return enough if scores.valid is None else enough & scores.valid


def _common_first(ids: IntArray, logprobs: FloatArray, limit: int) -> tuple[IntArray, FloatArray]:
    """Each row (.., K) with its common ids first, likeliest first as before."""
    order = np.argsort(ids >= limit, axis=1, kind="stable")
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(logprobs, order, axis=1)
