"""How a teacher with a tokenizer of its own reads a run's problems, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spot_async.checks.questions import Asked
from spot_async.config import Config
from spot_async.errors import ConfigError
from spot_async.models.chunks import UNKNOWN, chunk_sums
from spot_async.models.files import ModelFiles
from spot_async.models.own_rows import MOST_MISPLACED
from spot_async.models.own_tokens import OwnTokens
from spot_async.models.retokenizing import Encoder
from spot_async.models.token_bytes import TokenBytes
from spot_async.protocols import Scorer
from spot_async.types import BoolArray, Float64Array, FloatArray, IntArray, PolicyNeeds, Problem

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
    """What a teacher of V tokens makes of problems with their solutions, each as a response, in N tokens."""

    known: BoolArray  # (N,)
    single: BoolArray  # (N,) a chunk of its own
    digit: BoolArray  # (N,)
    longest: int  # tokens of the student in a chunk
    read: int  # tokens that the teacher reads
    chunks: IntArray  # (V,) that start with each token of the teacher
    longer: IntArray  # (V,) of these, where the student's token is longer
    is_number: BoolArray  # (V,) whether it begins with a digit
    for_rows: bool  # many texts were read, since the policy needs rows
    unmatched: Sequence[str]  # special tokens without a counterpart
    unlike: str  # the first place that the teacher's tokenizer changes

    @property
    def longer_share(self) -> FloatArray:
        """How often (V,) the student's token is longer, where a chunk starts; 0 where none did."""
        return (self.longer / np.maximum(self.chunks, 1)).astype(np.float32)

    def placed(self, among: BoolArray | None = None) -> float:
        """Return the share of chunks whose first token of the teacher is a row's place, of some tokens (V,) or all."""
        chunks = self.chunks if among is None else np.where(among, self.chunks, 0)
        return float(chunks[self.longer_share < MOST_MISPLACED].sum() / max(1, chunks.sum()))

    def doubts(self, role: str) -> list[str]:
        """Return lines for special tokens without a counterpart, and where many places have none of the rows needed."""
        kinds = {"of the places where both tokenizers have a border": None, "of those before a number": self.is_number}
        named = ", ".join(self.unmatched[:3]) + (" and others" if len(self.unmatched) > 3 else "")
        line = f"{role}.special_tokens: no counterpart of {named}, and all behind one is unknown: give it, if there is"
        return ([line] if named else []) + [
            f"{role}.tokenizer=own: {self.placed(among):.0%} {kind} can have its distribution, and what a policy "
            "learns from distributions, it learns there alone"
            for kind, among in kinds.items()
            if self.for_rows and self.chunks[slice(None) if among is None else among].any()
            if self.placed(among) < MOST_DOUBTED
        ]

    @property
    def words(self) -> list[str]:
        """Lines for people."""
        ratio = self.read / max(1, self.known.sum())
        numbers = f", of numbers {self.placed(self.is_number):.0%}" if self.chunks[self.is_number].any() else ""
        return [
            f"{self.single.mean():.0%} of the problems' tokens one to one"
            + (f", of digits {self.single[self.digit].mean():.0%}" if self.digit.any() else "")
            + f"; longest chunk {self.longest}, the teacher reads {ratio:.2f} tokens for one",
            f"{self.known.mean():.1%} of them known" + (f", not {self.unlike}" if self.unlike else ""),
            f"{self.placed():.0%} of the chunks' starts can have its distribution{numbers}",
        ]


