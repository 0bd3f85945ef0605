r"""The verifier of evaluations and data checks: the normal forms first, then Math-Verify without its leniencies.

Two answers of the same normal form are equal, as in training. Otherwise both are respelled as LaTeX (`np.arcsin(1/2)`,
`x²≥4`), lists are compared element by element, and what is left goes to Math-Verify, all of it in the worker processes
of `math_verify.py`. It reads LaTeX only, to its end, and a set may be given as a relation (`3<x\le 4` for `(3,4]`).

Math-Verify drops what it cannot read and compares the rest. It takes `3\text{ million}`, `\neq 3` and `3_7` for 3, and
a policy that is trained on such verdicts learns to write them. What is found here is wrong.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from itertools import pairwise

from spot_async.verification.math_verify import FUNCTIONS, MathVerify, compare_strings, numbers_equal
from spot_async.verification.normalization import (
    APART,
    COMMAND,
    FULL_WIDTH,
    OF_ANGLE,
    UNITS,
    boxed_answers,
    changes_value,
    clean_layout,
    depths,
    normal_form,
    parse_number,
    same_answer,
    split_unit,
    strip_answer,
    variables_agree,
)

Ask = Callable[[str, str], bool]

_LONGEST_LIST = 20  # elements of which each is compared with each
_ONE_CHARACTER = "½¼¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_SIGNS = str.maketrans(
    FULL_WIDTH
    | {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "×": r"\times ", "·": r"\cdot ", "±": r"\pm "}
    | {"∀": r"\forall ", "∃": r"\exists ", "ℝ": r"\mathbb{R}", "∅": r"\emptyset ", "∩": r"\cap ", "θ": r"\theta "}
    | {"π": r"\pi ", "√": r"\sqrt ", "∞": r"\infty ", "∈": r"\in ", "∪": r"\cup ", "∧": r"\land ", "∨": r"\lor "}
    | {"²": "^{2}", "³": "^{3}", "⁺": "^{+}", "⁻": "^{-}", "–": "-"}
    | {each: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", each).split("⁄")) for each in _ONE_CHARACTER}
)
_RESPELLINGS = tuple(
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r"\A\\[\[(](.*)\\[\])]\Z", r"\1"),
        (r",?\s*(?:\\text\s*\{)?\s*for (?:all|every|any)\b.*\Z", ""),
        (r"<sup>(.*?)</sup>", r"^{\1}"),
        (r"<sub>(.*?)</sub>", r"_{\1}"),
        (rf"(?<![0-9)}}])(?<![0-9)}}] )\\text\s*\{{\s*([A-Za-z]|{FUNCTIONS})\s*\}}", r" \1 "),  # no unit
        (r"\\text\s*\{([^{}]*\w) (and|or)\s*\}", r"\\text{\1}\\text{ \2 }"),
        (r"\\text\s*\{([^{}]*[0-9(,+=][^{}]*)\}", r"\1"),  # mathematics in bold type
        (r"(?<![A-Za-z\\])(?:np|numpy|math)\.log(?![0-9A-Za-z])", r"\\ln "),
        (r"(?<![A-Za-z\\])(?:np|numpy|math)\.log(2|10)(?=\()", r"\\log_{\1}"),
        (r"(?<![A-Za-z\\])(?:np|numpy|math|sympy)\.(?=[a-z])", ""),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"(?<![A-Za-z\\])a(?=(?:sin|cos|tan)(?![A-Za-z]))", "arc"),
        (rf"(?<![A-Za-z\\])({FUNCTIONS})(?![A-Za-z])", r"\\\1"),
        (r"(?<![A-Za-z\\])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty"),
        (r"\\sqrt\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)", r"\\sqrt{\1}"),
        (r"<=|=<", r"\\le "),
        (r">=|=>", r"\\ge "),
        (r"(?<=\s)!=", r"\\ne "),
        (r"\*\*", "^"),
        (r"\*", r" \\cdot "),
        (r"(?<=[0-9])\.(?=\s*(?:[/)]|\\cdot|\Z))", ""),
        (r"(?<![A-Za-z\\.0-9])([0-9]+\.?[0-9]*|\.[0-9]+)[eE]([+-]?[0-9]{1,3})(?![0-9A-Za-z.])", r"\1 \\times 10^{\2}"),
        (r"(?<=[0-9)}])i(?![A-Za-z])", " i"),
        (r"(?<![A-Za-z\\])([EI])_(?:\{(\w+)\}|(\w))", r"\\text{\1\2\3}"),  # not Euler's number, nor the imaginary unit
        (r"\\text ?\{ ?deg(?:ree)?s? ?\}", "°"),
        (r"\\(?:lor|vee)(?![A-Za-z])", r"\\text{ or }"),
        (r"\\(?:land|wedge)(?![A-Za-z])", r"\\text{ and }"),
        (r"(?<=\\in) ?([RNZQC])(?![A-Za-z])", r" \\mathbb{\1}"),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"\A\{([^{}]*\|[^{}]*)\}\Z", r"\\{\1\\}"),
        (r"\\\{ ?[A-Za-z](?: ?\\in ?\\(?:mathbb ?\{R\}|mathbb R|R))? ?(?:\\mid|\\vert|\||\\colon|:) ?(.*)\\\}", r"\1"),
        (r"\A(?:\\(?:approx|simeq|sim)(?![A-Za-z])|≈|=)\s*", ""),
    )
)
_BOLD = re.compile(r"\\text\s*\{(.*\\.*)\}")
_ABOUT = re.compile(r"\\approx(?![A-Za-z])|≈")
_BARE_UNIT = re.compile(r"(?<=[0-9)}°% ])((?:(?<![A-Za-z/\\])[A-Za-z/]{2,} ?)+)((?:\^(?:[0-9]|\{-?[0-9]+\}))?)\Z")
_LEAST_WORD = 4  # letters of a word that is not taken for a product of variables
_BRACKETS = re.compile(r"(\\\{|[(\[])(.*)(\\\}|[)\]])", re.DOTALL)
_SEPARATOR = re.compile(r"\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|;")
_JOINT = re.compile(r"(?<![A-Za-z])(?:and|or)(?![A-Za-z])")
_ORDER = re.compile(r"[<>]|\\(?:leq?|geq?|lt|gt|leqslant|geqslant)(?![A-Za-z])")
_NAMED = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?\s*=")

_MARKUP = re.compile(r"</?(?:sub|sup|br|em|strong|span|div)\b[^<>]*>", re.IGNORECASE)
_WITH_BASE = re.compile(
    r"\A(\()?([+-]?[0-9A-F]+(?:\.[0-9A-F]+)?)(?(1)\))\s*"
    r"(?:_\s*([0-9]|\{[^{}]*(?:\{[^{}]*\})?[^{}]*\}|\([0-9]+\)|\\text\s*\{\w+\})|\\text\s*\{\s*\(?(base[^{}]*)\})"
)
_BASE = re.compile(r"[+-]?[0-9A-F.]+_\{(\w+)\}")
_BASE_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_DOTTED = r"\\(?:dot|overset ?\{[^{}0-9]*\}) ?(?:\{[0-9]\}|[0-9])"
_REPEATING = re.compile(
    r"([0-9]*)\.([0-9]*)"
    rf"(\\(?:overline|bar)\s*(?:\{{[0-9]+\}}|[0-9])|{_DOTTED}(?:[0-9]*{_DOTTED})*|(?<=\.)\([0-9]+\))(?![0-9])"
)
# `2 2/3` and `1,000 1/2`, but not behind another number.
_MIXED = re.compile(
    r"(?<![0-9A-Za-z.^_/])(?<![0-9] )([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+) ([0-9]+) ?/ ?([0-9]+)(?! ?[0-9/^]|\.[0-9])"
)
# A number with separators in an argument or above a slash: `\frac{1,000}{3}`, `1,000/3`. A set's braces are escaped.
_GROUPED = re.compile(r"(?:\A|(?<=[^\\_]\{))[0-9]{1,3}(?:(?:,|\{,\}| )[0-9]{3})+(?:\.[0-9]+)?(?=[}/])")
_DEGREES = re.compile(r"([0-9.]+) ?°(?! ?[0-9])")
# An interval whose brackets may be turned away from what they leave out: `]0,1]` for `(0,1]`.
_AROUND = r"[=,;(){}]|\\(?:cup|cap|in|setminus|times)(?![A-Za-z])|\\text ?\{[^{}]*\}"
_INTERVAL = re.compile(
    rf"(\A|{_AROUND}) ?([\]\[(]) ?((?:\\sqrt ?\[\w+\]|[^\]\[,;])+)[,;] ?((?:\\sqrt ?\[\w+\]|[^\]\[,;])+?) ?([\]\[)])"
    rf"(?= ?(?:\Z|{_AROUND}))"
)
_REALS = re.compile(
    r"(?:\\(?:mathbb|text) ?(?:\{ ?R ?\}|R)|(?:(?<![A-Za-z\\])|\\)R(?![A-Za-z]))((?: ?[_^] ?(?:\{[^{}]*\}|[-+*0]))+)"
)
_HALVES = {
    r"(0,\infty)": "^+ _>0 ^>0 ^+_* ^*_+ ^+* ^*+",
    r"[0,\infty)": r"^+_0 ^+0 _\ge0 ^\ge0",
    r"(-\infty,0)": "^- _<0 ^<0 ^-_* ^*_- ^-* ^*-",
    r"(-\infty,0]": r"^-_0 ^-0 _\le0 ^\le0",
    r"(-\infty,0)\cup(0,\infty)": r"^* ^\times _\ne0",
}
# A letter that stands for each of the values it runs through; the name does not count.
_BOUND = re.compile(
    r"\\(?:sum|prod|lim|bigcup|bigcap)(?![A-Za-z])(?: ?\^ ?(?:\{[^{}]*\}|\\[A-Za-z]+|[^{}\\]))? ?_ ?\{ ?([A-Za-z])"
    r"(?= ?(?:=|\\(?:in|to|rightarrow|mid)(?![A-Za-z])|\|))"
)
_NO_LETTERS = re.compile(r"(\\text ?\{[^{}]*\}|\\[A-Za-z]+)")
_PRIVATE = 0xE000  # characters that no text has
_NAMES = "klmnpqrstuvwxyz"  # of bound letters, those that the answer does not use
_RELATION = re.compile(r"[=<>∈]|\\(?:leq?|geq?|neq?|lt|gt|leqslant|geqslant|neg|lnot|not|in|equiv)(?![A-Za-z])")
# What a side of an equation may have that is still one name: arguments, indices, an inverse, primes.
_OF_NAME = re.compile(r"\([^()]*\)|_\{[^{}]*\}|_\w|\^\{?-1\}?|'|\^\{?\\prime\}?|\\text\s*\{[^{}]*\}")
_OF_TERM = re.compile(r"[-+/^0-9]|\\(?:sqrt|cdot|times|sum|int|pm|sin|cos|tan|log|ln)(?![A-Za-z])")
_TWO_NUMBERS = re.compile(r"(?<![_^])[0-9] [0-9]")
_WORD = re.compile(r"[A-Za-z]{3,}")
_PRIME = re.compile(r"[A-Za-z)]\s*(?:'|\^\s*\{?\s*\\prime)")


class MathMatch(MathVerify):
    """Compares answers as above. `plain` gives Math-Verify's own verdicts, in the same processes."""

    class Settings(MathVerify.Settings):
        kind: str = "math"

    _is_whole = True

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.plain = MathVerify(settings, self._pool)

    def _answers(self, response_text: str) -> tuple[str, ...]:
        """Return its last box and, if that is wrong, several boxes at its end, which may be the answer together."""
        return boxed_answers(response_text)


