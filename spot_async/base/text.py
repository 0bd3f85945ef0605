"""Strings as people read them, wherever something is shown: terminal, pages and one-line messages."""

from __future__ import annotations

import math
import unicodedata


def counted(number: int, noun: str) -> str:
    """`1 sample`, `2 samples`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def with_error(share: float, standard_error: float | None, *, signed: bool = False) -> str:
    """`61.5 ±2.6`: a share and its standard error, both in percent; without the error where it is None or NaN."""
    text = f"{100 * share:{'+' if signed else ''}.1f}"
    if standard_error is None or not math.isfinite(standard_error):
        return text
    return f"{text} ±{100 * standard_error:.1f}"


def rough_time(seconds: float) -> str:
    """`45 s`, `30 min`, `8 h`, `365 days`."""
    for unit, length_s in (("days", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length_s:
            number = seconds / length_s
            return f"{number:,.0f} {unit}" if number < 1e7 else f"{number:.0e} {unit}"
    return f"{seconds:.0f} s"


def shortened(text: str, characters: int) -> str:
    """The text's first `characters`, with an ellipsis where there are more."""
    return text if len(text) <= characters else f"{text[:characters]}…"


def kind_of_value(value: object) -> str:
    """What YAML and JSON call a plain value."""
    kinds = {dict: "a mapping", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, for errors that must fit on one."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def visible(text: str) -> str:
    """Text whose every character shows: control and direction characters become symbols.

    A terminal obeys escape sequences and a browser obeys direction overrides, whoever wrote them.
    """
    return "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character in "\n\t":
        return character
    category = unicodedata.category(character)
    if category == "Cc":
        return chr(0x2400 + ord(character)) if ord(character) < 0x20 else "�"
    if category in ("Cf", "Cs", "Zl", "Zp") and character != "\u200d":  # the joiner makes emoji, and harms nobody
        return "�"
    return character
