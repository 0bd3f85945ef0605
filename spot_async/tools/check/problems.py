"""Examines problem sets for answers that no verifier can find right. It prints nothing."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from spot_async.base import registry
from spot_async.base.tasks import gather, root_cause
from spot_async.config import PluginSettings, ProblemSetConfig
from spot_async.config.loading import parse_yaml, validate_as
from spot_async.data.problem_set import load_problem_set
from spot_async.errors import ConfigError
from spot_async.protocols import Verifier
from spot_async.running.measuring import open_verifiers
from spot_async.types import Judgement, Problem, Verdict
from spot_async.verification import MathVerify
from spot_async.verification.multiple_choice import letter_index
from spot_async.verification.normalization import COMMAND, parse_number

_TEXT = re.compile(r"\\text\s*\{[^{}]*\}|[A-Za-z][A-Za-z ]+")
_WORD = r"[^\W\d_]{2,}"
_THREE_WORDS = re.compile(rf"{_WORD}(?:\s+[^\W\d_])*\s+{_WORD}(?:\s+[^\W\d_])*\s+{_WORD}")
AT_A_TIME = 64  # answers that are verified
_NAME_WORDS = 4  # an answer of more words is taken for prose, not for a name


def is_prose(answer: str) -> bool:
    """Return whether an answer is a sentence, and no name or mathematics."""
    answer = answer.strip()
    words = COMMAND.sub(" ", answer)
    is_name = _TEXT.fullmatch(answer) is not None and len(re.findall(_WORD, words)) <= _NAME_WORDS
    return _THREE_WORDS.search(words) is not None and not is_name


@dataclass(frozen=True)
class JudgedSet:
    """A problem set, and the verifier that judges its answers."""

    key: str  # its configuration key, for messages; empty without a configuration
    name: str  # its configuration key, or its path
    problems: Sequence[Problem]
    verifier: PluginSettings | None  # None if its answers are not judged


def held_out_file(path: str) -> JudgedSet:
    """Return a file that training problems are only compared with."""
    found = load_problem_set(ProblemSetConfig(path=path), "", needs_answers=False)
    return JudgedSet("", path, found.problems, None)


def read_verifier(text: str) -> PluginSettings:
    """Read a verifier's settings from `KIND`, or from a section such as `{kind: math_verify, workers: 4}`."""
    tree = parse_yaml(text, f"--verifier {text}")
    tree = {"kind": tree} if isinstance(tree, str) else tree
    if not isinstance(tree, dict) or not isinstance(tree.get("kind"), str):
        raise ConfigError(f"--verifier {text}: give one of {', '.join(registry.names('verifiers'))}")
    try:
        schema: type[PluginSettings] = registry.load("verifiers", tree["kind"]).Settings
    except ValueError as error:
        raise ConfigError(f"--verifier {text}: {error}") from None
    return validate_as(schema, tree)


@dataclass(frozen=True)
class GoldCheck:
    """Whether answers would count as right if a model gave them."""

    tried: int  # how many were tried, without prose
    unverifiable: tuple[tuple[Problem, Verdict], ...]  # not right even word for word, so that no response gets a reward
    spelling_only: tuple[Problem, ...]  # right word for word, but not read by Math-Verify as the mathematics it is
    misread: tuple[Problem, ...]  # right with another digit too, so that they are read as something else
    prose: tuple[Problem, ...]  # sentences; these are right word for word, but no response would repeat them so
    have_choices: int  # how many of those tried have choices
    unclear_choices: tuple[Problem, ...]  # with an empty choice, or two equal ones


async def check_sets(sets: Sequence[JudgedSet]) -> list[tuple[JudgedSet, GoldCheck]]:
    """Verify every answer of each set against itself, where a verifier compares. Raises what starts no verifier."""
    judged = {each.name: each for each in sets if each.verifier is not None and each.verifier.JUDGES_ANSWERS}
    try:
        async with AsyncExitStack() as stack:
            verifiers = await open_verifiers({name: each.verifier for name, each in judged.items()}, stack)
            return [(each, await check_golds(each.problems, verifiers[name])) for name, each in judged.items()]
    except ExceptionGroup as failures:
        raise root_cause(failures) from None


async def check_golds(problems: Sequence[Problem], verifier: Verifier) -> GoldCheck:
    r"""Verify every answer against itself: word for word, and as Math-Verify reads it.

    Math-Verify is asked whether it reads the answer as mathematics, and again with another digit. If there are choices,
    the answer must be the letter of one. Problems without an answer are left out. `verifier` must have been entered.
    """
    tried = [problem for problem in problems if problem.answer]
    slots = asyncio.Semaphore(AT_A_TIME)

    async def judge(problem: Problem, answer: str) -> Verdict:
        judged = await verifier.verify(problem, rf"\boxed{{{answer}}}", deadline=float("inf"))
        return judged.verdict if isinstance(judged, Judgement) else judged

    async def fault(problem: Problem) -> Verdict | str | None:
        """Return the verdict on an answer that is not right, or the field of `GoldCheck` for what else is wrong."""
        if problem.choices:
            return Verdict.WRONG if letter_index(problem.answer, problem.choices) is None else None
        async with slots:
            verdict = await judge(problem, problem.answer)
            if verdict.is_missing:  # its worker may have been killed
                verdict = await judge(problem, problem.answer)
            if verdict is not Verdict.CORRECT:
                return verdict
            if is_prose(problem.answer):
                return "prose"
            if parse_number(problem.answer) is not None or not isinstance(verifier, MathVerify):
                return None
            if not await verifier.reads(problem.answer):
                return "spelling_only"
            misread = await judge(problem, _with_another_digit(problem.answer)) is Verdict.CORRECT
            return "misread" if misread else None

    faults = list(zip(tried, await gather(map(fault, tried)), strict=True))
    doubted = {
        name: tuple(problem for problem, found in faults if found == name)
        for name in ("spelling_only", "misread", "prose")
    }
    return GoldCheck(
        tried=len(tried) - len(doubted["prose"]),
        unverifiable=tuple((problem, found) for problem, found in faults if isinstance(found, Verdict)),
        **doubted,
        have_choices=sum(bool(problem.choices) for problem in tried),
        unclear_choices=tuple(problem for problem in problems if has_unclear_choices(problem)),
    )


def _with_another_digit(answer: str) -> str:
    """Return another answer: one whose last digit is greater by one, or that has an x more if it has no digit."""
    at = max((at for at, character in enumerate(answer) if character in "0123456789"), default=None)
    return f"x {answer}" if at is None else f"{answer[:at]}{(int(answer[at]) + 1) % 10}{answer[at + 1 :]}"


def has_unclear_choices(problem: Problem) -> bool:
    """Whether a choice is empty, or equal to another but for white space."""
    choices = [" ".join(choice.split()) for choice in problem.choices]
    return "" in choices or len(set(choices)) < len(choices)


def count_by(values: Sequence[str | None]) -> dict[str, int]:
    """Return how often each value occurs, the commonest first. None is not counted."""
    return dict(Counter(value for value in values if value is not None).most_common())
