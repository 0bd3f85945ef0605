r"""Cuts a response down to the text of its last box, and brings two spellings of an answer to the same form.

The answer of a response is its last balanced `\boxed{...}` or `\fbox{...}`. When boxes nest it is the one that opens
last. A box that holds nothing, or only what a reminder of the format holds, does not hide one before it.

Pure string work in linear time: nothing is evaluated. The rules forgive layout, not mathematics: `1/2` equals
`\frac{1}{2}`, but neither equals `0.5`. What is in doubt differs, because a policy is trained on what counts as right.
`tests/verification/` lists what is forgiven and what is not.
"""

from __future__ import annotations

import functools
import itertools
import re
from decimal import Decimal
from typing import NamedTuple

FULL_WIDTH = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # characters of East Asian texts
_COMMANDS = {  # LaTeX command -> its replacement; all others stay
    **dict.fromkeys(("dfrac", "tfrac", "cfrac", "nicefrac", "sfrac"), r"\frac"),
    **dict.fromkeys(("textbf", "textit", "textrm", "textsf", "texttt", "textnormal", "emph", "mbox"), r"\text"),
    **dict.fromkeys(("mathrm", "mathbf", "mathit", "mathsf", "boldsymbol", "bm", "operatorname"), r"\text"),
    **dict.fromkeys(("left", "right", "middle", "displaystyle", "textstyle", "limits", "nolimits"), ""),
    **dict.fromkeys(("mathopen", "mathclose"), ""),
    **{size + side: "" for size in ("big", "Big", "bigg", "Bigg") for side in ("", "l", "r", "m")},
    **dict.fromkeys(("quad", "qquad"), " "),
    "degree": "°",
    "lbrace": r"\{",
    "rbrace": r"\}",
    "lbrack": "[",
    "rbrack": "]",
    "leq": r"\le",
    "geq": r"\ge",
    "neq": r"\ne",
}
# A character, or one after a backslash. Spacing becomes a blank, which keeps the digits beside it apart.
_SYMBOLS = {"~": " ", "$": " ", "\N{MINUS SIGN}": "-"}
_ESCAPED = {"!": "", ",": " ", ":": " ", ";": " ", " ": " ", "$": "$", "%": "%"}
_DEGREE = r"\^\s*(?: \{\s*\\(?:circ|degree)\s*\} | \\(?:circ|degree)(?![A-Za-z]) )"
_TOKEN = re.compile(rf"{_DEGREE} | \\([A-Za-z]+) | \\(.) | [$~\N{{MINUS SIGN}}]", re.DOTALL | re.VERBOSE)

_UNIT = re.compile(
    r"(?:(?<=[0-9)}])|(?<=\\pi)) ?(?P<mark>[°%]?) ?"
    r"(?:\\text ?\{(?P<words>[A-Za-z./() -]*)\}(?:\^(?:(?P<power>[0-9])|\{(?P<braced>-?[0-9]+)\}))?)?$"
)
_UNIT_MARKS = str.maketrans("()-", "   ", ".")
OF_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")  # what is no longer the same in radians
_WORDS = (  # of units, with an s for several
    {"millimeter": "mm", "centimeter": "cm", "meter": "m", "kilometer": "km", "yard": "yd", "mile": "mi", "degree": "°"}
    | {"gram": "g", "kilogram": "kg", "pound": "lb", "ounce": "oz", "milliliter": "ml", "liter": "L", "gallon": "gal"}
    | {"second": "s", "minute": "min", "hour": "h", "joule": "J", "newton": "N", "watt": "W", "radian": "rad"}
    | {each: each for each in ("unit", "day", "week", "month", "year", "dollar", "cent", "euro", "way")}
)
_OTHER_WORDS = (
    {"deg": "°", "percent": "%", "per cent": "%", "inch": "in", "inches": "in", "foot": "ft", "feet": "ft", "gm": "g"}
    | {"lbs": "lb", "l": "L", "sec": "s", "hr": "h", "hrs": "h", "hz": "Hz", "hertz": "Hz", "usd": "dollar"}
    | {"degrees celsius": "° C", "degrees fahrenheit": "° F", "miles per hour": "mph", "kmh": "km/h"}
    | {"kilometers per hour": "km/h", "meters per second": "m/s"}
)
UNITS = {  # by each spelling, British ones too
    spelling: unit
    for word, unit in (_WORDS | {f"{word}s": unit for word, unit in _WORDS.items()} | _OTHER_WORDS).items()
    for spelling in (unit, word, word.replace("meter", "metre").replace("liter", "litre"))
}
_POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}
_MONEY = "dollar"
# Other words behind a gold are taken for a unit too, such as `dogs`, but for these, which are part of what it says.
_NO_UNIT = frozenset(
    {"dozen", "hundred", "thousand", "million", "billion", "trillion", "mln", "bn"}
    | {"lakh", "crore", "tenth", "hundredth", "thousandth", "more", "less", "least", "most", "than", "mod"}
    | {"base", "or", "and", "not", "no", "is", "are", "if", "wrong", "incorrect", "false"}
)