def same(gold: str, answer: str, ask: Ask, relative_tolerance: Decimal = Decimal(0)) -> bool:
    """Return whether two answers are equal. `ask` tells of two texts of which only Math-Verify knows it."""
    if (is_known := compare_strings(gold, answer, relative_tolerance)) is not None:
        return is_known
    respelled = respell(gold), respell(answer)
    if same_answer(gold, answer) or same_answer(*respelled):
        return True
    gold, answer = respelled
    if (about := _ABOUT.search(answer)) is not None and not _ABOUT.search(gold):
        left, right = answer[: about.start()].strip(), answer[about.end() :]
        return same(gold, right if left.isalpha() else left, ask, relative_tolerance)
    if (listed := _same_lists(gold, answer, ask, relative_tolerance)) is not None:
        return listed
    wanted, given = normal_form(gold), normal_form(answer)
    if wanted.value + wanted.unit == given.value + given.unit and variables_agree(wanted, given):
        return True  # `5 m` for `5\text{ m}`
    if _WORD.fullmatch(wanted.value) and _WORD.fullmatch(given.value):
        return wanted.value.lower() == given.value.lower()  # the letters would be factors: `east` would be `seat`
    if (
        not variables_agree(wanted, given)
        or _units_differ(wanted.unit, given.unit)
        or any(_TWO_NUMBERS.search(form.value) for form in (wanted, given))
        or _cases_differ(wanted.value, given.value)
        or _is_overlooked(gold, answer)
    ):
        return False
    if "%" in (wanted.unit, given.unit):  # 50% may be 50 or 0.5, as in Math-Verify
        return ask(gold.replace("%", r"\%"), answer.replace("%", r"\%"))
    numbers = [None if "," in form.value else parse_number(form.value) for form in (wanted, given)]  # `1, 234` is two
    if numbers[0] is not None and numbers[1] is not None:
        return numbers_equal(numbers[0], numbers[1], relative_tolerance)
    return ask(*(split_unit(text)[0].replace("°", r"^{\circ}") for text in (gold, answer)))


