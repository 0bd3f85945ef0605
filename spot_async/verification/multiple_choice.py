r"""The verifier of multiple choice: the last box must hold the letter or the text of the right option.

A box with a capital letter alone names that option, even if the letter is also another option's text: `B`, `(B)`,
`[B]`, `\text{B}`, `**B**`, `Answer: B`. Any other box names the option whose normalised text it equals, or the option
whose letter and text it holds (`B. 4 cm`, `B, 4 cm`). A letter in front of anything else names none: `(B) or (C)`. A
small letter that equals no option stands for the capital; one that does (`c` may be a speed) does not. String work in
linear time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from string import ascii_uppercase

from spot_async.base.tasks import Opened
from spot_async.config import PluginSettings
from spot_async.types import Problem, Verdict
from spot_async.verification.normalization import (
    FULL_WIDTH,
    clean_layout,
    extract_boxed,
    is_oversized,
    normal_form,
    normalize_answer,
    same_answer,
)

_WRAPPED = re.compile(r"\\(?:text|underline)\s*\{([^{}]*)\}")
_LAYOUT = re.compile(
    r"\\(?:(?:math)?(?:bf|it|rm|sf|tt|bb|cal)|[lL]arge|[hH]uge|checkmark)(?![A-Za-z])|\\(?=[][(){}]|\Z)|[$~*]"
)
_LETTER = re.compile(
    r"(?:(?:the\s+)?(?:(?:final|correct|right|best)\s+)*(?:answer|ans|solution|option|choice|letter)\s*(?:is\s)?\s*[:=-]?\s*)?"
    r"[(\[{]*\s*([A-Z])(?:\s*[)\]}.:,;!=–—-]+\s*|\s+|\Z)(.*)",
    re.IGNORECASE | re.DOTALL,
)
_LETTER_BEHIND = re.compile(r"(.*\S)\s*[(\[]([A-Z])[)\]]\.?", re.DOTALL)


def chosen_option(answer: str, choices: tuple[str, ...]) -> int | None:
    """Return the index of the option that a box's content names; None if it names none, or several."""
    if is_oversized(answer, max(choices, key=len, default="")):
        return _only(choices, lambda choice: choice.split() == answer.split())
    bare = _bare(answer)
    letter, text = "", ""
    if (found := _LETTER.fullmatch(bare)) is not None:
        letter, text = found[1], found[2].strip("() ")
    elif (found := _LETTER_BEHIND.fullmatch(bare)) is not None:
        text, letter = found[1], found[2]
    named = ascii_uppercase.find(letter.upper()) if letter else -1
    is_named = 0 <= named < len(choices)
    if is_named and letter.isupper() and not text:
        return named
    equal = _equal_option(answer, choices)
    if is_named and text and same_answer(_bare(choices[named]), text):
        return named if equal in (None, named) else None
    if equal is not None:
        return None if is_named and text and normal_form(answer).variable else equal  # `B = one` names two
    return named if is_named and not text else None


def letter_index(answer: str, choices: tuple[str, ...]) -> int | None:
    """Return the index of the option whose letter an answer is, without anything else; None for any other answer."""
    letters = list(ascii_uppercase[: len(choices)])
    return letters.index(answer) if answer in letters else None


def _bare(text: str) -> str:
    """Return the text without fonts, spacing, stars and quotation marks. One font may stand within another."""
    text = _WRAPPED.sub(r" \1 ", _WRAPPED.sub(r" \1 ", clean_layout(text.translate(FULL_WIDTH))))
    return _LAYOUT.sub(" ", text).strip(" \"'`_")


def _equal_option(answer: str, choices: tuple[str, ...]) -> int | None:
    """Return the option whose text an answer is, also if it lacks a unit that no other option differs in."""
    wanted = normalize_answer(answer)
    exact = _only(choices, lambda choice: normalize_answer(choice) == wanted != "")
    return exact if exact is not None else _only(choices, lambda choice: same_answer(choice, answer))


def _only(choices: tuple[str, ...], is_meant: Callable[[str], bool]) -> int | None:
    """Return the first choice that is meant, if no other text is meant too."""
    meant = [index for index, choice in enumerate(choices) if is_meant(choice)]
    return meant[0] if len({choices[index] for index in meant}) == 1 else None


class MultipleChoice(Opened):
    """`chosen_option` as a verifier of problems with options, whose answer is a letter."""

    class Settings(PluginSettings):
        """There is nothing to set."""

        READS_BOX = True
        kind: str = "multiple_choice"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    async def verify(self, problem: Problem, response_text: str, *, deadline: float) -> Verdict:
        """Judge at once, whatever the deadline.

        NO_ANSWER if there is no box or it is empty, UNJUDGED where the answer is not the letter of one option.
        """
        gold = letter_index(problem.answer, problem.choices)
        if gold is None:
            return Verdict.UNJUDGED
        answer = extract_boxed(response_text)
        if not answer:
            return Verdict.NO_ANSWER
        chosen = chosen_option(answer, problem.choices)
        if chosen is None:
            return Verdict.WRONG
        same = chosen == gold or problem.choices[chosen] == problem.choices[gold]
        return Verdict.CORRECT if same else Verdict.WRONG
