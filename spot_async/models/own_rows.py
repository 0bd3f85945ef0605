"""Places the distribution of a teacher with its own tokens on those of the student, where a chunk starts.

There a candidate of the teacher is a text, and its probability belongs to the first token that the student has for
that text. Where the student often goes on behind that text (a teacher's `1`, a student's `144`), nobody knows which of
its tokens the candidate would become. Such candidates belong to the tail, and rows that have much of them are no rows.
Pure.

Axes: T response positions, C rows, K candidates, V tokens of the teacher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from spot_async.models.retokenizing import Encoder
from spot_async.models.token_bytes import TokenBytes
from spot_async.types import LEAST_NATS, NO_TOKEN, BoolArray, Float64Array, FloatArray, IntArray, TokenScores

MOST_MISPLACED = 0.05  # of a row's probability, expected on other tokens than where it is placed
OFTEN_LONGER = 0.5  # a candidate behind which the student goes on so often has no place


@dataclass(frozen=True)
class Rows:
    """Rows of TokenScores at T positions. A row of fewer than K tokens ends in `NO_TOKEN`."""

    ids: IntArray  # (T, K) descending by probability
    logprobs: FloatArray  # (T, K)
    entropy_lower: FloatArray  # (T,) nats: all other tokens are one
    entropy_upper: FloatArray  # (T,) nats: all other tokens are equally likely
    valid: BoolArray  # (T,)

    @classmethod
    def none(cls, count: int, top_k: int) -> Rows:
        """Return rows of which nothing is known."""
        shape = (count, top_k)
        logprobs = np.full(shape, LEAST_NATS, np.float32)
        lower, upper = np.zeros((2, count), np.float32)
        return cls(np.full(shape, NO_TOKEN, np.int32), logprobs, lower, upper, np.zeros(count, np.bool_))

    def put(self, positions: IntArray, rows: Rows) -> None:
        """Put the rows (N,) at positions (N,)."""
        for own, other in zip(vars(self).values(), vars(rows).values(), strict=True):
            own[positions] = other


class Placement:
    """Which token of the student each token of the teacher begins with, and how often it would be another."""

    def __init__(self, teacher: TokenBytes, student: Encoder, special: Mapping[int, int], longer: FloatArray) -> None:
        """`special` has the student's token for each of the teacher's that is none of text, or `NO_TOKEN`.

        `longer` (V,) is the share of texts with that token where the student's token there is longer.
        """
        self._first = np.array([_first_token(content, student) for content in teacher.bytes_of], np.int64)
        self._first[teacher.special] = NO_TOKEN
        self._first[list(special)] = list(special.values())
        self._width = len(student.table.bytes_of)
        self._first[self._first >= self._width] = NO_TOKEN  # it has no row in the student's softmax
        self._longer = longer

    def rows(self, said: TokenScores, positions: IntArray, top_k: int) -> Rows:
        """Return rows (C,) of the student's tokens, of those that the teacher has at positions (C,) of its own."""
        ids, masses = said.topk_ids[positions], np.exp(said.topk_logprobs[positions].astype(np.float64))
        longer = self._longer[ids]
        first = np.where(longer > OFTEN_LONGER, NO_TOKEN, self._first[ids])
        row, candidate = np.nonzero(first != NO_TOKEN)
        # Candidates that begin with the same token of the student are one.
        cells, cell_of = np.unique(row * self._width + first[row, candidate], return_inverse=True)
        mass = np.bincount(cell_of, weights=masses[row, candidate], minlength=len(cells)).astype(np.float64)
        row = cells // self._width
        order = np.lexsort((-mass, row))
        row, cells, mass = row[order], cells[order] % self._width, mass[order]
        rank = np.arange(len(row)) - np.searchsorted(row, row)
        found = Rows.none(len(positions), top_k)
        kept = rank < top_k
        found.ids[row[kept], rank[kept]] = cells[kept]
        found.logprobs[row[kept], rank[kept]] = np.log(np.maximum(mass[kept], np.exp(LEAST_NATS)))
        widths = np.bincount(row, minlength=len(positions))
        others = np.clip(1.0 - np.bincount(row, weights=mass, minlength=len(positions)), 0.0, 1.0)
        known = np.bincount(row, weights=_surprise(mass), minlength=len(positions))
        found.entropy_lower[:] = known + _surprise(others)
        found.entropy_upper[:] = known + _surprise(others) + others * np.log(np.maximum(self._width - widths, 1))
        found.valid[:] = ((masses * longer).sum(axis=1) < MOST_MISPLACED) & (widths > 0)
        return found


def _first_token(content: bytes | None, student: Encoder) -> int:
    """Return the first token of the student for a text; `NO_TOKEN` for what is no whole text."""
    try:
        ids = student.encode((content or b"").decode())
    except UnicodeDecodeError:
        return NO_TOKEN
    return ids[0] if ids else NO_TOKEN


def _surprise(mass: Float64Array) -> Float64Array:
    """Return `-p log p` of each, 0 where p is 0."""
    return -mass * np.log(np.where(mass > 0, mass, 1.0))
