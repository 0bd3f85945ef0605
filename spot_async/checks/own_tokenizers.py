"""How a teacher with a tokenizer of its own reads a run's problems, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spot_async.config import Config
from spot_async.errors import ConfigError
from spot_async.models.chunks import UNKNOWN
from spot_async.models.files import ModelFiles
from spot_async.models.own_tokens import OwnTokens
from spot_async.models.token_bytes import TokenBytes
from spot_async.types import Problem

TEXTS_READ = 200
LEAST_KNOWN = 0.95  # of the tokens of these texts


def read_own_tokens(
    config: Config, role: str, student: ModelFiles, teacher: ModelFiles, ends: Sequence[int]
) -> OwnTokens:
    """Return how the teacher reads the student's tokens. `ends`: all that end a response, in the student's tokens.

    Raises ConfigError for tokenizers that do not say enough.
    """
    try:
        return OwnTokens(
            TokenBytes(student.vocabulary.tokenizer, student.vocab_size),
            TokenBytes(teacher.vocabulary.tokenizer, teacher.vocab_size),
            teacher.vocabulary.tokenizer,
            student_ends=ends,
            teacher_ends=teacher.vocabulary.end_token_ids,
            end_score=config.stages.score.end_token,
            special_tokens=config.teachers_by_role[role].special_tokens,
        )
    except ConfigError as error:
        raise ConfigError(f"{role}.tokenizer=own: {error}") from None


@dataclass(frozen=True)
class TextsRead:
    """What a teacher makes of problems with their solutions, each as a response."""

    tokens: int
    known: int
    singles: int  # tokens that are a chunk of their own
    digits: int  # tokens of digits alone
    single_digits: int
    longest: int  # tokens of the student in a chunk
    read: int  # tokens that the teacher reads
    unlike: str = ""  # the first place that the teacher's tokenizer changes

    @property
    def words(self) -> list[str]:
        """Lines for people."""
        ratio = self.read / max(1, self.known)
        return [
            f"{self.singles / self.tokens:.0%} of the problems' tokens one to one"
            + (f", of digits {self.single_digits / self.digits:.0%}" if self.digits else "")
            + f"; longest chunk {self.longest}, the teacher reads {ratio:.2f} tokens for one",
            f"{self.known / self.tokens:.1%} of them known" + (f", not {self.unlike}" if self.unlike else ""),
        ]


def read_texts(own_tokens: OwnTokens, student: ModelFiles, problems: Sequence[Problem]) -> TextsRead:
    """Let the teacher read some of the problems, each with its solution and an end token."""
    sums, longest, unlike = np.zeros(6, np.int64), 0, ""
    for problem in problems[:: -(-len(problems) // TEXTS_READ)]:
        ids = student.vocabulary.encode(f"{problem.text} {problem.solution or ''}".strip())
        reading = own_tokens.read(np.append(ids, np.int32(student.vocabulary.end_token_ids[0])))
        is_known = reading.ours != UNKNOWN
        tokens_of = np.bincount(reading.ours[is_known])
        is_single = is_known.copy()
        is_single[is_known] = tokens_of[reading.ours[is_known]] == 1
        is_digit = np.array(
            [*(own_tokens.student_bytes(token_id).strip().isdigit() for token_id in ids.tolist()), False]
        )
        sums += [
            *(len(is_known), is_known.sum(), is_single.sum()),
            *(is_digit.sum(), (is_digit & is_single).sum(), len(reading.ids)),
        ]
        longest = max(longest, int(tokens_of.max(initial=0)))
        if not unlike and not is_known.all():
            first = int(np.argmin(is_known))
            unlike = f"{student.vocabulary.whole_text(ids[first : first + 4])!r} in problem {problem.id!r}"
    tokens, known, singles, digits, single_digits, read = sums.tolist()
    return TextsRead(tokens, known, singles, digits, single_digits, longest, read, unlike)


def check_texts(role: str, found: TextsRead) -> None:
    """Raise ConfigError if the teacher's tokenizer reads another text than is there."""
    if found.known < LEAST_KNOWN * found.tokens:
        raise ConfigError(
            f"{role}.tokenizer=own: it reads only {found.known / found.tokens:.0%} of the tokens of the problems as "
            f"they are written, and not {found.unlike}: it rewrites text, and its scores would be of another one"
        )
