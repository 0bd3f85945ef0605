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
_IN_TEXT = re.compile(_EATEN, re.VERBOSE)
_IN_ANSWER = re.compile(rf"{_EATEN} | \t[a-z] | \A\n[a-z]", re.VERBOSE)  # `\tau`, `\nu`
_COMMANDS = (
    "alpha angle beta begin boxed cdot circ cos delta dfrac end frac gamma geq infty lambda left leq log mathbb mathbf "
    "mathrm neq operatorname overline pi right sin sqrt text textbf tfrac theta times triangle"
)
_DOUBLED = re.compile(rf"(?<!\\)(?:\\\\)+(?:{_COMMANDS.replace(' ', '|')})(?![A-Za-z])")
_LINE_END_AND_TAB = str.maketrans("\n\t", "\N{SYMBOL FOR LINE FEED}\N{SYMBOL FOR HORIZONTAL TABULATION}")


def eaten(text: str, *, is_answer: bool = False) -> str | None:
    """Return where a text has a control character that nobody means, in visible symbols; None for nowhere."""
    return _place(_IN_ANSWER if is_answer else _IN_TEXT, text)


def doubled(text: str) -> str | None:
    """Return where a text has two backslashes before a command of LaTeX; None for nowhere."""
    return _place(_DOUBLED, text)


def _place(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.search(text)
    if found is None:
        return None
    return "'" + visible(text[found.start() : found.start() + SHOWN_CHARS]).translate(_LINE_END_AND_TAB) + "'"