def respell(answer: str) -> str:
    """Return an answer in LaTeX, without layout: from Unicode, HTML and Python, and with units in `\text`."""
    text = APART.sub(", ", html.unescape(answer).translate(_SIGNS))
    text = _GROUPED.sub(lambda match: re.sub("[^0-9.]", "", match[0]), clean_layout(text).replace("$", r"\$"))
    if (bold := _BOLD.fullmatch(text)) is not None and _is_balanced(bold[1]):
        text = bold[1]
    text = _REPEATING.sub(_as_fraction, _WITH_BASE.sub(_spell_base, text.strip()))
    text = _INTERVAL.sub(_with_round_brackets, _REALS.sub(_as_interval, _MIXED.sub(_as_one_fraction, text)))
    text = _with_bound_letters_named(text)
    for pattern, spelling in _RESPELLINGS:
        text = pattern.sub(spelling, text.strip())
    if OF_ANGLE.search(text):
        text = _DEGREES.sub(r"(\\frac{\1 \\pi}{180})", text)  # Math-Verify takes `45^\circ` for a power
    return " ".join(_BARE_UNIT.sub(_text_unit, strip_answer(text)).split())


def _spell_base(match: re.Match[str]) -> str:
    """Return `1011_{2}` for `1011_2`, `(1011)_{\\text{two}}` and `1011\\text{ base }2`."""
    name = re.sub(r"\\text|base|\W", "", match[3] or match[4])
    return f"{match[2]}_{{{_BASE_NAMES.index(name) if name in _BASE_NAMES else name}}}"


