r"""The verifier of multiple choice: the last box must hold the letter or the text of the right option.

A box with a capital letter, alone or in front of something (`B`, `(B)`, `\text{B}`, `B. 4 cm`, `B) 4 cm`), names that
option, even if the letter is also another option's text. Any other box names the option whose normalised text it
equals. A small letter that equals none stands for the capital; one that equals an option (`c` may be a speed) does not.
String work in linear time.
"""

from __future__ import annotations

import re
from string import ascii_uppercase
from typing import Self

from spot_async.config import PluginSettings
from spot_async.types import Problem, Verdict
from spot_async.verification.extraction import extract_boxed
from spot_async.verification.normalization import normalize_answer

_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|textrm|mathsf)\s*\{([^{}]*)\}")
_LETTER = re.compile(r"\(?\s*(?:[Oo]ption\s+)?([A-Za-z])\s*(?:\)|$|[.:](?=\s|$))")


def chosen_option(answer: str, choices: tuple[str, ...]) -> int | None:
    """Return the index of the option that a box's content names; None if it names none."""
    text = _WRAPPED.sub(r"\1", answer).strip().strip("$").strip()
    letter = _LETTER.match(text)
    named = ascii_uppercase.index(letter[1].upper()) if letter is not None else len(choices)
    if letter is not None and letter[1].isupper() and named < len(choices):
        return named
    wanted = normalize_answer(answer)
    equal = [index for index, choice in enumerate(choices) if wanted and normalize_answer(choice) == wanted]
    return equal[0] if equal else named if named < len(choices) else None


class MultipleChoice:
    """`chosen_option` as a verifier of problems with options, whose answer is a letter."""

    class Settings(PluginSettings):
        """There is nothing to set."""

        kind: str = "multiple_choice"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    async def verify(self, problem: Problem, response_text: str, *, deadline: float) -> Verdict:
        """Judge at once, whatever the deadline.

        NO_ANSWER if there is no box or it is empty, UNJUDGED where the problem has no answer.
        """
        if not problem.answer:
            return Verdict.UNJUDGED
        answer = extract_boxed(response_text)
        if not answer:
            return Verdict.NO_ANSWER
        chosen = chosen_option(answer, problem.choices)
        if chosen is None:
            return Verdict.WRONG
        gold = ascii_uppercase.index(problem.answer)
        same = chosen == gold or problem.choices[chosen] == problem.choices[gold]
        return Verdict.CORRECT if same else Verdict.WRONG

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass
