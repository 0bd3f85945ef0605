r"""Finds answers that no response can meet, or that mean nothing, from their text alone. No verifier is asked.

A response boxes `7`. So an answer that its file writes as `\(7\)`, `Answer: 7` or `["7"]` makes every response wrong,
and one that says `proof` can be met by a policy that learns to write `proof`.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

from spot_async.base.text import DOUBLED, counted, shortened
from spot_async.data.keys import about, setting
from spot_async.data.rows import literal, only_value
from spot_async.types import Problem
from spot_async.verification.multiple_choice import letter_index
from spot_async.verification.normalization import FULL_WIDTH, extract_boxed, same_answer

SHOWN_ANSWERS = 3
SHOWN_CHARS = 40
WORDS_SHARE = 0.1  # words that are the answer of more problems than this may stand for no answer
SHARE = 0.5  # the same, of any answer
FEW = 10  # in fewer problems nothing repeats suspiciously

# What files write where there is no answer, without white space and signs. A bare `None` may be meant as an answer.
_NO_ANSWERS = frozenset(
    {"", "proof", "prove", "notfound", "na", "none", "null", "nil", "nan", "unknown", "noanswer", "notavailable", "tbd"}
    | {"seesolution", "seesolutions", "seeexplanation", "seeabove", "multipleanswers", "answersvary", "answersmayvary"}
)
_TWO_WAYS = frozenset({"yes", "no", "true", "false"})  # of questions with two answers, each is much of the file
_NO_SIGN = re.compile(r"[\W_]+")
_WORDS = re.compile(r"[^\W\d_]{2,}(?:[ -][^\W\d_]+)*[.!]?")

_CHARACTERS = {
    **dict.fromkeys(map(ord, "\N{MINUS SIGN}\N{EN DASH}\N{HYPHEN}\N{NON-BREAKING HYPHEN}"), "-"),
    **dict.fromkeys(map(ord, "\N{ZERO WIDTH SPACE}\N{WORD JOINER}\N{ZERO WIDTH NO-BREAK SPACE}"), ""),
    **FULL_WIDTH,
}
_SCRIPT = re.compile(r"<(sup|sub)>(.*?)</\1>", re.IGNORECASE | re.DOTALL)
_TAG = re.compile(r"</?(?:p|b|i|br|em|strong|span|div|sup|sub)\b[^<>]*>", re.IGNORECASE)
_WRAPPINGS = tuple(
    re.compile(pattern, re.DOTALL | re.IGNORECASE)
    for pattern in (
        r"\\\((.*)\\\)",
        r"\\\[(.*)\\\]",
        r"\$\$?([^$]*)\$\$?",
        r"\*\*(.*)\*\*",
        r"`+([^`]*)`+",
        r"""b?(?:"([^"]*)"|'([^']*)')""",
        r"(?:the\s+)?(?:final\s+|correct\s+)?(?:answer|ans|result|solution)\s*(?:is\s*:?|[:=])\s*(\S.*)",
        r".*####\s*(\S[^\n]*)",
    )
)


def as_boxed(answer: str) -> str:
    """Return an answer as a response would box it: without wrapping, HTML and characters that models do not write."""
    single = answer.replace("\\\\", "\\") if DOUBLED.search(answer) else answer
    scripts = _SCRIPT.sub(lambda match: f"{'^' if match[1].lower() == 'sup' else '_'}{{{match[2]}}}", single)
    text = _plain(html.unescape(_TAG.sub("", scripts)))
    for _ in range(5):  # one may stand within another
        bare = text.strip()
        if (found := next(filter(None, (each.fullmatch(bare) for each in _WRAPPINGS)), None)) is not None:
            bare = found[found.lastindex or 0]
        elif (box := extract_boxed(bare)) is not None:
            bare = box
        elif isinstance(value := only_value(literal(bare)), str | int | float):
            bare = str(value)
        if bare == text:
            break
        text = bare
    return text


def _plain(text: str) -> str:
    """Return a text with the digits and signs that models write."""
    return "".join(str(unicodedata.decimal(each, each)) for each in text.translate(_CHARACTERS))


def says_none(answer: str) -> bool:
    """Return whether an answer says that there is none, as `N/A`, `-` and `see solution` do."""
    return len(answer) < SHOWN_CHARS and answer.isascii() and _NO_SIGN.sub("", answer.lower()) in _NO_ANSWERS


def _is_badly_spelled(answer: str) -> bool:
    boxed = as_boxed(answer)
    found = literal(answer)
    is_data = isinstance(found, dict) or (
        isinstance(found, list) and not all(isinstance(n, int | float) for n in found)
    )
    return is_data or _plain(answer) != answer or not same_answer(answer, boxed)


def gold_doubts(problems: Sequence[Problem], key: str, kind: str = "") -> list[str]:
    """Return a line for each kind of answer that no response can meet or that means nothing.

    `key` is the set's own, and `kind` that of its verifier.
    """
    judged = [problem for problem in problems if problem.answer and not problem.choices]
    column, lines = setting(key, "fields.answer"), []
    lettered = [each for each in problems if each.answer and kind == "multiple_choice"]
    if several := [each for each in lettered if letter_index(each.answer, each.choices) is None]:
        shown = ", ".join(map(_respelling, several[:SHOWN_ANSWERS]))
        lines.append(
            f"{about(key)}{counted(len(several), 'answer')} of {len(lettered)} not the letter of one option, so no "
            f"response to them is judged: {shown}; write one letter, or remove such rows"
        )
    none = Counter(problem.answer for problem in judged if says_none(problem.answer))
    if none:
        shown = ", ".join(f"{answer!r} ({rows})" for answer, rows in none.most_common(SHOWN_ANSWERS))
        lines.append(
            f"{about(key)}{counted(none.total(), 'answer')} of {len(judged)} may say that there is none: {shown}; a "
            "policy would learn to write that: remove such rows"
        )
    spelled = [each for each in judged if each.answer not in none and _is_badly_spelled(each.answer)]
    if spelled:
        shown = ", ".join(_respelling(problem) for problem in spelled[:SHOWN_ANSWERS])
        lines.append(
            f"{about(key)}{counted(len(spelled), 'answer')} of {len(judged)} not spelled as a response would box it: "
            f"{shown}; respell them, or name another column in {column}"
        )
    answers = Counter(each.answer for each in judged)
    for answer, rows in answers.most_common(1) if len(judged) >= FEW and len(answers) > 1 else ():
        is_word = _WORDS.fullmatch(answer) is not None and answer.lower() not in _TWO_WAYS
        if answer not in none and rows > (WORDS_SHARE if is_word else SHARE) * len(judged):
            lines.append(
                f"{about(key)}{rows} of {len(judged)} answers are {shortened(answer, SHOWN_CHARS)!r}: if that stands "
                "for no answer, remove these rows"
            )
    return lines


def _respelling(problem: Problem) -> str:
    boxed = as_boxed(problem.answer)
    other = f" for {shortened(boxed, SHOWN_CHARS)!r}" if boxed != problem.answer else ""
    return f"{problem.id} has {shortened(problem.answer, SHOWN_CHARS)!r}{other}"