def _as_fraction(match: re.Match[str]) -> str:
    r"""Return `\frac{15}{90}` for `0.1\overline{6}`: 16 less 1, over 9 tens."""
    whole, fixed, repeated = match[1], match[2], re.sub("[^0-9]", "", match[3])
    numerator = int(whole + fixed + repeated) - int(whole + fixed or 0)
    return rf"\frac{{{numerator}}}{{{(10 ** len(repeated) - 1) * 10 ** len(fixed)}}}"


def _as_one_fraction(match: re.Match[str]) -> str:
    r"""Return `\frac{8}{3}` for `2 2/3`, which Math-Verify takes for a product. `4 10/3` is no mixed number."""
    whole, numerator, denominator = (int(group.replace(",", "")) for group in match.groups())
    is_mixed = 0 < numerator < denominator
    return rf"\frac{{{whole * denominator + numerator}}}{{{denominator}}}" if is_mixed else match[0]


def _with_round_brackets(match: re.Match[str]) -> str:
    """Return `(0,1]` for `]0,1]`. `]1,0[` stays: `(1,0)` is a point."""
    before, opening, left, right, closing = match.groups()
    low, high = parse_number(left), parse_number(right)
    if (opening != "]" and closing != "[") or (low is not None and high is not None and low >= high):
        return match[0]
    return f"{before} {opening.replace(']', '(')}{left},{right}{closing.replace('[', ')')}"