def read_texts(reader: OwnTokens, student: ModelFiles, problems: Sequence[Problem], needs: PolicyNeeds) -> TextsRead:
    """Let the teacher read problems, each with its solution and an end token: some, or many for what rows need."""
    tokens, longest, read, unlike = [], 0, 0, ""
    tables = reader.student.table, reader.teacher.table
    lengths = [np.array([len(content or b"") for content in table.bytes_of]) for table in tables]
    chunks, longer = np.zeros((2, len(lengths[1])), np.int32)
    size = sum(len(each.text) + len(each.solution or "") for each in problems)
    step = -(-size // MOST_BYTES_READ) if needs.teacher_rows else -(-len(problems) // TEXTS_READ)
    for problem in problems[::step]:
        ids = student.vocabulary.encode(f"{problem.text} {problem.solution or ''}".strip())
        reading = reader.read(np.append(ids, np.int32(student.vocabulary.end_token_ids[0])))
        is_known = reading.ours != UNKNOWN
        tokens_of = np.bincount(reading.ours[is_known])
        is_single = is_known.copy()
        is_single[is_known] = ((tokens_of == 1) & (np.bincount(reading.theirs) == 1))[reading.ours[is_known]]
        tokens.append([is_known, is_single, np.append(_begins_with_digit(tables[0], ids), False)])
        read += len(reading.ids)
        longest = max(longest, int(tokens_of.max(initial=0)))
        starts = [np.flatnonzero(np.diff(each, prepend=UNKNOWN) > 0)[:-1] for each in (reading.ours, reading.theirs)]
        ours, theirs = starts[0], reading.ids[starts[1]]  # all chunks but the end
        np.add.at(chunks, theirs, 1)
        np.add.at(longer, theirs[lengths[0][ids[ours]] > lengths[1][theirs]], 1)
        if not unlike and not is_known.all():
            first = int(np.argmin(is_known))
            unlike = f"{student.vocabulary.whole_text(ids[first : first + 4])!r} in problem {problem.id!r}"
    known, single, digit = np.concatenate(tokens, axis=1)
    is_number = _begins_with_digit(tables[1], np.arange(len(chunks), dtype=np.int32))
    unmatched, rows = reader.unmatched(writes=needs.teacher_responses > 0), needs.teacher_rows
    return TextsRead(known, single, digit, longest, read, chunks, longer, is_number, rows, unmatched, unlike)


def check_texts(role: str, kind: str, found: TextsRead) -> None:
    """Raise ConfigError if the teacher reads another text than is there, or has too few rows for policy `kind`."""
    if found.known.mean() < LEAST_KNOWN:
        raise ConfigError(
            f"{role}.tokenizer=own: it reads only {found.known.mean():.0%} of the tokens of the problems as "
            f"they are written, and not {found.unlike}: it rewrites text, and its scores would be of another one"
        )
    if found.for_rows and found.placed() < LEAST_PLACED:
        raise ConfigError(
            f"{role}.tokenizer=own: policy {kind} needs its distribution, and {found.placed():.0%} of the places where "
            "both tokenizers have a border can have one: use opd"
        )


class ResponsesRead(NamedTuple):
    """What a running teacher knows of the student's responses, as shares of their tokens."""

    known: float
    chunked: float  # in chunks of two or more
    rows: float  # with its distribution

    def __str__(self) -> str:
        return f"{self.known:.0%} known, {self.chunked:.0%} in chunks of several, {self.rows:.0%} with its distribution"


async def read_responses(own: OwnTokens, scorer: Scorer, asked: Asked, top_k: int, *, least: int) -> ResponsesRead:
    """Ask the teacher about the student's responses as the run does: for a `top_k`, and for the `least` at any rate."""
    parts: list[Float64Array] = []
    for prompt, reading in zip(asked.prompts, asked.readings, strict=True):
        found = np.zeros((3, len(reading.ours)))
        if len(reading.ids):
            said = await asked.scores(scorer, prompt, reading.ids, top_k=max(least, top_k))
            scores = own.scores(said, reading, top_k)
            found[:] = scores.known, scores.known & (chunk_sums(found[0] + 1, scores.chunks) > 1), scores.known_rows
        parts.append(found)
    return ResponsesRead(*np.concatenate(parts, axis=1).mean(axis=1).tolist())


def _begins_with_digit(table: TokenBytes, ids: IntArray) -> BoolArray:
    return np.array([(table.bytes_of[token_id] or b"").strip()[:1].isdigit() for token_id in ids.tolist()], np.bool_)
