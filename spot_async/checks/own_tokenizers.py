"""How a teacher with a tokenizer of its own reads a run's problems, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spot_async.config import Config
from spot_async.errors import ConfigError
from spot_async.models.chunks import UNKNOWN
from spot_async.models.files import ModelFiles
from spot_async.models.own_rows import MOST_MISPLACED
from spot_async.models.own_tokens import OwnTokens
from spot_async.models.retokenizing import Encoder
from spot_async.models.token_bytes import TokenBytes
from spot_async.types import BoolArray, FloatArray, Int64Array, IntArray, Problem

TEXTS_READ = 200
MOST_BYTES_READ = 1 << 20  # of texts that say how often the student's token is longer
LEAST_KNOWN = 0.95  # of the tokens of these texts
LEAST_PLACED, MOST_DOUBTED = 0.4, 0.8  # of the places where chunks start


def read_own_tokens(
    config: Config, role: str, student: ModelFiles, teacher: ModelFiles, ends: Sequence[int]
) -> OwnTokens:
    """Return how the teacher reads the student's tokens. `ends`: all that end a response, in the student's tokens.

    Raises ConfigError for tokenizers that do not say enough.
    """
    try:
        return OwnTokens(
            *(Encoder(each.vocabulary.tokenizer, each.vocab_size) for each in (student, teacher)),
            student_ends=ends,
            teacher_ends=teacher.vocabulary.end_token_ids,
            end_score=config.stages.score.end_token,
            special_tokens=config.teachers_by_role[role].special_tokens,
        )
    except ConfigError as error:
        raise ConfigError(f"{role}.tokenizer=own: {error}") from None


@dataclass(frozen=True)
class TextsRead:
    """What a teacher makes of problems with their solutions, each as a response. V tokens of the teacher."""

    tokens: int
    known: int
    singles: int  # tokens that are a chunk of their own
    digits: int  # tokens of digits alone
    single_digits: int
    longest: int  # tokens of the student in a chunk
    read: int  # tokens that the teacher reads
    chunks: IntArray  # (V,) that start with each token of the teacher
    longer: IntArray  # (V,) of these, where the student's token is longer
    is_number: BoolArray  # (V,) whether it begins with a digit
    for_rows: bool  # many texts were read, since the policy needs rows
    unlike: str = ""  # the first place that the teacher's tokenizer changes

    @property
    def longer_share(self) -> FloatArray:
        """How often (V,) the student's token is longer, where a chunk starts; 0 where none did."""
        return (self.longer / np.maximum(self.chunks, 1)).astype(np.float32)

    def placed(self, among: BoolArray | None = None) -> float:
        """Return the share of chunks whose first token of the teacher is a row's place, of some tokens (V,) or all."""
        chunks = self.chunks if among is None else np.where(among, self.chunks, 0)
        return float(chunks[self.longer_share < MOST_MISPLACED].sum() / max(1, chunks.sum()))

    def doubts(self, role: str) -> list[str]:
        """Return a line for each kind of place of which many can have no row, where the policy needs rows."""
        kinds = {"of the places where both tokenizers have a border": None, "of those before a number": self.is_number}
        return [
            f"{role}.tokenizer=own: {self.placed(among):.0%} {kind} can have its distribution, and what a policy "
            "learns from distributions, it learns there alone"
            for kind, among in kinds.items()
            if self.for_rows and self.chunks[slice(None) if among is None else among].any()
            if self.placed(among) < MOST_DOUBTED
        ]

    @property
    def words(self) -> list[str]:
        """Lines for people."""
        ratio = self.read / max(1, self.known)
        numbers = f", of numbers {self.placed(self.is_number):.0%}" if self.chunks[self.is_number].any() else ""
        return [
            f"{self.singles / self.tokens:.0%} of the problems' tokens one to one"
            + (f", of digits {self.single_digits / self.digits:.0%}" if self.digits else "")
            + f"; longest chunk {self.longest}, the teacher reads {ratio:.2f} tokens for one",
            f"{self.known / self.tokens:.1%} of them known" + (f", not {self.unlike}" if self.unlike else ""),
            f"{self.placed():.0%} of the chunks' starts can have its distribution{numbers}",
        ]


def read_texts(own_tokens: OwnTokens, student: ModelFiles, problems: Sequence[Problem], *, rows: bool) -> TextsRead:
    """Let the teacher read problems, each with its solution and an end token: some, or many for what `rows` need."""
    sums, longest, unlike = np.zeros(6, np.int64), 0, ""
    lengths = [_lengths(each.table) for each in (own_tokens.student, own_tokens.teacher)]
    chunks, longer = np.zeros((2, len(lengths[1])), np.int32)
    size = sum(len(each.text) + len(each.solution or "") for each in problems)
    step = -(-size // MOST_BYTES_READ) if rows else -(-len(problems) // TEXTS_READ)
    for problem in problems[::step]:
        ids = student.vocabulary.encode(f"{problem.text} {problem.solution or ''}".strip())
        reading = own_tokens.read(np.append(ids, np.int32(student.vocabulary.end_token_ids[0])))
        is_known = reading.ours != UNKNOWN
        tokens_of = np.bincount(reading.ours[is_known])
        is_single = is_known.copy()
        is_single[is_known] = ((tokens_of == 1) & (np.bincount(reading.theirs) == 1))[reading.ours[is_known]]
        is_digit = np.append(_begins_with_digit(own_tokens.student.table, ids), False)
        sums += [
            *(len(is_known), is_known.sum(), is_single.sum()),
            *(is_digit.sum(), (is_digit & is_single).sum(), len(reading.ids)),
        ]
        longest = max(longest, int(tokens_of.max(initial=0)))
        starts = [np.flatnonzero(np.diff(each, prepend=UNKNOWN) > 0)[:-1] for each in (reading.ours, reading.theirs)]
        ours, theirs = starts[0], reading.ids[starts[1]]  # all chunks but the end
        np.add.at(chunks, theirs, 1)
        np.add.at(longer, theirs[lengths[0][ids[ours]] > lengths[1][theirs]], 1)
        if not unlike and not is_known.all():
            first = int(np.argmin(is_known))
            unlike = f"{student.vocabulary.whole_text(ids[first : first + 4])!r} in problem {problem.id!r}"
    tokens, known, singles, digits, single_digits, read = sums.tolist()
    is_number = _begins_with_digit(own_tokens.teacher.table, np.arange(len(chunks), dtype=np.int32))
    return TextsRead(
        tokens, known, singles, digits, single_digits, longest, read, chunks, longer, is_number, rows, unlike
    )


def check_texts(role: str, kind: str, found: TextsRead) -> None:
    """Raise ConfigError if the teacher reads another text than is there, or has too few rows for policy `kind`."""
    if found.known < LEAST_KNOWN * found.tokens:
        raise ConfigError(
            f"{role}.tokenizer=own: it reads only {found.known / found.tokens:.0%} of the tokens of the problems as "
            f"they are written, and not {found.unlike}: it rewrites text, and its scores would be of another one"
        )
    if found.for_rows and found.placed() < LEAST_PLACED:
        raise ConfigError(
            f"{role}.tokenizer=own: policy {kind} needs its distribution, and {found.placed():.0%} of the places where "
            "both tokenizers have a border can have one: use opd"
        )


def _lengths(table: TokenBytes) -> Int64Array:
    return np.array([len(content or b"") for content in table.bytes_of])


def _begins_with_digit(table: TokenBytes, ids: IntArray) -> BoolArray:
    return np.array([(table.bytes_of[token_id] or b"").strip()[:1].isdigit() for token_id in ids.tolist()], np.bool_)
