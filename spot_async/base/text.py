r"""Formats values and errors for people: in the terminal, on pages and in one-line messages.

It also finds what escapes left in texts. JSON, Python and double quotes in YAML read `\f` of `\frac` as a form feed and
`\t` of `\text` as a tab. Line ends and tabs are usually meant: they count only before the rest of a command that is no
word.
"""

from __future__ import annotations

import math
import re
import unicodedata

_EATEN = (
    r"[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f] | [\r\u2028\u2029](?=[a-z])"  # YAML reads `\L` and `\P` as the last two
    r"| \t (?: ext[a-z]*\s*\{ | (?:frac|heta|ilde|imes|riangle)(?![a-z]) ) | \n (?:abla|otin)(?![a-z])"
    r"| \n (?:eq|geq|leq)(?! [a-z] | \w*(?:\s*,\s*\w+)*\s*=(?!=) | \. | \s*\n | \s*\Z )"  # not a line of SymPy
)
EATEN = re.compile(_EATEN, re.VERBOSE)
EATEN_IN_ANSWER = re.compile(rf"{_EATEN} | \t[a-z] | \A\n[a-z]", re.VERBOSE)  # `\tau`, `\nu`
_COMMANDS = (
    "alpha|angle|approx|bar|begin|beta|binom|boxed|cap|cdots?|circ|cos|cot|csc|cup|degree|delta|dfrac|ldots|dots|emptyset|"
    "end|epsilon|equiv|exists|forall|frac|gamma|geq|geqslant|hat|infty|int|lambda|langle|lceil|left|leq?|leqslant|lfloor|"
    "lim|ln|log|mathbb|mathbf|mathcal|mathrm|mid|mu|neq?|notin|omega|operatorname|overline|overrightarrow|parallel|perp|"
    "phi|pi|pm|pmod|prod|quad|rangle|rceil|rfloor|rho|right|rightarrow|sec|sigma|sin|sqrt|subseteq|subset|sum|tan|tau|"
    "text|textbf|tfrac|theta|times|triangle|underline|varepsilon|varnothing|varphi|vec"
)
DOUBLED = re.compile(rf"(?<!\\)(?:\\\\)+(?:{_COMMANDS})(?![A-Za-z])")
_LINE_END_AND_TAB = str.maketrans("\n\t", "\N{SYMBOL FOR LINE FEED}\N{SYMBOL FOR HORIZONTAL TABULATION}")


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


def shown_size(number: int) -> str:
    """Return `12.3 MB` for a number of bytes."""
    size, unit = next((each for each in ((1e9, "GB"), (1e6, "MB")) if number >= each[0]), (1e3, "kB"))
    return f"{number / size:,.1f} {unit}"


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


def place_of(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the first place that a pattern finds, in visible symbols; None if it finds none."""
    if (found := pattern.search(text)) is None:
        return None
    return "'" + visible(text[found.start() : found.start() + 12]).translate(_LINE_END_AND_TAB) + "'"


def _shown(character: str) -> str:
    if character in "\n\t":
        return character
    category = unicodedata.category(character)
    if category == "Cc":
        return chr(0x2400 + ord(character)) if ord(character) < 0x20 else "�"
    if category in ("Cf", "Cs", "Zl", "Zp") and character != "\u200d":  # this joiner makes emoji and is harmless
        return "�"
    return character
