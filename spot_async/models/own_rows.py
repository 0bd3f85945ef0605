"""What a teacher with its own tokens says of the student's next token, where that can be told.

A candidate of the teacher is a text, and its probability belongs to the first token that the student has for that text.
Three things stand between, and each has its rule.

* The student often goes on behind a candidate's text (a teacher's `1`, a student's `144`). Nobody knows which of the
  student's tokens it would become, so it belongs to the tail, and a row that has much of it is no row.
* The teacher's token before may have gone on (it read `1` and might have said `15`). Its row at that token says how
  likely. So a row is a mixture: of what comes behind the token as it ended, and of what longer tokens go on with.
* The student's token may begin inside one of the teacher's (behind the `1` of `15`). Then longer ones say how it goes
  on. What would follow had it ended there is not known, and belongs to the tail.

Pure. Axes: T response positions, C rows, K candidates, M tokens that the teacher reads, V tokens of the teacher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from spot_async.models.chunks import Reading
from spot_async.models.retokenizing import Encoder
from spot_async.models.token_bytes import TokenBytes
from spot_async.types import (
    LEAST_NATS,
    NO_TOKEN,
    BoolArray,
    Float64Array,
    FloatArray,
    Int64Array,
    IntArray,
    TokenScores,
)

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
        lower, upper = np.zeros((2, count), np.float32)
        logprobs = np.full((count, top_k), LEAST_NATS, np.float32)
        return cls(np.full((count, top_k), NO_TOKEN, np.int32), logprobs, lower, upper, np.zeros(count, np.bool_))


class Placement:
    """Which token of the student each token of the teacher begins with, and how often it would be another."""

    def __init__(self, teacher: TokenBytes, student: Encoder, special: Mapping[int, int], longer: FloatArray) -> None:
        """`special` has the student's token for each of the teacher's that is none of text, or `NO_TOKEN`.

        `longer` (V,) is the share of texts with that token where the student's token there is longer.
        """
        self._teacher, self._student = teacher, student
        self._width = len(student.table.bytes_of)
        self._first = np.array([self._first_token(content or b"") for content in teacher.bytes_of], np.int64)
        self._first[teacher.special] = NO_TOKEN
        self._first[list(special)] = list(special.values())
        self._longer = longer
        self._rests: dict[bytes, int] = {}

    def rows(self, said: TokenScores, reading: Reading, positions: Int64Array, top_k: int) -> Rows:
        """Return rows (T,), of which those at positions (C,) of the response are known to the teacher."""
        masses, is_row = np.exp(said.topk_logprobs.astype(np.float64)), said.known_rows
        scale = max(reading.our_starts.max(initial=0), reading.their_starts.max(initial=0)) + 1
        places = reading.ours[positions].astype(np.int64) * scale + reading.our_starts[positions]
        begins = reading.theirs.astype(np.int64) * scale + reading.their_starts
        token = np.searchsorted(begins, places, side="right") - 1  # the teacher's that begins there, or holds the place
        is_start = begins[token] == places
        parts: list[tuple[int, int, float]] = []  # row, token of the student, its probability
        behind, unsure = np.ones(len(positions)), np.zeros(len(positions))
        for row, last in enumerate(np.where(is_start, token - 1, token).tolist()):
            if last < 0 or self._teacher.special[reading.ids[last]]:
                continue  # nothing else goes on behind that
            content = self._teacher.bytes_of[reading.ids[last]] or b""
            read = content if is_start[row] else content[: places[row] - begins[last]]
            ended, longer = self._going_on(said.topk_ids[last], masses[last], read)
            if is_start[row]:
                ended = float(np.exp(said.logprobs[last]))
            total = ended + sum(mass for _, mass in longer)
            behind[row] = ended / total if total else 0.0
            parts += [(row, student_token, mass / total) for student_token, mass in longer]
            if not is_start[row]:  # what its row does not show may go on like this, too
                hidden = max(0.0, 1.0 - float(masses[last].sum()))
                unsure[row] = hidden / (total + hidden) if hidden else 0.0
            if not is_row[last]:
                unsure[row] = 1.0
        rows = np.flatnonzero(is_start & (behind > 0))
        ids, ahead = said.topk_ids[token[rows]], masses[token[rows]] * behind[rows, None]
        longer_share = self._longer[ids]
        unsure[rows] += (ahead * longer_share).sum(axis=1)
        unsure[rows[~is_row[token[rows]]]] = 1.0
        first = np.where(longer_share > OFTEN_LONGER, NO_TOKEN, self._first[ids])
        of_row, candidate = np.nonzero(first != NO_TOKEN)
        going_on = np.array(parts).reshape(-1, 3)
        found = self._joined(
            positions[np.concatenate([rows[of_row], going_on[:, 0].astype(np.int64)])],
            np.concatenate([first[of_row, candidate], going_on[:, 1].astype(np.int64)]),
            np.concatenate([ahead[of_row, candidate], going_on[:, 2]]),
            len(reading.ours),
            top_k,
        )
        found.valid[positions] = (unsure < MOST_MISPLACED) & (found.ids[positions, :1] != NO_TOKEN).all(axis=1)
        return found

    def _going_on(self, ids: IntArray, masses: Float64Array, read: bytes) -> tuple[float, list[tuple[int, float]]]:
        """Return how likely the token ends behind what was read, and how longer ones go on: the student's tokens."""
        ended, longer = 0.0, []
        for token_id, mass in zip(ids.tolist(), masses.tolist(), strict=True):
            content = self._teacher.bytes_of[token_id] or b""
            if not content.startswith(read) or self._teacher.special[token_id]:
                continue
            rest = content.removeprefix(read)
            if rest and rest not in self._rests:
                self._rests[rest] = self._first_token(rest)
            if rest:
                longer.append((self._rests[rest], mass))
            else:
                ended += mass
        return ended, longer

    def _joined(self, rows: Int64Array, tokens: Int64Array, masses: Float64Array, count: int, top_k: int) -> Rows:
        """Return rows of probabilities (N,) of tokens (N,). What is the same token of a row is one."""
        placed = tokens != NO_TOKEN
        cells, cell_of = np.unique(rows[placed] * self._width + tokens[placed], return_inverse=True)
        mass = np.bincount(cell_of, weights=masses[placed], minlength=len(cells)).astype(np.float64)
        row = cells // self._width
        order = np.lexsort((-mass, row))
        row, cells, mass = row[order], cells[order] % self._width, mass[order]
        rank = np.arange(len(row)) - np.searchsorted(row, row)
        found = Rows.none(count, top_k)
        kept = rank < top_k
        found.ids[row[kept], rank[kept]] = cells[kept]
        found.logprobs[row[kept], rank[kept]] = np.log(np.maximum(mass[kept], np.exp(LEAST_NATS)))
        widths = np.bincount(row, minlength=count)
        others = np.clip(1.0 - np.bincount(row, weights=mass, minlength=count), 0.0, 1.0)
        known = np.bincount(row, weights=_surprise(mass), minlength=count)
        found.entropy_lower[:] = known + _surprise(others)
        found.entropy_upper[:] = known + _surprise(others) + others * np.log(np.maximum(self._width - widths, 1))
        return found

    def _first_token(self, content: bytes) -> int:
        """Return the first token of the student for a text; `NO_TOKEN` for what is no whole text."""
        try:
            ids = self._student.encode(content.decode())
        except UnicodeDecodeError:
            return NO_TOKEN
        return ids[0] if ids and ids[0] < self._width else NO_TOKEN


def _surprise(mass: Float64Array) -> Float64Array:
    """Return `-p log p` of each, 0 where p is 0."""
    return -mass * np.log(np.where(mass > 0, mass, 1.0))
