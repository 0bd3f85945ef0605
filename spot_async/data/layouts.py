r"""How the rows of well-known data sets become problems, and what is known to be wrong in their files.

A layout says in which columns the parts of a problem are, how to mend them, and which rows to drop. Each mend and
refusal returns the words under which it is counted, or None where it did nothing. docs/data.md has the sources.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from string import ascii_lowercase, ascii_uppercase
from typing import NamedTuple

from spot_async.config import Duplicates
from spot_async.config.problems import Part
from spot_async.data.parts import EXACT_FLOATS, Draft
from spot_async.data.rows import Columns, literal, only_value
from spot_async.verification.multiple_choice import chosen_option, letter_index
from spot_async.verification.normalization import FULL_WIDTH, extract_boxed, strip_answer

Mend = Callable[[Draft], str | None]  # changes the draft; returns what it did, if anything
Refusal = Callable[[Draft], str | None]  # returns why the row is dropped, if it is


class Layout(NamedTuple):
    """What is done with each row of a file."""

    columns_of: Mapping[Part, tuple[str, ...]]
    mends: tuple[Mend, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    needs: tuple[Part, ...] = ("problem", "answer")  # a row without these is an error; it is not dropped
    # The default, which the settings may change. Benchmarks keep duplicates, since their results are over all rows.
    duplicates: Duplicates = "conflicting"
    prepare: Callable[[Columns], Columns] = lambda columns: columns

    def with_solutions(self) -> Layout:
        """Return the layout for a run that shows worked solutions to its teacher."""
        columns_of: dict[Part, tuple[str, ...]] = {"solution": _SOLUTION, **self.columns_of}
        return self._replace(columns_of=columns_of, mends=tuple(m for m in self.mends if m is not forget_solution))


# The characters that open-r1 uses to find Chinese problems. DAPO's known count of 14,116 problems depends on them.
_CHINESE = re.compile("[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff]")
_FLOAT_OF_INTEGER = re.compile(r"(-?[0-9]+)\.0+")
_IN_BRACES = re.compile(r"\{([^{}]*)\}")
_WITH_COMMAS = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_BEHIND_HASHES = re.compile(r"(?:\A|\n)[ \t]*####[ \t]*(\S[^\n]*)\Z")
_INSTRUCTION = r"""
    (?<![a-z])
    (?: (?: (?: (?:please,?|let's|let\ us|carefully)\s+ )*
            (?:think|reason|solve|answer)\s+ (?:(?:this|the)\s+(?:following\s+)?(?:math\s+)?(?:problem|question)\s+)?
            step[ -]by[ -]step [.,:;]?\s+ (?:and\s+)? )?
        (?:please,?\s+)?
        (?:put|output|present|write|give|provide|place|enclose)\s+(?:your|the)\s+(?:final\s+)?answer
        \s+(?:within|inside|in)\s+\$?\\{1,2}boxed\s*\{\s*\}\$? (?:,?\s+please(?![a-z]))?
      | solve\ the\ following\ math\ problem\ step\ by\ step\.\s+
        the\ last\ line\ of\ your\ response\ should\ be\ of\ the\ form\ answer:\ [\\$]*answer\ \(without\ quotes\)
        \ where\ [\\$]*answer\ is\ the\ answer\ to\ the\ problem
      | remember\ to\ put\ your\ answer\ on\ its\ own\ line\ after\ "answer:"
      | let's\ think\ step\ by\ step\ and\ output\ the\ final\ answer\ after\ "\#\#\#\#"
    )\.?
"""
# Remove only one separator, because DAPO has different rows whose texts differ by one more blank. Do not remove an
# instruction in front if its sentence continues, because the rest would lose its meaning.
_INSTRUCTION_BEFORE = re.compile(rf"\s*{_INSTRUCTION}(?:(?<=\.)(?:\n\n|\s)?|\n\n?)", re.VERBOSE | re.IGNORECASE)
_INSTRUCTION_BEHIND = re.compile(rf"(?:\n\n|\s)?{_INSTRUCTION}\s*\Z", re.VERBOSE | re.IGNORECASE)


GPQA_CHOICES = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
GATHERED = "Correct Answer with Incorrect Answer 1 to 3"  # our own column; messages may name it


def remove_instruction(draft: Draft) -> str | None:
    """Remove an instruction before or after the problem, which some files include. We add our own."""
    text = draft.problem
    if found := _INSTRUCTION_BEFORE.match(text):
        text = text[found.end() :]
    found = _INSTRUCTION_BEHIND.search(text, max(0, len(text) - 400))
    if found and not _is_within_sentence(text[: found.start()], found[0]):
        text = text[: found.start()]
    changed, draft.problem = text != draft.problem, text
    return "instruction in the problem removed" if changed else None


def _is_within_sentence(before: str, instruction: str) -> bool:
    """Return whether `instruction` continues a sentence of `before`. Removing it would then leave a fragment."""
    begins_small = instruction.lstrip(" \t")[:1].islower()
    return begins_small and before.rstrip(" \t")[-1:].replace(",", "a").isalnum()


def last_turn_only(draft: Draft) -> str | None:
    """Drop the messages before the question: in these files of single questions they are somebody's own prompt."""
    had, draft.history = bool(draft.history), ()
    return "messages before the user's last one left out" if had else None


def _answered(draft: Draft, answer: str | int | float | None, what: str | None) -> str | None:
    """Write another answer, if there is one; return `what` that did."""
    if answer is None or answer == draft.gold:
        return None
    draft.answer = answer
    return what


def narrow_digits(draft: Draft) -> str | None:
    """Replace full-width digits and signs, which no verifier reads."""
    return _answered(draft, draft.gold.translate(FULL_WIDTH), "full-width characters in the answer")


def whole_number(draft: Draft) -> str | None:
    """Write 27.0 as 27, where the competition asks for integers."""
    found = _FLOAT_OF_INTEGER.fullmatch(str(draft.answer).strip())
    if found is None:
        return None
    draft.answer = found[1]
    return "answer was a float"


def without_leading_zeros(draft: Draft) -> str | None:
    shorter = draft.gold.lstrip("0") or "0" if draft.gold.isdecimal() else None
    return _answered(draft, shorter, "leading zeros removed from the answer")


def tidy_answer(draft: Draft) -> str | None:
    """Write `{17}.` as `17`: it was cut out of a box that was written `\\boxed {17}.`"""
    bare = strip_answer(draft.gold)
    bare = found[1] if (found := _IN_BRACES.fullmatch(bare)) else bare
    return _answered(draft, bare, "braces or full stop around the answer removed")


def only_of_list(draft: Draft) -> str | None:
    """Take the answer out of a list of one that its column spells as text, `["18"]`."""
    value = only_value(literal(draft.gold))
    only = value if isinstance(value, str | int | float) else None
    return _answered(draft, only, "answer taken out of a list of one")


def unboxed(draft: Draft) -> str | None:
    """Take the answer out of the column's box, or out of the last box of a whole solution there."""
    boxed = extract_boxed(draft.gold) if "boxed" in draft.gold else None
    return _answered(draft, boxed, "answer taken out of its box")


def behind_hashes(draft: Draft) -> str | None:
    """Take the answer of GSM8K from the end of its worked solution, `#### 1,450`. Numbers lose their commas."""
    found = _BEHIND_HASHES.search(draft.gold)
    if found is None:
        return None
    answer = found[1].strip()
    number = answer.replace(",", "") if _WITH_COMMAS.fullmatch(answer) else answer
    return _answered(draft, number, "answer taken from behind ####")


def answer_in_solution(draft: Draft) -> str | None:
    """Take the answer from the last box of the solution, since several files of MATH have damaged answer columns."""
    boxed = extract_boxed(draft.solution) if draft.solution else None
    return _answered(draft, boxed, "answer column differs from the solution's box" if draft.gold else None)


def empty_box_is_zero(draft: Draft) -> str | None:
    """Answer 0 for an empty box, as in two solutions of MATH train (Number Theory, Level 5), where it is right."""
    if draft.gold or not draft.solution or extract_boxed(draft.solution) != "":
        return None
    draft.answer = "0"
    return "answer 0 put into an empty box"


def name_level(draft: Draft) -> str | None:
    """Name the tier after the level, given as `3` or `Level 3`. `Level ?` is no level."""
    level = (draft.tier or "").removeprefix("Level").strip()
    draft.tier = f"level {level}" if level.isdecimal() else None
    return "level unknown" if level and draft.tier is None else None


def suspect_float(draft: Draft) -> str | None:
    """Count integers that may have lost digits in a 53-bit float. They cannot be mended."""
    digits = draft.gold.lstrip("-")
    is_float = isinstance(draft.answer, float) and abs(draft.answer) >= EXACT_FLOATS
    is_long = is_float or (digits.isdecimal() and len(digits) > 15)
    return "answer of more than 15 digits, perhaps a damaged float" if is_long else None


def forget_solution(draft: Draft) -> str | None:
    draft.solution = None  # it is not needed once the answer is known, and it is longer than all the rest
    return None


def drop_fillers(draft: Draft) -> str | None:
    """Drop the `N/A` options at the end, with which MMLU-Pro once filled every row up to ten."""
    while draft.choices and draft.choices[-1].strip() == "N/A":
        draft.choices = draft.choices[:-1]
    return None


_AROUND_LABEL = "(). :"
_LABELLED = re.compile(r"\(?([A-Za-z]|[0-9]{1,2})[).:]\s+(\S.*)", re.DOTALL)
_LABELS = (ascii_uppercase, ascii_lowercase, [*map(str, range(1, 27))], [*map(str, range(26))])


def take_labels(draft: Draft) -> str | None:
    """Take the labels off the choices' texts, `1. cat` or `(B) dog`. `J. Mill` stays: other choices have no A to D."""
    found = [match for each in draft.choices if (match := _LABELLED.fullmatch(each)) is not None]
    labels = tuple(match[1] for match in found)
    is_all = len(labels) == len(draft.choices) > 1 and not draft.labels
    if not is_all or not any(sorted(labels) == sorted(each[: len(labels)]) for each in _LABELS):
        return None
    if draft.gold in draft.choices:
        draft.answer = labels[draft.choices.index(draft.gold)]
    are_places = "".join(labels).upper() == ascii_uppercase[: len(labels)]  # then the answer may be a number too
    draft.labels, draft.choices = () if are_places else labels, tuple(match[2] for match in found)
    return "labels taken off the choices"


def letter_of_choice(draft: Draft) -> str | None:
    """Write the answer as the letter `C`, if it is `(C)`, `C) 4 cm`, that choice's text or label, or its place from 0.

    A number written as text may be a place or a choice's text. If the two name different choices, it is left as it is.
    Where choices have labels, it is no place, and a letter only if that is a label.
    """
    if not 0 < len(draft.choices) <= len(ascii_uppercase):
        return None
    letters = tuple(ascii_uppercase[: len(draft.choices)])
    labels = tuple(each.strip(_AROUND_LABEL) for each in draft.labels) or letters
    named: int | None = None
    if (bare := draft.gold.strip(_AROUND_LABEL)) in labels:
        named = labels.index(bare)
    elif labels == letters and isinstance(draft.answer, str):
        named = chosen_option(draft.gold, draft.choices)
    elif labels != letters and draft.gold in draft.choices:
        named = draft.choices.index(draft.gold)
    place = int(draft.gold) if re.fullmatch("[0-9]{1,2}", draft.gold) and not draft.labels else None
    meant = [each for each in (named, place) if each is not None and each < len(draft.choices)]
    if len(set(meant)) != 1:
        draft.answer = f"({draft.gold})" if draft.labels and draft.gold in letters else draft.answer
        return None
    was = "answer was the place of a choice, from 0"
    return _answered(draft, letters[meant[0]], was if named is None else "answer made the letter of a choice")


def is_chinese(draft: Draft) -> str | None:
    return "Chinese" if _CHINESE.search(draft.problem) else None


def has_no_answer(draft: Draft) -> str | None:
    return None if draft.gold else "no answer"


def is_no_choice(draft: Draft) -> str | None:
    return "answer is none of the choices" if letter_index(draft.gold, draft.choices) is None else None


def gather_choices(columns: Columns) -> Columns:
    """Join GPQA's four columns into one list with the right choice first. Whoever asks must shuffle it."""
    if any(columns.get(name) is None for name in GPQA_CHOICES):
        return columns
    return {**columns, GATHERED: [str(columns[name]).strip() for name in GPQA_CHOICES], "answer": "A"}


_GOLD = ("reward_model.ground_truth.target", "reward_model.ground_truth")
_SOLUTION = ("solution", "reward_model.ground_truth.solution", "extra_info.solution")
_COLUMNS: dict[Part, tuple[str, ...]] = {
    "problem": ("problem", "question", "prompt", "Problem", "Question"),
    "answer": ("answer", *_GOLD, "ground_truth", "gold", "expected_answer", "Answer"),
    "id": ("id", "unique_id", "extra_info.index", "idx", "index", "problem_idx", "question_id", "ID"),
    "tier": ("tier", "level"),
    "category": ("category", "subject", "type", "problem_type"),
}  # fmt: skip
_WITH_SOLUTION: dict[Part, tuple[str, ...]] = {**_COLUMNS, "solution": _SOLUTION}
_ANSWER = (only_of_list, narrow_digits, behind_hashes, unboxed, tidy_answer)
_TEXT = (last_turn_only, remove_instruction, *_ANSWER)

LAYOUTS: dict[str, Layout] = {
    "plain": Layout({part: (part,) for part in ("problem", "answer", "id", "tier", "category")}),
    "columns": Layout(_COLUMNS, (*_TEXT, take_labels, letter_of_choice)),
    "messages": Layout({**_COLUMNS, "problem": ("messages",)}, (*_ANSWER, take_labels, letter_of_choice)),
    "math": Layout(
        _WITH_SOLUTION,
        (*_TEXT, answer_in_solution, empty_box_is_zero, name_level, forget_solution),
        (has_no_answer,),
        needs=("problem",),
    ),
    "math500": Layout(_COLUMNS, (*_TEXT, name_level)),
    "dapo": Layout(_COLUMNS, (*_TEXT, whole_number, suspect_float), (is_chinese, has_no_answer), ("problem",), "exact"),
    "amc23": Layout(_COLUMNS, (*_TEXT, whole_number)),
    "aime": Layout(_COLUMNS, (*_TEXT, whole_number, without_leading_zeros)),
    "hmmt": Layout(_COLUMNS, _TEXT),
    "minerva": Layout(
        _WITH_SOLUTION, (*_TEXT, answer_in_solution, forget_solution), (has_no_answer,), needs=("problem",)
    ),
    "gpqa_diamond": Layout(
        {
            "problem": ("Question",),
            "choices": (GATHERED,),
            "answer": ("answer",),
            "id": ("Record ID",),
            "category": ("High-level domain",),
            "tier": ("High-level domain",),
        },
        needs=("problem", "answer", "choices"),
        duplicates="keep",
        prepare=gather_choices,
    ),
    "mmlu_pro": Layout(
        {
            "problem": ("question",),
            "answer": ("answer", "answer_index"),
            "choices": ("options",),
            "id": ("question_id",),
            "category": ("category",),
            "tier": ("category",),
            "solution": ("cot_content",),
        },
        (drop_fillers, unboxed, take_labels, letter_of_choice),
        (is_no_choice,),
        needs=("problem", "answer", "choices"),
        duplicates="keep",
    ),
    "alpaca_eval": Layout(
        {"problem": ("instruction",), "category": ("dataset",), "tier": ("dataset",)},
        needs=("problem",),
        duplicates="keep",
    ),
}


def recognise(columns: Columns) -> str:
    """Return the name of the layout that a row's columns belong to. `columns` means that only their names are known."""
    names = columns.keys()
    source = found.lower() if isinstance(found := columns.get("data_source"), str) else ""
    if names >= set(GPQA_CHOICES):
        return "gpqa_diamond"
    if {"question", "options"} <= names and names & {"answer", "answer_index"}:
        return "mmlu_pro"
    if "instruction" in names and not names & {"answer", "problem"}:
        return "alpaca_eval"
    if "dapo" in source:
        return "dapo"
    if source.endswith(("math-lighteval", "/math")):
        return "math"
    if {"problem", "solution", "type"} <= names and "answer" not in names:
        return "math" if "level" in names else "minerva"
    if {"problem", "answer", "subject", "level"} <= names:
        return "math500"
    return "messages" if "messages" in names and names.isdisjoint(_COLUMNS["problem"]) else "columns"
