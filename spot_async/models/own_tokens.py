"""How a teacher that has a tokenizer of its own reads a student's response, and writes one.

The teacher's log-probability of a *chunk* (`models/chunks.py`) is the sum over its tokens there, and that is all that
it says for sure. Pure.

Axes: T response positions, M tokens that the teacher reads, E further end tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from spot_async.errors import ConfigError, ContractError, PermanentError
from spot_async.models.chunks import UNKNOWN, Reading
from spot_async.models.common_vocabulary import EndScore
from spot_async.models.own_rows import Placement, Rows
from spot_async.models.responses import foreign
from spot_async.models.retokenizing import Encoder, Retokenizer
from spot_async.models.token_bytes import TokenBytes
from spot_async.types import NO_TOKEN, FloatArray, Generation, IntArray, ScoredPositions, TokenScores

NOT_ASKED = "reads in tokens of its own (tokenizer=own), and nobody knows which of them these would be"


class OwnTokens:
    """Both tokenizers, and what is equal in them besides text: special tokens, and the ends of responses."""

    limit: int | None = None  # it may write all of its tokens
    most_for_one = 2  # tokens that it may write for one of the student's; a text that is too long is cut

    def __init__(
        self,
        student: Encoder,
        teacher: Encoder,
        *,
        student_ends: Sequence[int],
        teacher_ends: Sequence[int],
        end_score: EndScore = "replace",
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """`student_ends` are all tokens of the student that end a response. The first is what the teacher's become.

        `special_tokens` has the teacher's text for a special text of the student. Special tokens of equal text need no
        entry. Raises ConfigError for a text that is no token.
        """
        self.student, self.teacher = student, teacher
        self._student_ends, self.ends = frozenset(student_ends), tuple(teacher_ends)
        self._other_ends = np.array(teacher_ends[1:] if end_score == "sum" else (), np.int32)
        known = _counterparts(student.table, teacher.table, special_tokens or {}).items()
        self._counterparts = {ours: its for ours, its in known if ours < len(student.table.bytes_of)}
        ours_of = {its: ours for ours, its in self._counterparts.items()} | {teacher_ends[0]: student_ends[0]}
        self._ours_of = {its: ours for its, ours in ours_of.items() if its < len(teacher.table.bytes_of)}
        self._to_teacher = Retokenizer(
            student.table, teacher, counterparts=self._counterparts, ends=self._student_ends, end=teacher_ends[0]
        )
        self._to_student = Retokenizer(
            teacher.table, student, counterparts=self._ours_of, ends=frozenset(teacher_ends), end=student_ends[0]
        )
        self._placement: Placement | None = None

    def unmatched(self, *, writes: bool) -> list[str]:
        """Return special tokens that the other has not: the student's, and the teacher's if it `writes`."""
        sides = [(self.student.table, {*self._counterparts, *self._student_ends})]
        sides += [(self.teacher.table, {*self._ours_of, *self.ends})] if writes else []
        found = ((table, set(np.flatnonzero(table.special)) - known - table.outside) for table, known in sides)
        return [str(table.names[token_id]) for table, missing in found for token_id in sorted(missing)]

    def with_rows(self, longer: FloatArray) -> OwnTokens:
        """Return the same with rows. `longer` (V,): how often the student goes on where a token of the teacher ends."""
        placed = copy.copy(self)
        special = self._ours_of | dict.fromkeys(self.ends[1:], NO_TOKEN)
        placed._placement = Placement(self.teacher.table, self.student, special, longer)
        return placed

    def read(self, response_ids: IntArray, most_tokens: int | None = None) -> Reading:
        """Return the response (T,) in the teacher's tokens, in `most_tokens` of them at most.

        If it does not end by an end token, its last chunk is unknown: had the text gone on, the teacher might have read
        that chunk in other tokens.
        """
        whole = self._to_teacher.read(response_ids)
        if len(response_ids) and int(response_ids[-1]) in self._student_ends and whole.ours[-1] != UNKNOWN:
            whole = replace(whole, added_ids=self._other_ends)
        return whole if most_tokens is None else whole.within(max(0, most_tokens))

    def wider(self, said: TokenScores, top_k: int, widest: int | None) -> None:
        """Rows that hold fewer of the student's tokens than were asked for have no others."""

    def scores(self, said: TokenScores, reading: Reading, top_k: int) -> TokenScores:
        """Return the sums of chunks, in even parts, as the scores of the student's tokens, and rows.

        A chunk is known if all tokens that the teacher read there are. The first is not if one of both begins whatever
        it writes with a blank: the teacher reads that chunk otherwise than it would write it.
        """
        if said.chunks is not None:
            reading = reading.joined(said.chunks)
        of_chunk = np.bincount(reading.theirs, weights=said.logprobs)
        is_known = np.bincount(reading.theirs, weights=~said.known) == 0
        if self.teacher.adds_blank != self.student.adds_blank:
            is_known[:1] = False
        in_chunk = np.flatnonzero(reading.ours != UNKNOWN)
        whose = reading.ours[in_chunk]
        chunks, logprobs = np.full(len(reading.ours), UNKNOWN, np.int32), np.zeros(len(reading.ours), np.float32)
        chunks[in_chunk] = np.where(is_known[whose], whose, UNKNOWN)
        logprobs[in_chunk] = (of_chunk / np.bincount(whose, minlength=len(of_chunk)))[whose]
        rows, placement = Rows.none(len(chunks), top_k), self._placement
        if top_k:
            if placement is None:
                raise ContractError("the policy asks for the teacher's top-k, and its needs do not state it")
            rows = placement.rows(said, reading, np.flatnonzero(chunks != UNKNOWN), top_k)
        return TokenScores(
            logprobs=logprobs,
            topk_ids=rows.ids,
            topk_logprobs=rows.logprobs,
            entropy=(rows.entropy_lower + rows.entropy_upper) / np.float32(2),
            entropy_lower=rows.entropy_lower,
            entropy_upper=rows.entropy_upper,
            version=said.version,
            valid=chunks != UNKNOWN,
            chunks=chunks,
            rows=rows.valid,
        )

    def positions(self, said: ScoredPositions) -> ScoredPositions:
        raise ContractError(f"the policy asks the teacher for single positions, and it {NOT_ASKED}")

    def candidates(self, token_ids: IntArray) -> IntArray:
        raise ContractError(f"the policy asks the teacher about chosen tokens, and it {NOT_ASKED}")

    def prefix(self, token_ids: IntArray) -> IntArray:
        """Return what the teacher continues. Raises PermanentError if it has no tokens for all of it."""
        reading = self._to_teacher.read(token_ids, as_it_stands=True)
        if (reading.ours == UNKNOWN).any():
            known = int((reading.ours != UNKNOWN).sum())
            raise PermanentError(
                f"the teacher is to continue {len(token_ids)} tokens, and has none of its own for those from {known} on"
            )
        return reading.ids

    def stop(self, token_ids: IntArray) -> IntArray:
        """Return its tokens for those at which it stops besides its ends. Raises ContractError for one of text."""
        try:
            return np.array([self._counterparts[token_id] for token_id in token_ids.tolist()], np.int32)
        except KeyError as error:
            raise ContractError(f"the policy stops the teacher at token {error}, and it {NOT_ASKED}") from None

    def written(self, response: Generation, *, is_start: bool) -> Generation:
        """Return a response of the teacher in the student's tokens, without log-probabilities: no student sampled it.

        It stops before the first byte that is no text, or special token that the student does not have. Some tokenizers
        begin whatever they write with a blank, which at the start of a response is none of the text.
        """
        blank = b" " if is_start and self.teacher.adds_blank and not self.student.adds_blank else b""
        reading = self._to_student.read(response.token_ids, as_it_stands=True, without=blank)
        is_whole = (reading.ours != UNKNOWN).all()
        return foreign(
            Generation(
                token_ids=reading.ids,
                logprobs=np.zeros(len(reading.ids), np.float32),
                finish_reason=response.finish_reason if is_whole else "length",
                version_spans=(),
            )
        )


def _counterparts(student: TokenBytes, teacher: TokenBytes, named: Mapping[str, str]) -> dict[int, int]:
    """Return the teacher's token for each token of the student that is no text. Unknown texts have none."""
    theirs = {token.content: token_id for token_id, token in teacher.added.items()}
    equal = {
        token_id: theirs[token.content]
        for token_id, token in student.added.items()
        if token.content in theirs and token_id != student.unknown
        if token.special or teacher.added[theirs[token.content]].special
    }
    return equal | {
        _id_of(student, ours, "the student's tokenizer"): _id_of(teacher, its, "the teacher's tokenizer")
        for ours, its in named.items()
    }


def _id_of(table: TokenBytes, name: str, whose: str) -> int:
    try:
        return table.names.index(name)
    except ValueError:
        raise ConfigError(f"teacher.special_tokens: {name!r} is no token of {whose}") from None
