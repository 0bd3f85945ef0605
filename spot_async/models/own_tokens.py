"""Reads a student's response in the tokens of a teacher that has a tokenizer of its own.

The student's tokens are bytes. The teacher's tokenizer cuts the same bytes in its own way. Where both have a border, a
*chunk* ends: the teacher's log-probability of a chunk is the sum over its tokens there, and that is all that it says
for sure. Tokens are matched by bytes, never by their texts. Where the bytes differ, everything behind is unknown.
Pure.

Axes: T response positions, M tokens that the teacher reads, E further end tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from spot_async.errors import ConfigError, ContractError
from spot_async.models.chunks import UNKNOWN, Reading
from spot_async.models.common_vocabulary import EndScore
from spot_async.models.token_bytes import TokenBytes
from spot_async.types import IntArray, ScoredPositions, TokenScores

if TYPE_CHECKING:  # slow to import
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

SENTINELS = ("\n", ".", "x")
HAS_NO_ROWS = (
    "reads in tokens of its own (tokenizer=own): it says how likely a response is, and nothing of other tokens"
)


@dataclass(frozen=True)
class _Part:
    """What of a response is read at once: a run of text, or one token that is none. Its chunks count from 0."""

    ids: IntArray
    theirs: IntArray
    ours: IntArray
    is_whole: bool  # else nothing behind it can be read either

    @classmethod
    def one(cls, token_id: int) -> _Part:
        return cls(np.array([token_id]), np.zeros(1, np.int32), np.zeros(1, np.int32), is_whole=True)

    @property
    def chunks(self) -> int:
        return int(self.theirs.max(initial=UNKNOWN)) + 1


class OwnTokens:
    """Both tokenizers, and what is equal in them besides text: special tokens, and the ends of responses."""

    def __init__(
        self,
        student: TokenBytes,
        teacher: TokenBytes,
        tokenizer: PreTrainedTokenizerBase,
        *,
        student_ends: Sequence[int],
        teacher_ends: Sequence[int],
        end_score: EndScore = "replace",
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """`tokenizer` is the teacher's, and `student_ends` are all tokens of the student that end a response.

        `special_tokens` has the teacher's text for a special text of the student. Special tokens of equal text need no
        entry. Raises ConfigError for a text that is no token.
        """
        self._student, self._teacher = student, teacher
        self._tokenizer = _literal(tokenizer)
        self._adds_blank = b"".join(_contents(self._tokens("x"), teacher)).startswith(b" ")
        self._ends = frozenset(student_ends)
        self._end = teacher_ends[0]
        self._other_ends = np.array(teacher_ends[1:] if end_score == "sum" else (), np.int32)
        self._counterparts = _counterparts(student, teacher, special_tokens or {})
        self._is_text = ~student.special
        self._is_text[list(self._counterparts)] = False

    def read(self, response_ids: IntArray, most_tokens: int | None = None) -> Reading:
        """Return the response (T,) in the teacher's tokens, in `most_tokens` of them at most.

        If it does not end by an end token, its last chunk is unknown: had the text gone on, the teacher might have read
        that chunk in other tokens.
        """
        ended = len(response_ids) > 0 and int(response_ids[-1]) in self._ends
        pieces = self._pieces(response_ids[: len(response_ids) - ended])
        parts: list[_Part] = []
        for number, piece in enumerate(pieces, 1):
            parts.append(self._read_piece(piece, is_open=not ended and number == len(pieces)))
            if not parts[-1].is_whole:
                break
        is_whole = all(part.is_whole for part in parts)
        if ended and is_whole:
            parts.append(_Part.one(self._end))
        first_chunks = np.cumsum([0, *(part.chunks for part in parts)])
        known = _joined(
            np.where(part.ours == UNKNOWN, UNKNOWN, part.ours + first)
            for part, first in zip(parts, first_chunks, strict=False)
        )
        whole = Reading(
            ids=_joined(part.ids for part in parts),
            theirs=_joined(part.theirs + first for part, first in zip(parts, first_chunks, strict=False)),
            ours=np.concatenate([known, np.full(len(response_ids) - len(known), UNKNOWN, np.int32)]),
            added_ids=self._other_ends if ended and is_whole else self._other_ends[:0],
        )
        return whole if most_tokens is None else whole.within(max(0, most_tokens))

    def wider(self, said: TokenScores, top_k: int, widest: int | None) -> None:
        """Nothing but sums over chunks is read of what it says."""

    def scores(self, said: TokenScores, reading: Reading, top_k: int) -> TokenScores:
        """Return the sums of chunks, in even parts, as the scores of the student's tokens. There are no rows.

        A chunk is known if all tokens that the teacher read there are.
        """
        if top_k:
            raise ContractError(f"the policy asks for the teacher's top-{top_k}, and it {HAS_NO_ROWS}")
        of_chunk = np.bincount(reading.theirs, weights=said.logprobs)
        is_known = np.bincount(reading.theirs, weights=~said.known) == 0
        in_chunk = np.flatnonzero(reading.ours != UNKNOWN)
        whose = reading.ours[in_chunk]
        chunks, none = np.full(len(reading.ours), UNKNOWN, np.int32), np.zeros(len(reading.ours), np.float32)
        chunks[in_chunk] = np.where(is_known[whose], whose, UNKNOWN)
        logprobs = none.copy()
        logprobs[in_chunk] = (of_chunk / np.bincount(whose, minlength=len(of_chunk)))[whose]
        return TokenScores(
            logprobs=logprobs,
            topk_ids=np.zeros((len(chunks), 0), np.int32),
            topk_logprobs=np.zeros((len(chunks), 0), np.float32),
            entropy=none,
            entropy_lower=none,
            entropy_upper=none,
            version=said.version,
            valid=chunks != UNKNOWN,
            chunks=chunks,
            rows=np.zeros(len(chunks), np.bool_),
        )

    def positions(self, said: ScoredPositions) -> ScoredPositions:
        raise ContractError(f"the policy asks the teacher for single positions, and it {HAS_NO_ROWS}")

    def candidates(self, token_ids: IntArray) -> IntArray:
        raise ContractError(f"the policy asks the teacher about chosen tokens, and it {HAS_NO_ROWS}")

    def prefix(self, token_ids: IntArray) -> IntArray:
        raise ContractError("a teacher that reads in tokens of its own (tokenizer=own) writes no responses")

    stop = written = prefix

    def student_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token of the student; none for what has no text."""
        return self._student.bytes_of[token_id] or b""

    def _pieces(self, ids: IntArray) -> list[IntArray]:
        """Return the ids in runs of text, and each special token by itself."""
        special = ~self._is_text[ids]
        cuts = np.flatnonzero(special[1:] | special[:-1]) + 1
        return [piece for piece in np.split(ids, cuts) if len(piece)]

    def _read_piece(self, ids: IntArray, *, is_open: bool) -> _Part:
        """Read a special token or a run of text. `is_open`: nobody knows how the text goes on."""
        if self._is_text[token_id := int(ids[0])]:
            return self._read_text(ids, is_open=is_open)
        if token_id in self._counterparts:
            return _Part.one(self._counterparts[token_id])
        return _Part(ids[:0], ids[:0], np.array([UNKNOWN]), is_whole=False)

    def _read_text(self, ids: IntArray, *, is_open: bool) -> _Part:
        contents = _contents(ids.tolist(), self._student)
        content = b"".join(contents)
        text = _text_at_start(content)
        is_cut = len(contents) < len(ids) or len(text) < len(content)
        their_ids = self._encoded(text.decode())
        their_contents = _contents(their_ids, self._teacher)
        equal = _equal_bytes(text, b"".join(their_contents))
        our_ends = np.cumsum([len(each) for each in contents], dtype=np.int64)
        their_ends = np.cumsum([len(each) for each in their_contents], dtype=np.int64)
        borders = np.intersect1d(our_ends, their_ends)
        last = equal - 1 if (is_open or is_cut) and equal == len(text) else equal
        borders = borders[(borders > 0) & (borders <= last)]
        ours = np.full(len(ids), UNKNOWN, np.int32)
        ours[: len(our_ends)] = np.searchsorted(borders, our_ends)
        ours[ours == len(borders)] = UNKNOWN
        theirs = np.searchsorted(borders, their_ends).astype(np.int32)
        theirs = theirs[theirs < len(borders)]
        is_whole = not is_cut and equal == len(text)
        return _Part(np.array(their_ids[: len(theirs)], np.int32), theirs, ours, is_whole=is_whole)

    def _encoded(self, text: str) -> list[int]:
        """Return the teacher's tokens of a text that stands behind other tokens; none if nobody can tell them.

        Some tokenizers put a blank before whatever begins. So the text begins with a sentinel there, whose tokens are
        dropped.
        """
        if not (self._adds_blank and text):
            return self._tokens(text)
        for sentinel in SENTINELS:
            ids = self._tokens(sentinel + text)
            for first in range(1, 4):
                if b"".join(_contents(ids[:first], self._teacher)).lstrip(b" ") == sentinel.encode():
                    return ids[first:]
        return []

    def _tokens(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return tokens


def _literal(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return a tokenizer of its own that takes special tokens in a text for the letters that spell them."""
    from tokenizers import Tokenizer

    literal = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    literal.encode_special_tokens = True
    literal.no_truncation()
    literal.no_padding()
    return literal


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


def _contents(ids: Iterable[int], table: TokenBytes) -> list[bytes]:
    """Return the bytes of each token, up to the first that has none."""
    contents: list[bytes] = []
    for token_id in ids:
        content = table.bytes_of[token_id] if token_id < len(table.bytes_of) else None  # it has no row in the softmax
        if content is None:
            break
        contents.append(content)
    return contents


def _text_at_start(content: bytes) -> bytes:
    """Return the bytes up to the first that belongs to no character, or to one that is not finished."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return content[: error.start]
    return content


def _equal_bytes(one: bytes, other: bytes) -> int:
    """Return how many bytes both have in common at their start."""
    length = min(len(one), len(other))
    differ = np.frombuffer(one, np.uint8, length) != np.frombuffer(other, np.uint8, length)
    return int(np.argmax(differ)) if differ.any() else length


def _joined(parts: Iterable[IntArray]) -> IntArray:
    return np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32)
