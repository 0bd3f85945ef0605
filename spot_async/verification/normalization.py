r"""Brings two spellings of one short answer to the same string, by rules that fit on this page.

Pure string work in linear time: nothing is evaluated. The rules forgive layout, not mathematics: `1/2` equals
`\frac{1}{2}`, but neither equals `0.5`. `tests/verification/` lists what is forgiven and what is not.
"""

from __future__ import annotations

import functools
import re
from decimal import Decimal

from spot_async.verification.extraction import strip_answer

_COMMANDS = {  # LaTeX command -> its replacement; all others stay
    **dict.fromkeys(("dfrac", "tfrac", "cfrac"), r"\frac"),
    **dict.fromkeys(("textbf", "textit", "textrm", "textnormal", "mathrm", "mathbf", "mbox", "operatorname"), r"\text"),
    **dict.fromkeys(("left", "right", "displaystyle", "quad", "qquad", "degree", "big", "Big", "bigl", "bigr"), ""),
    "lbrace": r"\{",
    "rbrace": r"\}",
    "leq": r"\le",
    "geq": r"\ge",
    "neq": r"\ne",
}
_DROPPED_SYMBOLS = "!,;: $%"  # after a backslash: spacing, currency, per cent
_TOKEN = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\([A-Za-z]+)|\\(.)|[$%~°]", re.DOTALL)

_UNIT = re.compile(r"(?<=[0-9}])\s*\\text\s*\{[^{}]*\}(?:\^(?:[0-9]|\{[0-9]\}))?\s*$")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\frac([0-9])(?:([0-9])|(?=\{))")
_SHORT_ROOT = re.compile(r"\\sqrt([0-9])")
_SHORT_SCRIPT = re.compile(r"([\^_])\{([A-Za-z0-9])\}")
_SLASH = re.compile(r"([+-]?)([0-9]+)/([0-9]+)")
_NEGATIVE_NUMERATOR = re.compile(r"\\frac\{-([0-9]+)\}")
_CHOICE = re.compile(r"\(([A-Z])\)")
_ASSIGNMENT = re.compile(r"[A-Za-z]=")

_NUMBER = re.compile(
    r"""
    (?P<mantissa> [+-]? (?: (?:[0-9]{1,3}(?:,[0-9]{3})+ | [0-9]+) (?:\.[0-9]*)? | \.[0-9]+ ) )
    (?: [eE] (?P<exponent> [+-]?[0-9]{1,3} )
      | \s* \\(?:times|cdot) \s* 10 \s* \^ (?: \{ \s* (?P<power> [+-]?[0-9]{1,3} ) \s* \} | (?P<digit> [0-9] ) )
    )?
    """,
    re.VERBOSE,
)
_NUMBER_SPACING = re.compile(r"\\[!,;:]\s*")


@functools.lru_cache(maxsize=4096)  # the branches of one rollout mostly give the same few answers
def normalize_answer(answer: str) -> str:
    r"""Return the canonical spelling of an answer. The steps, in order:

    1. Drop white space around it, and a trailing full stop.
    2. Drop `\left`, `\right`, spacing commands, `$`, degree and per cent signs.
    3. Replace `\dfrac` by `\frac`, `\mathrm` and its like by `\text`, `\leq` by `\le`.
    4. Drop a unit in `\text` after a number; unwrap every other `\text{..}`.
    5. Drop all white space.
    6. Spell out `\frac12`, `\sqrt3`, `1/2` and `\frac{-1}{2}`; shorten `x^{2}`.
    7. Drop `x=` and the brackets of a choice `(C)`.
    8. Write numbers without thousands commas, leading zeros, and decimals that are zero.
    """
    text = _TOKEN.sub(_rewrite, strip_answer(answer))
    text = _TEXT.sub(r"\1", _UNIT.sub("", text))
    text = strip_answer("".join(text.split()).replace("{,}", ","))
    text = _SHORT_FRACTION.sub(lambda match: rf"\frac{{{match[1]}}}" + (f"{{{match[2]}}}" if match[2] else ""), text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text)
    text = _SHORT_SCRIPT.sub(r"\1\2", text)
    if match := _ASSIGNMENT.match(text):
        text = text[match.end() :]
    if match := _SLASH.fullmatch(text):
        text = rf"{match[1]}\frac{{{match[2]}}}{{{match[3]}}}"
    if match := _CHOICE.fullmatch(text):
        text = match[1]
    text = _NEGATIVE_NUMERATOR.sub(r"-\\frac{\1}", text) if text.startswith(r"\frac{-") else text
    number = parse_number(text)
    return text if number is None else _plain(number)


def parse_number(text: str) -> Decimal | None:
    r"""Return the value of one plain or scientific decimal (`-1,234.50`, `4.5e33`, `2 \times 10^{-3}`), else None."""
    match = _NUMBER.fullmatch(_NUMBER_SPACING.sub("", text).replace("{,}", ",").strip())
    if match is None:
        return None
    exponent = match["exponent"] or match["power"] or match["digit"] or "0"
    return Decimal(f"{match['mantissa'].replace(',', '')}e{exponent}")


def _rewrite(token: re.Match[str]) -> str:
    command, symbol = token[1], token[2]
    if command is not None:
        return _COMMANDS.get(command, token[0])
    if symbol is not None and symbol not in _DROPPED_SYMBOLS:
        return token[0]  # an escaped brace, a row separator
    return ""


def _plain(number: Decimal) -> str:
    if not number:
        return "0"  # -0, 0.00
    text = format(number, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