def _as_interval(match: re.Match[str]) -> str:
    r"""Return `(0,\infty)` for `\mathbb{R}^+`. `\mathbb{R}_+` stays: it may hold 0."""
    scripts = re.sub(r"[{} ]", "", match[1].replace(r"\ast", "*"))
    above_first = "".join(sorted(re.findall("[_^][^_^]*", scripts)))
    return next((half for half, spellings in _HALVES.items() if above_first in spellings.split()), match[0])


def _with_bound_letters_named(text: str) -> str:
    """Return a text whose bound letters have the same names as in any answer that differs from it in those alone."""
    number = 0
    while (match := _BOUND.search(text)) is not None:  # until no letter is bound: each becomes a private character
        places = enumerate(depths(text[match.end() :]), match.end())  # -1 is behind the brace of the bounds
        end = next((at for at, depth in places if depth < -1 or (depth == -1 and text[at] in "+-=,;<>")), len(text))
        parts = _NO_LETTERS.split(text[match.start(1) : end])
        parts[::2] = [part.replace(match[1], chr(_PRIVATE + number)) for part in parts[::2]]
        text, number = text[: match.start(1)] + "".join(parts) + text[end:], number + 1
    names = [name for name in _NAMES if name not in _NO_LETTERS.sub("", text)]
    return text.translate({_PRIVATE + each: name for each, name in enumerate(names[:number])})


def _text_unit(match: re.Match[str]) -> str:
    words = match[1].lower().split()
    is_unit = " ".join(words) in UNITS or words[-1] in UNITS or all(len(word) >= _LEAST_WORD for word in words)
    return rf"\text{{ {match[1].strip()}}}{match[2]}" if is_unit else match[0]


def _elements(text: str) -> tuple[str, list[str]]:
    """Return the brackets around a list, if any, and its elements. What is no list is its only element."""
    outer = _BRACKETS.fullmatch(text)
    if outer is not None and _is_balanced(outer[2]) and len(_split(outer[2])) > 1:
        return outer[1] + outer[3], _split(outer[2])
    return "", _split(text)


def _is_balanced(text: str) -> bool:
    """Return whether every bracket closes."""
    return (found := [0, *depths(text)])[-1] == min(found) == 0


def _split(text: str) -> list[str]:
    """Split at the commas that stand in no bracket, at semicolons and at `and` and `or`."""
    if parse_number(text) is not None:
        return [text]
    text = _SEPARATOR.sub(",", text)
    commas = [at for at, depth in enumerate(depths(text)) if depth == 0 and text[at] == ","]
    every = (text[start + 1 : end].strip() for start, end in pairwise([-1, *commas, len(text)]))
    parts = [part for part in every if part] or [text]
    return [
        part.replace(r"\pm", sign).replace(r"\mp", other)
        for part in parts
        for sign, other in (("+", "-"), ("-", "+"))[: 1 + (r"\pm" in part)]
    ]


