r"""Finds texts whose escapes were read once too often, or once too seldom, before they came here.

JSON, Python and double quotes in YAML read `\f` of `\frac` as a form feed, and `\t` of `\text` as a tab. Line ends and
tabs are usually meant: they count only with the rest of a command behind them that is no word.
"""

from __future__ import annotations

import re

from spot_async.base.text import visible

SHOWN_CHARS = 12
_EATEN = (
    r"[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f] | [\r\u2028\u2029](?=[a-z])"  # YAML reads `\L` and `\P` as the last two
    r"| \t (?: ext[a-z]*\s*\{ | (?:frac|heta|ilde|imes|riangle)(?![a-z]) ) | \n (?:abla|eq|geq|leq|otin)(?![a-z])"
)
EATEN = re.compile(_EATEN, re.VERBOSE)
EATEN_IN_ANSWER = re.compile(rf"{_EATEN} | \t[a-z] | \A\n[a-z]", re.VERBOSE)  # `\tau`, `\nu`
_COMMANDS = (
    "alpha|angle|beta|begin|boxed|cdot|circ|cos|delta|dfrac|end|frac|gamma|geq|infty|lambda|left|leq|log|mathbb|mathbf|"
    "mathrm|neq|operatorname|overline|pi|right|sin|sqrt|text|textbf|tfrac|theta|times|triangle"
)
DOUBLED = re.compile(rf"(?<!\\)(?:\\\\)+(?:{_COMMANDS})(?![A-Za-z])")
_LINE_END_AND_TAB = str.maketrans("\n\t", "\N{SYMBOL FOR LINE FEED}\N{SYMBOL FOR HORIZONTAL TABULATION}")


def place_of(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the first place that a pattern finds, in visible symbols; None if it finds none."""
    if (found := pattern.search(text)) is None:
        return None
    return "'" + visible(text[found.start() : found.start() + SHOWN_CHARS]).translate(_LINE_END_AND_TAB) + "'"
