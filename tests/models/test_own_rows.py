"""What a teacher with its own tokens says of the student's next token: against the texts that its tokens begin."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import numpy as np
import pytest
from tiny_tokenizers import END, KINDS, PAIRS, START, THINK, of_bytes, own, response

from spot_async.models.own_tokens import OwnTokens
from spot_async.models.retokenizing import Encoder
from spot_async.testing.services import token_scores
from spot_async.types import LEAST_NATS, NO_TOKEN, TokenScores


def with_rows(pair: OwnTokens, longer: dict[str, float]) -> OwnTokens:
    table = pair.teacher.table
    return pair.with_rows(np.array([longer.get(name or "", 0.0) for name in table.names], np.float32))


def says(pair: OwnTokens, row: dict[str, float], own_logprobs: list[float]) -> TokenScores:
    """A teacher that gives tokens the same probabilities wherever it is asked."""
    ranked = sorted(row, key=lambda name: -row[name])
    ids, logprobs = [pair.teacher.table.names.index(name) for name in ranked], [math.log(row[name]) for name in ranked]
    return token_scores(own_logprobs, topk_ids=ids, topk_logprobs=logprobs)


def row_at(pair: OwnTokens, scores: TokenScores, at: int) -> dict[str, float]:
    """The probabilities of the student's tokens at a position. What no token fills stands at the end."""
    ids, logprobs, names = scores.topk_ids[at].tolist(), scores.topk_logprobs[at].tolist(), pair.student.table.names
    count = sum(token_id != NO_TOKEN for token_id in ids)
    assert logprobs == sorted(logprobs, reverse=True)
    assert ids[count:] == [NO_TOKEN] * len(ids[count:])
    assert logprobs[count:] == [LEAST_NATS] * len(ids[count:])
    return {names[each]: math.exp(nats) for each, nats in zip(ids[:count], logprobs[:count], strict=True)}


def beyond() -> OwnTokens:
    """A student that has no row in its softmax for two of its tokens."""
    student, teacher = of_bytes(""), of_bytes("", specials=(END, START, THINK, "<beyond>"))
    student.add_tokens(["<tool>", "<beyond>"])
    teacher.add_tokens(["<tool>"])
    encoders = Encoder(student, len(student) - 2), Encoder(teacher, len(teacher))
    return OwnTokens(*encoders, student_ends=[student.eos_token_id], teacher_ends=[teacher.eos_token_id])


DIGITS = PAIRS["numbers", "bytes"]  # one that writes digits one by one teaches one that joins them
JOINED = PAIRS["bytes", "sentences"]
OTHERS = own("numbers", of_bytes("", specials=("</s>", "[X]")))
LONGER = 0.6 + 1 / math.e
TWO_ENDS = own("numbers", "words", teacher_ends=KINDS["words"].convert_tokens_to_ids([END, START]))