_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\frac ?([0-9])(?: ?([0-9])|(?= ?\{))")
_SHORT_ROOT = re.compile(r"\\sqrt ?([0-9])")
_SHORT_SCRIPT = re.compile(r"([\^_])\{([A-Za-z0-9])\}")
_SLASH = re.compile(r"([+-]?)([0-9]+)\.?/([0-9]+)\.?")
_NEGATIVE_NUMERATOR = re.compile(r"\\frac\{-([0-9]+)\}")
_CHOICE = re.compile(r"\(([A-Z])\)")
_ASSIGNMENT = re.compile(r"([A-Za-z]) ?= ?")
COMMAND = re.compile(r"\\[A-Za-z]+")
_NEEDLESS_BLANK = re.compile(r"(?<![0-9.]) | (?![0-9.])")

_NUMBER = re.compile(
    r"""
    (?P<mantissa>
      [+-]?\s* (?: (?: [0-9]{1,3}(?:,[0-9]{3})+ | [0-9]{1,3}(?:\ [0-9]{3})+ | [0-9]+) (?:\.[0-9]*)? | \.[0-9]+ )
    )
    (?: [eE] (?P<exponent> [+-]?[0-9]{1,5} )
      | \s* \\(?:times|cdot) \s* 10 \s* \^ \s* (?: \{ \s* (?P<power> [+-]?[0-9]{1,5} ) \s* \} | (?P<digit> [0-9] ) )
    )?
    """,
    re.VERBOSE,
)
APART = re.compile(r"(?<=[0-9])\s*\\q?quad\s*(?=[0-9])")  # between two numbers: no digits are grouped so
_NUMBER_SPACING = re.compile(r"\\[,;: ]|~")
_LONGEST_PLAIN = 1000  # digits before or behind the point of a number that is written out
MAX_ANSWER_CHARS = 10_000
MAX_NESTING = 40
_TIMES_THE_GOLD = 4  # characters of an answer, if that is more
# One alternative for each thing that matters to brace matching. An escaped brace is not a brace. `\\boxed` is a box,
# since some responses escape their backslashes. Every repetition ends at a character that it cannot match, which makes
# a scan linear in the text.
_BRACE_OR_BOX = re.compile(
    r"""
    \\\\? (?:boxed|fbox) (?![A-Za-z])
      (?: \s* (?P<open> \{ )
        | [ \t]* (?P<bare>
            # A number, unless it is only the beginning of something: `1/2`, `2\sqrt3`, `4 \times 10^5`.
            -?[0-9]+ (?:,[0-9]{3})*+ (?:\.[0-9]+)?+
              (?! [0-9A-Za-z(/*+_] | \^(?!\{?\\circ) | [ \t]*\\(?:[dt]?frac|sqrt|pi|cdot|times)(?![A-Za-z]) )
            # A command or a letter that stands alone: else it wants arguments, or is a word of a sentence.
          | (?: \\[A-Za-z]++ | [A-Za-z] ) (?= [ \t]* (?: [.,;:!?$)\]}\n] | \\[)\]] | \Z ) )
        )
      )
  | \\. | \{ | \}
    """,
    re.VERBOSE | re.DOTALL,
)

_THINKING = re.compile(
    r"<(/)?(?:think|thinking|thought|reasoning)>|<\|(?:begin|(end))_of_thought\|>|\[(/)?THINK\]", re.IGNORECASE
)
# A box that holds no more than this is no answer: layout, signs for something left out, words for an answer.
_REMINDER = re.compile(
    r"""(?: [\s{}().…_~?$<>*\[\]-] | \\[ ,;:!_] | \\(?:q?quad|[lc]?dots|text(?:bf|it|rm)?|mathrm|square|Box)(?![A-Za-z])
      | (?<![A-Za-z])(?:insert|your|the|my|final|answer|ans|result|solution|number|letter|here)(?![A-Za-z]) ){0,40}""",
    re.IGNORECASE | re.VERBOSE,
)
# What may stand between boxes that are one answer together.
_JOINT = re.compile(
    r"""(?: [\s,;.:&$~{}*] | \\[ ,;:!\[\]()\\] | \\(?:q?quad|text|mathrm|mbox|land|lor)(?![A-Za-z])
      | (?<![A-Za-z])(?:and|or|also|first|second|third|other|root|solution)(?![A-Za-z])
      | (?<![A-Za-z])[A-Za-z](?:_\{?[A-Za-z0-9]\}?)?\s*= ){0,40}""",
    re.IGNORECASE | re.VERBOSE,
)


class NormalForm(NamedTuple):
    """The parts of an answer that are compared."""

    variable: str  # `x` of `x=5`; empty if there is none
    value: str
    unit: str  # behind a value, in small letters; empty if there is none


@functools.lru_cache(maxsize=4096)  # the branches of one rollout mostly give the same few answers
def normal_form(answer: str) -> NormalForm:
    r"""Return an answer without what is only layout. The steps, in order:

    1. Drop white space around it, and a trailing full stop.
    2. Drop `\left`, `\right`, `\big` and `$`. Spacing commands become blanks, `^\circ` and `\degree` a degree sign.
    3. Replace `\dfrac` by `\frac`, `\mathrm` and its like by `\text`, `\leq` by `\le`.
    4. Take a unit (degree or per cent sign, words in `\text`) from behind a value; unwrap every other `\text{..}`.
       `\$` is a unit wherever it stands.
    5. Take `x=` from before a value that does not hold x.
    6. Write a number without thousands separators, leading zeros, and decimals that are zero.
    7. Otherwise spell out `\frac12`, `\sqrt3`, `1/2` and `\frac{-1}{2}`, shorten `x^{2}`, drop the brackets of a choice
       `(C)`, and drop all white space that does not stand between two digits.
    """
    text = clean_layout(answer)
    money = _MONEY if "$" in text else ""
    text, unit = split_unit(" ".join(text.replace("$", " ").split()))
    text = strip_answer(" ".join(_TEXT.sub(r"\1", text).split()).replace("{,}", ","))
    variable = ""
    if (match := _ASSIGNMENT.match(text)) and match[1] not in COMMAND.sub("", text[match.end() :]):
        variable, text = match[1], text[match.end() :]
    number = None if APART.search(answer) else parse_number(text)
    return NormalForm(variable, _tidy(text) if number is None else _plain(number), unit or money)


def normalize_answer(answer: str) -> str:
    """Return the answer's normal form as one string, with its variable and unit."""
    variable, value, unit = normal_form(answer)
    return (f"{variable}=" if variable else "") + value + unit


def same_answer(gold: str, answer: str) -> bool:
    r"""Return whether `answer` is `gold` in another spelling.

    One of the two may lack the variable or the unit. The answer's unit must then be known, because any words could
    follow (`3\text{ million}`, `3\text{ is wrong}`). Two variables or two units must be the same. An oversized answer
    must be the gold word for word.
    """
    if is_oversized(answer, gold):
        return answer.split() == strip_answer(gold).split()
    wanted, given = normal_form(gold), normal_form(answer)
    if wanted.value != given.value or not variables_agree(wanted, given):
        return False
    unit, _, power = given.unit.partition("^")
    # `\$8` lacks the rest of `8\text{ dollars per hour}`, but is not `8\text{ cents}`.
    if not unit or (unit == _MONEY and wanted.unit.partition("^")[0] not in UNITS):
        return not changes_value(wanted.unit)
    return wanted.unit == given.unit or (not wanted.unit and unit in UNITS and power in ("", "2", "3"))


def changes_value(unit: str) -> bool:
    """Return whether a word behind a value makes it another, or none: `million`, `or more`, `is wrong`."""
    return any(not _NO_UNIT.isdisjoint((word, word.removesuffix("s"))) for word in unit.lower().split())


def variables_agree(wanted: NormalForm, given: NormalForm) -> bool:
    """Return whether two answers name the same variable, or one of them names none."""
    return wanted.variable == given.variable or not (wanted.variable and given.variable)


def parse_number(text: str) -> Decimal | None:
    r"""Return the value of one plain or scientific decimal (`-1,234.50`, `1\,234`, `4.5e33`, `2 \times 10^{-3}`).

    None for anything else.
    """
    text = _NUMBER_SPACING.sub(" ", text.replace(r"\!", "")).replace("{,}", ",")
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    exponent = match["exponent"] or match["power"] or match["digit"] or "0"
    mantissa = match["mantissa"].replace(",", "").replace(" ", "")
    return Decimal(f"{mantissa}e{exponent}")


def _rewrite(token: re.Match[str]) -> str:
    command, symbol = token[1], token[2]
    if command is not None:
        return _COMMANDS.get(command, token[0])
    if symbol is not None:
        return _ESCAPED.get(symbol, token[0])  # others are an escaped brace, a row separator
    return _SYMBOLS.get(token[0], "°")


def clean_layout(answer: str) -> str:
    """Return an answer after steps 1 to 3 of `normal_form`."""
    return _TOKEN.sub(_rewrite, strip_answer(answer))


def split_unit(text: str) -> tuple[str, str]:
    """Return what stands before a unit, and the unit: `cm^2` for square centimetres, or the words as they are."""
    match = _UNIT.search(text)
    if match is None or match.end() == match.start():
        return text, ""
    words = list(map(_lower_unit, (match["words"] or "").translate(_UNIT_MARKS).split()))
    power = match["power"] or match["braced"] or "1"
    if words and words[0] in _POWERS:
        power = _POWERS[words.pop(0)]
    name = " ".join(filter(None, [match["mark"], *words]))
    unit = UNITS.get(name, name)
    if unit.startswith("°") and OF_ANGLE.search(text):
        return text, ""
    return text[: match.start()], unit + (f"^{power}" if power != "1" else "")


def _lower_unit(word: str) -> str:
    """Return a unit's word in small letters, but for short ones that could be another unit: `MW` is not `mW`."""
    return word.lower() if len(word) > 3 or (len(word) > 1 and word.lower() in UNITS) else word


def _tidy(text: str) -> str:
    text = _SHORT_FRACTION.sub(lambda match: rf"\frac{{{match[1]}}}" + (f"{{{match[2]}}}" if match[2] else ""), text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text)
    text = _SHORT_SCRIPT.sub(r"\1\2", _NEEDLESS_BLANK.sub("", text))
    if match := _SLASH.fullmatch(text):
        return rf"{match[1]}\frac{{{match[2]}}}{{{match[3]}}}"
    if match := _CHOICE.fullmatch(text):
        return match[1]
    return _NEGATIVE_NUMERATOR.sub(r"-\\frac{\1}", text) if text.startswith(r"\frac{-") else text


def _plain(number: Decimal) -> str:
    if not number:
        return "0"  # -0, 0.00
    if abs(number.adjusted()) > _LONGEST_PLAIN:
        sign, digits, _ = number.as_tuple()
        significant = "".join(map(str, digits)).rstrip("0")
        return f"{'-' * sign}{significant}e{number.adjusted()}"
    text = format(number, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last balanced box in `text`, stripped; None when there is none.

    Spaces may stand before the brace. Without braces a box may hold one number, command or letter (`\boxed 5`). It may
    not hold a word of prose (`\boxed a form`) or a command with arguments (`\boxed \frac12`), because TeX would not
    box those as they are meant. A box that never closes is not a box, and an earlier one that closes counts instead.
    So does one before a box that is empty or a reminder of the format (`\boxed{answer}`). A box within a thinking block
    that never closes is none. Surrounding white space and one trailing full stop are dropped. An empty box gives the
    empty string. Linear in the length of `text`.
    """
    boxes, _ = _find_boxes(text)
    return boxes[-1].content(text) if boxes else None


def boxed_answers(text: str) -> tuple[str, ...]:
    r"""Return what the response may mean as its answer: its last box and, of several boxes at its end, all as a list.

    The latter are joined by commas, in order: `\boxed{1} and \boxed{2}` gives `2` and `1, 2`. Nothing where there is no
    box, or nothing but layout in it.
    """
    boxes, _ = _find_boxes(text)
    run = boxes[-1:]
    last = run[0].content(text) if run else ""
    if not (is_oversized(last) or normal_form(last).value):
        return ()
    for box in reversed(boxes[:-1]):
        if box.end > run[-1].start:  # it holds the other one
            continue
        if not _JOINT.fullmatch(text, box.end, run[-1].start):
            break
        run.append(box)
    return tuple(dict.fromkeys([last, ", ".join(box.content(text) for box in reversed(run))]))


def answer_start(text: str) -> int | None:
    """Return where the box begins that `extract_boxed` reads or, where no box closes, the last; None without a box."""
    boxes, open_start = _find_boxes(text)
    return boxes[-1].start if boxes else open_start


class _Box(NamedTuple):
    """Places in the text of a box that closes."""

    start: int
    content_start: int
    content_end: int
    end: int

    def content(self, text: str) -> str:
        return strip_answer(text[self.content_start : self.content_end])


def _find_boxes(text: str) -> tuple[list[_Box], int | None]:
    """Return the boxes that close, as they open, up to the last with an answer, and where one opens that does not."""
    thinking = None  # where a block begins that does not end
    for tag in _THINKING.finditer(text):
        thinking = None if any(tag.groups()) else tag.start() if thinking is None else thinking
    text = text[:thinking]
    open_braces: list[int | None] = []  # where the command of a box starts; None for any other brace
    contents: list[int] = []  # where the content of that brace starts
    boxes: list[_Box] = []
    first_box = min((at for at in (text.find(r"\boxed"), text.find(r"\fbox")) if at >= 0), default=len(text))
    for token in _BRACE_OR_BOX.finditer(text, first_box):
        if token["bare"] is not None:
            boxes.append(_Box(token.start(), *token.span("bare"), token.end()))
        elif token["open"] is not None or token[0] == "{":
            open_braces.append(None if token["open"] is None else token.start())
            contents.append(token.end())
        elif token[0] == "}" and open_braces:
            box, start = open_braces.pop(), contents.pop()
            if box is not None:
                boxes.append(_Box(box, start, token.start(), token.end()))
    boxes.sort()
    kept, after = len(boxes), len(text)
    while kept and (boxes[kept - 1].end > after or _REMINDER.fullmatch(text, *boxes[kept - 1][1:3])):
        kept, after = kept - 1, boxes[kept - 1].start
    return boxes[: kept or None], max((box for box in open_braces if box is not None), default=None)


def strip_answer(answer: str) -> str:
    """Return `answer` without surrounding white space and one trailing full stop. An ellipsis stays."""
    answer = answer.strip()
    if answer.endswith(".") and not answer.endswith(".."):
        answer = answer[:-1].rstrip()
    return answer


def is_oversized(answer: str, gold: str = "") -> bool:
    """Return whether an answer is too long or too deep to be that gold. Such an answer must not reach a parser."""
    if len(answer) > max(MAX_ANSWER_CHARS, _TIMES_THE_GOLD * len(gold)):
        return True
    return max(depths(answer), default=0) > max([MAX_NESTING, *depths(gold)])


def depths(text: str) -> list[int]:
    """Return how many brackets are open behind each character. They may be of two kinds, as an interval's are."""
    return list(itertools.accumulate((each in "{[(") - (each in "}])") for each in text))
