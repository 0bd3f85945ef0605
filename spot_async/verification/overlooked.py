r"""Finds what Math-Verify would overlook in a wrong answer: string work in linear time, before anything is parsed.

Math-Verify drops what it cannot read and compares the rest. It takes `3\text{ million}`, `\neq 3` and `3_7` for 3, and
a policy that is trained on such verdicts learns to write them. What is found here is wrong, unless both answers have
the same normal form.
"""

from __future__ import annotations

import re

from spot_async.verification.normalization import UNITS, NormalForm, changes_value, variables_agree

_MARKUP = re.compile(r"</?(?:sub|sup|br|em|strong|span|div)\b[^<>]*>|&#?[a-z0-9]+;", re.IGNORECASE)
_SUFFIXED = re.compile(r"[+-]?[0-9A-F]+_(?:([0-9])\Z|\{\s*([0-9]+)\s*\}\Z|[({\\])")
_RELATION = re.compile(r"[=<>≤≥≠∈]|\\(?:leq?|geq?|neq?|lt|gt|leqslant|geqslant|neg|lnot|not|in|equiv)(?![A-Za-z])")
_EQUATION = re.compile(r"[^=]*[A-Za-z)}]\s*[-+*/^][^=]*=")
_NAMED_IN_LIST = re.compile(r"[0-9}]\s*\\(?:text|mathrm|mbox)\s*\{[^{}]*\}\s*,")
_TWO_NUMBERS = re.compile(r"[0-9] [0-9]+(?![0-9/])")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_LONE_LETTER = re.compile(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z])")
_WORD = re.compile(r"[A-Za-z]{3,}")
_PRIME = re.compile(r"[A-Za-z)]\s*(?:'|\^\s*\{?\s*\\prime)")
_CONSTANTS = frozenset("ei")


def is_overlooked(gold: str, answer: str, wanted: NormalForm, given: NormalForm) -> bool:
    """Return whether the answers differ in something that Math-Verify does not read. The forms are theirs."""
    texts, values = (gold, answer), (wanted.value, given.value)
    return (
        not variables_agree(wanted, given)
        or _units_differ(wanted.unit, given.unit)
        or any(map(_MARKUP.search, texts))
        or any(map(_NAMED_IN_LIST.search, texts))
        or any(map(_TWO_NUMBERS.search, values))
        or all(map(_WORD.fullmatch, values))  # the letters would be factors: `east` would be `seat`
        or len(_PRIME.findall(gold)) != len(_PRIME.findall(answer))
        or _bases_differ(gold, answer)
        or _relations_differ(gold, answer)
        or _letters_differ(gold, answer)
    )


def _units_differ(wanted: str, given: str) -> bool:
    """Any words may be a unit here, since evaluations ask for many. Two known units must be the same."""
    if wanted == given:
        return False
    if changes_value(wanted) or changes_value(given):
        return True
    return {wanted.partition("^")[0], given.partition("^")[0]} <= UNITS.keys() and "%" not in (wanted, given)


def _bases_differ(gold: str, answer: str) -> bool:
    """Whether the answer is to a base and the gold to another, or to none. A gold to a base may stand without it."""
    wanted, given = _SUFFIXED.match(gold), _SUFFIXED.match(answer)
    if wanted is None or given is None:
        return given is not None and "_" not in gold
    bases = [base for found in (wanted, given) if (base := found[1] or found[2])]
    return len(bases) == 2 and int(bases[0]) != int(bases[1])


def _relations_differ(gold: str, answer: str) -> bool:
    r"""Whether one says what holds of its value (`\neq 5`), or the gold is an equation and the answer none."""
    wanted, given = _RELATION.search(gold), _RELATION.search(answer)
    leads = any(
        found is not None and not text[: found.start()].strip() for found, text in ((wanted, gold), (given, answer))
    )
    return (leads and (wanted is None or given is None)) or (given is None and _EQUATION.match(gold) is not None)


def _letters_differ(gold: str, answer: str) -> bool:
    """Whether a variable of one is missing in the other. Of intervals and equations, one side may be left out."""
    if _RELATION.search(gold) or _RELATION.search(answer):
        return False
    wanted, given = (_COMMAND.sub(" ", text).replace("~", " ") for text in (gold, answer))
    missing = set(_LONE_LETTER.findall(wanted.lower())) - set(given.lower()) - _CONSTANTS
    added = set(_LONE_LETTER.findall(given.lower())) - set(wanted.lower()) - _CONSTANTS
    return bool(missing or {letter for letter in added if letter not in UNITS and letter.upper() not in UNITS})