@pytest.mark.parametrize(
    ("pair", "text", "at", "row", "longer", "found", "is_row"),
    [
        # Both `12` and `123` begin with the student's `1`.
        (JOINED, "=a", 1, {"12": 0.4, "123": 0.2, "1": 0.2, "=": 0.1}, {}, {"1": 0.8, "=": 0.1}, True),
        # The teacher read `1` (probability 1 / e) and might have read `12` or `123`.
        (
            JOINED,
            "1=",
            1,
            {"12": 0.4, "123": 0.2, "=": 0.2},
            {},
            {"2": 0.6 / LONGER, "1": 0.6 / math.e / LONGER, "=": 0.2 / math.e / LONGER},
            True,
        ),
        # The digit trap: a teacher says `1` where the student would write `12`, and nobody knows how often.
        (DIGITS, "12", 0, {"1": 0.6, "=": 0.3}, {"1": 0.8}, {"=": 0.3}, False),
        (DIGITS, "12", 0, {"1": 0.6, "=": 0.3}, {"1": 0.05}, {"1": 0.6, "=": 0.3}, True),
        (DIGITS, "12", 0, {"=": 0.9, "1": 0.01}, {"1": 0.8}, {"=": 0.9}, True),
        # Inside a token of the teacher, what its row does not show may begin with a `1`, too.
        (JOINED, "=12", 2, {"12": 0.2, "=": 0.3}, {}, {"2": 1.0}, False),
        (JOINED, "=a", 1, {"</s>": 0.6, "=": 0.3}, {}, {END: 0.6, "=": 0.3}, True),
        (TWO_ENDS, "12", 0, {END: 0.4, START: 0.3, THINK: 0.2}, {}, {END: 0.4, THINK: 0.2}, True),
        (OTHERS, "12", 0, {"[X]": 0.6, "=": 0.3}, {}, {"=": 0.3}, True),
        (OTHERS, "12", 0, {"[X]": 0.6}, {}, {}, False),
        # `<` does not go on as a special token that is spelled so.
        (PAIRS["numbers", "words"], "<1", 1, {THINK: 0.4, "=": 0.3}, {}, {THINK: 0.4, "=": 0.3}, True),
        (beyond(), "ab", 0, {"<tool>": 0.6, "<beyond>": 0.2, "b": 0.1}, {}, {"b": 0.1}, True),
        # An id of the softmax beyond the tokenizer's is no candidate.
        (JOINED, "=a", 1, {None: 0.5, "=": 0.3}, {}, {"=": 0.3}, True),
        # Under equal tokenizers rows are the teacher's own.
        (PAIRS["words", "words"], "the sum", 1, {"the": 0.5, "1": 0.3}, {}, {"the": 0.5, "1": 0.3}, True),
    ],
)
def test_each_candidates_mass_is_at_the_first_token_that_the_student_has_for_it(
    pair, text, at, row, longer, found, is_row
):
    pair = with_rows(pair, longer)
    reading = pair.read(np.array([*pair.student.encode(text), pair.student.table.names.index(END)], np.int32))
    said = says(pair, row, [-1.0] * len(reading.ids))
    scores = pair.scores(said, reading, 3)
    assert row_at(pair, scores, at) == pytest.approx(found)
    assert scores.known_rows[at] == is_row
    unnamed = msgspec.structs.replace(said, rows=np.zeros(len(said.logprobs), np.bool_))
    assert not pair.scores(unnamed, reading, 3).known_rows.any()
    assert np.array_equal(pair.scores(said, reading, 1).topk_ids, scores.topk_ids[:, :1])
    cells = np.array([*found.values(), max(1e-12, 1 - sum(found.values()))])
    assert scores.entropy_lower[at] == pytest.approx(-(cells * np.log(cells)).sum(), abs=1e-5)
    others = len(pair.student.table.bytes_of) - len(found)
    assert scores.entropy_upper[at] == pytest.approx(scores.entropy_lower[at] + cells[-1] * np.log(others), abs=1e-5)


NUMBERED = {"1": 0.2, "12": 0.3, "123": 0.1, "2": 0.15, "=": 0.25}


@pytest.mark.parametrize("words", [["=", "1", "="], ["=", "12", "="], ["=", "2", "="], ["=", "123", "=", "2"]])
def test_rows_are_those_of_the_text_if_the_teacher_draws_its_tokens_independently(words):
    pair = with_rows(JOINED, {})
    reading = pair.read(response("bytes", "".join(words)))
    assert [pair.teacher.table.names[token_id] for token_id in reading.ids.tolist()[:-1]] == words
    said = says(pair, NUMBERED, [*(math.log(NUMBERED[word]) for word in words), 0.0])
    scores = pair.scores(said, reading, 4)
    places = [(word, length) for word in words for length in range(1, len(word) + 1)]
    for position, (word, length) in enumerate(places, 1):
        begun = {name: mass for name, mass in NUMBERED.items() if name.startswith(word[:length])}
        expected: Counter[str] = Counter()
        for name, mass in begun.items():
            if len(name) > length:
                expected[name[length]] += mass / sum(begun.values())
            elif length == len(word):  # it ended, and another begins
                for other, next_mass in NUMBERED.items():
                    expected[other[0]] += mass / sum(begun.values()) * next_mass
        assert row_at(pair, scores, position) == pytest.approx(dict(expected), abs=1e-5)
        assert scores.known_rows[position]
