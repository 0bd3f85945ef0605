"""What there is to know of a problem set before a run learns from it or is measured by it: figures, no printing."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase

import numpy as np

from spot_async.data.overlap import identity
from spot_async.protocols import Verifier
from spot_async.types import Problem, Verdict
from spot_async.verification.extraction import is_oversized
from spot_async.verification.normalization import normalize_answer, parse_number

_FRACTION = re.compile(r"[+-]?(?:\\[dt]?frac\s*(?:\{[+-]?[0-9]+\}|[0-9])\s*(?:\{[0-9]+\}|[0-9])|[0-9]+/[0-9]+)")
_LIST = re.compile(r"[^,]+(?:,[^,]+)+")
_TEXT = re.compile(r"\\text\s*\{[^{}]*\}|[A-Za-z][A-Za-z ]+")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = r"[^\W\d_]{2,}"
_THREE_WORDS = re.compile(rf"{_WORD}(?:\s+[^\W\d_])*\s+{_WORD}(?:\s+[^\W\d_])*\s+{_WORD}")
_NAME_WORDS = 4  # as long as a name may be before it is taken for prose


def answer_type(problem: Problem) -> str:
    """A word for the form of the answer. It looks at the string only, and decides nothing."""
    answer = problem.answer.strip()
    if not answer:
        return "none"
    if problem.choices:
        return "choice"
    if (number := parse_number(answer)) is not None:
        return "integer" if number == number.to_integral_value() else "decimal"
    if _FRACTION.fullmatch(answer):
        return "fraction"
    is_text, words = _TEXT.fullmatch(answer) is not None, _COMMAND.sub(" ", answer)
    if _THREE_WORDS.search(words) and not (is_text and len(re.findall(_WORD, words)) <= _NAME_WORDS):
        return "prose"
    if is_text:
        return "text"
    return "list or interval" if _LIST.fullmatch(answer) else "expression"


@dataclass(frozen=True)
class Spread:
    """How lengths spread: the median, the length that 5 % exceed, and the longest."""

    median: int
    p95: int
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Spread:
        """Each a length that occurs: the smallest that half, or 95 %, of them do not exceed."""
        median, p95 = np.quantile(lengths, (0.5, 0.95), method="inverted_cdf")
        return cls(int(median), int(p95), max(lengths))


@dataclass(frozen=True)
class Repeated:
    """Problems that others repeat but for white space; their rows are kept unless `duplicates: spacing`."""

    groups: int
    rows: int  # beyond the first of each group
    conflicting: int  # rows beyond the first in groups whose answers differ


def find_repeated(problems: Sequence[Problem]) -> Repeated:
    answers = defaultdict(list)
    for problem in problems:
        answers[identity(problem)].append(normalize_answer(problem.answer))
    groups = [group for group in answers.values() if len(group) > 1]
    conflicting = [group for group in groups if len(set(group)) > 1]
    return Repeated(len(groups), sum(map(len, groups)) - len(groups), sum(map(len, conflicting)) - len(conflicting))


@dataclass(frozen=True)
class GoldCheck:
    """Whether answers would count as right if a model gave them."""

    tried: int  # without those that are prose
    unverifiable: tuple[tuple[Problem, Verdict], ...]  # not right even as they are spelled: no reward, whatever is said
    spelling_only: tuple[Problem, ...]  # right as they are spelled, but not read as mathematics
    prose: tuple[Problem, ...]  # right as they are spelled, which says nothing: no response repeats a sentence
    oversized: int
    have_choices: int  # of those tried
    unclear_choices: tuple[Problem, ...]  # an empty choice, or two that are the same


async def check_golds(problems: Sequence[Problem], verifier: Verifier, *, at_a_time: int = 64) -> GoldCheck:
    r"""Verify every answer against itself: as it stands, and behind a `\displaystyle` that changes the spelling only.

    Where there are choices the answer must be the letter of one. Problems without an answer are left out. `verifier`
    has been entered.
    """
    tried = [problem for problem in problems if problem.answer]
    unverifiable: list[tuple[Problem, Verdict]] = []
    spelling_only: list[Problem] = []
    prose: list[Problem] = []
    waiting = iter(tried)

    async def work() -> None:
        for problem in waiting:
            if problem.choices:
                if problem.answer not in list(ascii_uppercase[: len(problem.choices)]):
                    unverifiable.append((problem, Verdict.WRONG))
                continue
            verdict = await verifier.verify(problem, rf"\boxed{{{problem.answer}}}", deadline=float("inf"))
            if verdict is not Verdict.CORRECT:
                unverifiable.append((problem, verdict))
            elif answer_type(problem) == "prose":
                prose.append(problem)
            elif parse_number(problem.answer) is None:
                respelled = rf"\boxed{{\displaystyle {problem.answer}}}"
                if await verifier.verify(problem, respelled, deadline=float("inf")) is not Verdict.CORRECT:
                    spelling_only.append(problem)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_a_time):
            group.create_task(work())
    order = {problem.id: index for index, problem in enumerate(tried)}
    return GoldCheck(
        tried=len(tried) - len(prose),
        unverifiable=tuple(sorted(unverifiable, key=lambda found: order[found[0].id])),
        spelling_only=tuple(sorted(spelling_only, key=lambda problem: order[problem.id])),
        prose=tuple(sorted(prose, key=lambda problem: order[problem.id])),
        oversized=sum(is_oversized(problem.answer) for problem in tried),
        have_choices=sum(bool(problem.choices) for problem in tried),
        unclear_choices=tuple(problem for problem in problems if has_unclear_choices(problem)),
    )


def has_unclear_choices(problem: Problem) -> bool:
    """Whether a choice is empty, or the same as another but for white space."""
    choices = [" ".join(choice.split()) for choice in problem.choices]
    return "" in choices or len(set(choices)) < len(choices)


def count_by(values: Sequence[str | None]) -> dict[str, int]:
    """The commonest first; None does not count."""
    return dict(Counter(value for value in values if value is not None).most_common())
