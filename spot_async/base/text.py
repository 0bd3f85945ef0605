"""Formats values and errors for people: in the terminal, on pages and in one-line messages."""

from __future__ import annotations

import math
import unicodedata


def counted(number: int, noun: str) -> str:
    """Return `1 sample`, `2 samples`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def with_error(share: float, standard_error: float | None, *, signed: bool = False) -> str:
    """Return `61.5 ±2.6`: a share and its standard error in percent, without the error if it is None or NaN."""
    text = f"{100 * share:{'+' if signed else ''}.1f}"
    if standard_error is None or not math.isfinite(standard_error):
        return text
    return f"{text} ±{100 * standard_error:.1f}"


def rough_time(seconds: float) -> str:
    """Return `45 s`, `30 min`, `8 h`, `365 days`."""
    for unit, length_s in (("days", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length_s:
            number = seconds / length_s
            return f"{number:,.0f} {unit}" if number < 1e7 else f"{number:.0e} {unit}"
    return f"{seconds:.0f} s"


def shortened(text: str, characters: int) -> str:
    """Return the text's first `characters`, with an ellipsis if there are more."""
    return text if len(text) <= characters else f"{text[:characters]}…"


def kind_of_value(value: object) -> str:
    """Return what YAML and JSON call this type of value."""
    kinds = {dict: "a mapping", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, for errors that must be one line."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def visible(text: str) -> str:
    """Return the text with control and direction characters replaced by visible symbols.

    Terminals obey escape sequences and browsers obey direction overrides, even those in text that a model wrote.
    """
    return "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character in "\n\t":
        return character
    category = unicodedata.category(character)
    if category == "Cc":
        return chr(0x2400 + ord(character)) if ord(character) < 0x20 else "�"
    if category in ("Cf", "Cs", "Zl", "Zp") and character != "\u200d":  # this joiner makes emoji and is harmless
        return "�"
    return character