def _same_lists(gold: str, answer: str, ask: Ask, relative_tolerance: Decimal) -> bool | None:
    """Compare two lists of the same length, element by element; None where they are no such lists.

    Round brackets hold an order, braces and no brackets hold none. Two numbers in other brackets are an interval.
    """
    (around, golds), (around_other, answers) = _elements(gold), _elements(answer)
    if (len(golds) == 1) != (len(answers) == 1) and any(parse_number(text) is not None for text in (gold, answer)):
        return False  # `81, 920` is no number
    related = [any(map(_ORDER.search, parts)) for parts in (golds, answers)]
    if not 2 <= len(golds) == len(answers) or related[0] != related[1]:
        return None
    joints = [(_JOINT.search(text) or [""])[0] for text in (gold, answer)]
    kinds = {around, around_other} - {""}
    if (
        (all(related) and set(joints) == {"and", "or"})
        or (len(kinds) == 2 and (len(golds) == 2 or r"\{\}" in kinds))
        or (len(golds) == 2 and around != around_other and not kinds <= {"()", r"\{\}"})
    ):
        return False
    if kinds - {r"\{\}"} or (all(map(_NAMED.match, golds)) and not any(map(_NAMED.match, answers))):
        return all(same(each, other, ask, relative_tolerance) for each, other in zip(golds, answers, strict=True))
    golds, answers = (list(map(respell, parts)) for parts in (golds, answers))  # each with a unit of its own
    spelled = {normal_form(each): each for each in (*golds, *answers)}
    forms, others = (Counter(map(normal_form, parts)) for parts in (golds, answers))
    golds, answers = ([spelled[form] for form in each.elements()] for each in (forms - others, others - forms))
    if len(golds) > _LONGEST_LIST:
        return None
    for each in golds:  # equality is transitive: the first answer that a gold equals may be its own
        found = next((other for other in answers if same(each, other, ask, relative_tolerance)), None)
        if found is None:
            return False
        answers.remove(found)
    return True


def _units_differ(wanted: str, given: str) -> bool:
    """Whether both have a unit, and not the same. One may have more words than the other, where it is not known."""
    if changes_value(wanted) or changes_value(given):
        return wanted != given
    if not (wanted and given) or wanted == given or "%" in (wanted, given):
        return False
    (name, _, power), (other, _, other_power) = wanted.partition("^"), given.partition("^")
    words, others = set(name.lower().split()), set(other.lower().split())
    return power != other_power or {name, other} <= UNITS.keys() or not (words <= others or others <= words)


def _is_overlooked(gold: str, answer: str) -> bool:
    """Whether the answers differ in something that Math-Verify does not read."""
    wanted, given = _RELATION.search(gold), _RELATION.search(answer)
    leads = any(
        found is not None and not text[: found.start()].strip() for found, text in ((wanted, gold), (given, answer))
    )
    return (
        any(map(_MARKUP.search, (gold, answer)))
        or not all(map(_is_balanced, (gold, answer)))
        or len(_PRIME.findall(gold)) != len(_PRIME.findall(answer))
        or _bases_differ(gold, answer)
        or (leads and (wanted is None or given is None))
        or (given is None and _is_equation(gold))
    )


def _bases_differ(gold: str, answer: str) -> bool:
    """Whether the answer is to a base and the gold to another, or to none. A gold to a base may stand without it."""
    base, other = (match[1] if (match := _BASE.match(text)) else None for text in (gold, answer))
    return other != base and other is not None and not (other == "10" and base is None)


def _is_equation(text: str) -> bool:
    """Whether it is more than a name and its value: of `x+y=0` and `PV=nRT` the right side says only a part."""
    left, equals, right = text.partition("=")
    name = _OF_NAME.sub("", left)
    letters = COMMAND.sub("", name).replace(" ", "")
    is_product = re.fullmatch("[a-z]{2,3}", letters) is not None
    is_formula = len(letters) > 1 and re.search("[A-Za-z]", COMMAND.sub("", right)) is not None
    return bool(equals) and (_OF_TERM.search(name) is not None or is_product or is_formula)


def _cases_differ(gold: str, answer: str) -> bool:
    """Whether a letter is small in one and a capital in the other. Of only one letter that is forgiven."""
    wanted, given = (set(filter(str.isalpha, COMMAND.sub("", text))) for text in (gold, answer))
    different = wanted ^ given
    return len(wanted) > 1 and len({letter.lower() for letter in different}) < len(different)
