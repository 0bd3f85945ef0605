"""Which box is the answer, which spellings count as the same, and what two verifiers make of them."""

from __future__ import annotations

import subprocess
import sys
import time
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spot_async.base import registry
from spot_async.base.processes.worker_pool import WorkerDiedError
from spot_async.types import Problem
from spot_async.verification import (
    BoxedMatch,
    MathMatch,
    MathVerify,
    Verdict,
    boxed_match,
    extract_boxed,
    normalize_answer,
)
from spot_async.verification.math_match import same
from spot_async.verification.math_verify import numbers_equal
from spot_async.verification.multiple_choice import chosen_option
from spot_async.verification.normalization import MAX_ANSWER_CHARS, MAX_NESTING, answer_start, parse_number

FAR = float("inf")


def problem(answer: str) -> Problem:
    return Problem(id="p", text="", answer=answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"I get \boxed{3}. Wait, that is wrong. So the answer is \boxed{5}.", "5"),
        ("\\boxed{3} \n\n \\boxed{5}", "5"),
        (r"The final answer is $6$. I hope it is correct. \boxed{5}", "5"),
        (r"We have $x=5$. The answer is \boxed{}.", ""),
        (r"So far $x = 5$. I do not know.", None),
        (r"\boxed {5}", "5"),
        ("\\boxed\n  {5}", "5"),
        (r"\boxed{5", None),
        (r"\fbox{5}", "5"),
        (r"<think>\boxed{5}</think> I give up, no answer.", "5"),
        ("Answer: 5", None),
        ("", None),
        # a box that never closes is none; the last that does counts
        (r"\boxed{3}, no: \boxed{\frac{1}{2}", "3"),
        (r"\boxed{ \boxed{5}", "5"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"stray } brace \boxed{5} and } another {", "5"),
        # escaped braces, row separators, doubled backslashes
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right"),
        (r"\boxed{a \\{b}}", r"a \\{b}"),
        (r"\\boxed{5}", "5"),
        (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        # a token without braces
        (r"$\boxed 5$", "5"),
        (r"\boxed17.", "17"),
        (r"\boxed -2.5", "-2.5"),
        (r"\boxed 1,234", "1,234"),
        (r"\boxed\pi", r"\pi"),
        (r"\boxed x.", "x"),
        (r"\(\boxed A \)", "A"),
        (r"\boxed 90^\circ", "90"),
        (r"\boxed 5 is what I get", "5"),
        # a word of prose, a command with arguments and the beginning of an expression are none
        (r"\boxed a form", None),
        (r"I write \boxed I think", None),
        (r"\boxed \frac12", None),
        (r"\boxed\frac 1 2", None),
        (r"\boxed{4}, so \boxed \sqrt 2", "4"),
        (r"\boxed\pi r", None),
        (r"\boxed x+1", None),
        (r"\boxed 1/2", None),
        (r"\boxed 12\sqrt3", None),
        (r"\boxed 4.5 \times 10^3", None),
        (r"\boxed{4} is what I write in \boxed form", "4"),
        (r"\boxedgroup{5}", None),
        # tidied
        ("\\boxed{ 7. \n}", "7"),
        (r"\boxed{1, 2, ...}", "1, 2, ..."),
        ("\\boxed{a\nb}", "a\nb"),
    ],
)
def test_the_last_balanced_box_is_the_answer(text: str, answer: str | None) -> None:
    assert extract_boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        (r"So the answer is \boxed{5}. Done.", r"\boxed{5}. Done."),
        (r"I get \boxed{3}. No: \fbox{5}", r"\fbox{5}"),
        (r"\boxed{\boxed{5}}", r"\boxed{5}}"),
        (r"It is \boxed B.", r"\boxed B."),
        (r"\boxed{3}, no: \boxed{\frac{1}{2}", r"\boxed{3}, no: \boxed{\frac{1}{2}"),  # 3 is what is read
        (r"cut off in {\boxed{4 + \boxed{5", r"\boxed{5"),  # nothing is read, and a probe may close it
        (r"The answer is 5, or (B).", None),
        (r"I write \boxed I think", None),
        ("", None),
    ],
)
def test_an_answer_begins_where_the_box_does_that_is_read(text: str, rest: str | None) -> None:
    start = answer_start(text)
    assert (None if start is None else text[start:]) == rest


def reference_extraction(text: str) -> str | None:
    """The definition, in quadratic time: the box that opens last among those whose brace closes.

    One that holds nothing but braces and full stops does not count if another does, nor does one around it.
    """
    boxes = []
    for start in range(len(text)):
        if not text.startswith(r"\boxed{", start) or (start and text[start - 1] == "\\"):
            continue
        depth, at = 1, start + len(r"\boxed{")
        while at < len(text) and depth:
            if text[at] == "\\":
                at += 1
            elif text[at] in "{}":
                depth += 1 if text[at] == "{" else -1
            at += 1
        if not depth:
            boxes.append((start, at, text[start + len(r"\boxed{") : at - 1].strip()))
    kept = list(boxes)
    while kept and (not kept[-1][2].strip("{}. ") or any(kept[-1][1] > box[0] for box in boxes[len(kept) :][:1])):
        kept.pop()
    content = (kept or boxes or [(0, 0, None)])[-1][2]
    if content is None:
        return None
    return content[:-1].rstrip() if content.endswith(".") and not content.endswith("..") else content


@settings(max_examples=400)
@given(
    st.lists(st.sampled_from([r"\boxed{", "{", "}", r"\{", r"\}", "a", " ", ".", r"\frac"]), max_size=30).map("".join)
)
def test_extraction_follows_its_definition(text: str) -> None:
    assert extract_boxed(text) == reference_extraction(text)
    start = answer_start(text)
    assert (start is None) == (r"\boxed{" not in text.replace(r"\\", ""))
    if extract_boxed(text) is not None:
        assert extract_boxed(text[start:]) == extract_boxed(text)


@settings(max_examples=200)
@given(st.text(), st.text())
@example("5", "\\boxed{\ud800\x00}")
def test_no_text_makes_the_pure_parts_fail(gold: str, text: str) -> None:
    for response in (text, rf"\boxed{{{text}}}"):
        assert boxed_match(gold, response) in (Verdict.CORRECT, Verdict.WRONG, Verdict.NO_ANSWER)
    decided(gold, text)
    normalize_answer(text)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (r"\boxed{" * 150_000, Verdict.NO_ANSWER),
        (r"\boxed{" * 75_000 + "}" * 75_000, Verdict.NO_ANSWER),
        (r"\boxed{" + "9" * 1_000_000 + "}", Verdict.WRONG),
        (r"\boxed" + " " * 1_000_000, Verdict.NO_ANSWER),
        (r"\boxed " * 150_000, Verdict.WRONG),
        (r"\boxed{" + "\\" * 1_000_000, Verdict.NO_ANSWER),
        (r"\boxed\frac" + "a" * 1_000_000 + "{", Verdict.NO_ANSWER),
        (r"\boxed 1" + ",111" * 250_000 + ",", Verdict.WRONG),
        ("{" * 1_000_000 + r"\boxed{5" + "}" * 1_000_000, Verdict.CORRECT),
    ],
    ids=lambda value: value[:9] if len(value) > 99 else "",
)
def test_a_megabyte_of_hostile_text_is_judged_in_linear_time(text: str, verdict: Verdict) -> None:
    start = time.process_time()
    assert boxed_match("5", text) is verdict
    assert time.process_time() - start < 3.0  # about 0.3 s; quadratic would be minutes


SAME = [
    (r"\frac{1}{2}", r"\dfrac{1}{2}"),
    (r"\frac{1}{2}", r"\frac12"),
    (r"\frac{1}{2}", r"\frac 1 2"),
    (r"\frac{1}{20}", r"\frac1{20}"),
    (r"-\frac{1}{2}", "-1/2"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"2\sqrt{3}", r"2 \sqrt3"),
    (r"x^2+1", r"x^{2} + 1"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
    (r"\{1,2\}", r"\left\{1, 2\right\}"),
    ("27.0", "27"),
    ("025", "25"),
    ("25", "+25"),
    ("0", "-0.00"),
    (".5", "0.50"),
    ("1,234,567", "1234567"),
    ("10{,}000", "10000"),
    (r"29,\!322,\!216", "29322216"),
    (r"4.5 \times 10^{3}", "4500"),
    (r"\$36", "36"),
    ("$36$", "36"),
    ("36.", "36"),
    (r"50\%", "50"),
    (r"90^\circ", "90"),
    (r"90^{\circ}", "90"),
    (r"7\text{ hours}.", "7"),
    (r"15\mbox{ cm}^2", "15"),
    (r"\text{Saturday}", r"\mathrm{Saturday}"),
    (r"\text{(C)}", "C"),
    ("x = 5", "5"),
    ("x = 5", "x=5"),
    ("-7", "\N{MINUS SIGN}7"),
    ("58,500", r"58\ 500"),
    ("58,500", "58 500"),
    (r"8\pi\text{ cm}", r"8\pi"),
    (r"45\text{ square units}", r"45\text{ units}^2"),
    (r"3\text{ million}", r"3 \mathrm{~million}"),
    (r"36^\circ\text{ C}", r"36\degree\mathrm{C}"),
    ("1, 234", "1,\\ 234"),
    (r"x \leq 2", r"x\le 2"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
]
DIFFERENT = [
    (r"\frac{1}{2}", "0.5"),
    (r"\frac{1}{2}", r"\frac{2}{4}"),
    ("1,2", "2,1"),
    ("(1,2)", "[1,2]"),
    ("(1,234)", "(1234)"),
    ("1.234", "1,234"),
    ("50", "0.5"),
    ("43_5", "43_7"),
    ("43_5", "43"),
    ("C", "c"),
    ("12", "1"),
    ("-5", "5"),
    ("10^{10}", "10^10"),
    ("x^{10}", "x^10"),
    (r"6\text{ or }7", "6"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 12 \end{pmatrix}"),
    (r"3\text{ million}", "3"),
    ("3", r"3\text{ million}"),
    ("3", r"3\text{ is wrong}"),
    ("3", r"3\text{ M}"),
    ("2", r"2\mathbf{3}"),
    (r"7\text{ hours}", r"7\text{ minutes}"),
    (r"90^\circ", r"90\text{ radians}"),
    (r"45\text{ units}^2", r"45\text{ units}^3"),
    (r"\sin 30^\circ", r"\sin 30"),
    ("x=5", "y=5"),
    ("2x+1", "x=2x+1"),
    ("12", r"1 \quad 2"),
    ("111222", r"111\quad222"),
    (r"\$5", r"5\text{ cents}"),
    (r"5\text{ MW}", r"5\text{ mW}"),
    ("3", r"3\text{ s}^{-1}"),
    ("12", "1\n2"),
    ("12", "1~2"),
    ("12/3", "1 2/3"),
    ("1.5", "1. 5"),
    ("1234", "1, 234"),
    ("1e5", "1 e5"),
    ("1e-9999", "1e-9998"),
    ("½", "1/2"),
    ("５", "5"),
]


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_layout_is_forgiven(gold: str, answer: str) -> None:
    assert boxed_match(gold, rf"so \boxed{{{answer}}}.") is Verdict.CORRECT
    assert boxed_match(answer, rf"so \boxed{{{gold}}}.") is Verdict.CORRECT


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_mathematics_is_not_forgiven(gold: str, answer: str) -> None:
    assert boxed_match(gold, rf"so \boxed{{{answer}}}.") is Verdict.WRONG


def test_any_words_behind_a_gold_are_its_unit_but_not_those_that_a_policy_puts_behind_its_answer() -> None:
    assert boxed_match(r"10\text{ dogs}", r"\boxed{10}") is Verdict.CORRECT
    assert boxed_match("10", r"\boxed{10\text{ dogs}}") is Verdict.WRONG
    assert boxed_match(r"10\text{ dollars per hour}", r"\boxed{\$10}") is Verdict.CORRECT


VALUES = st.one_of(
    st.integers(-9999, 9999).map(str),
    st.builds("{}.{}".format, st.integers(0, 99), st.integers(1, 99)),
    st.builds(r"\frac{{{}}}{{{}}}".format, st.integers(1, 99), st.integers(2, 99)),
    st.builds(r"{}\sqrt{{{}}}".format, st.integers(2, 9), st.integers(2, 99)),
    st.builds("({},{})".format, st.integers(0, 99), st.integers(0, 99)),
    st.builds("{}x^{{{}}}".format, st.integers(2, 99), st.integers(2, 99)),
)
VERBATIM = "{}"
RESPELLINGS = [
    r"\displaystyle {}",
    "${}$",
    r"\, {} \;",
    "{}.",
    " {}\n",
    "k = {}",
    r"{}\text{{ cm}}",
    r"{}\mathrm{{~hours}}",
]
# What makes another answer of any value, as a policy might write it.
CHANGES = [
    "1{}",
    "{} 1",
    r"{}\quad 1",
    "{}, 1",
    r"{}\text{{ million}}",
    r"{}\text{{ is wrong}}",
    r"{}\text{{ or }} 1",
    r"\text{{not }}{}",
    r"\ne {}",
    r"\ge {}",
    "{}!",
    "{}i",
    "{}y",
    "{}^2",
    "{}e3",
    "|{}|+1",
]


def decided(gold: str, answer: str) -> Verdict | None:
    """What `math` decides without a parser; None if it must ask."""
    asked = []
    is_equal = same(gold, answer, lambda *pair: asked.append(pair) is None)
    return None if asked else Verdict.CORRECT if is_equal else Verdict.WRONG


def judge(verifier: str, gold: str, answer: str) -> Verdict | None:
    """The verdict of `boxed_match`, or what `math` decides without a parser, where wrong is final."""
    return boxed_match(gold, rf"\boxed{{{answer}}}") if verifier == "boxed_match" else decided(gold, answer)


@given(VALUES, st.sampled_from(RESPELLINGS))
def test_a_respelled_answer_stays_right(value: str, respelling: str) -> None:
    assert boxed_match(value, rf"\boxed{{{respelling.format(value)}}}") is Verdict.CORRECT


@given(VALUES, st.sampled_from(CHANGES), st.sampled_from([VERBATIM, *RESPELLINGS[:3]]))
def test_a_changed_answer_is_never_right(value: str, change: str, respelling: str) -> None:
    answer = change.format(respelling.format(value))
    for verifier in ("boxed_match", "math"):
        assert judge(verifier, value, answer) is not Verdict.CORRECT, verifier
        assert judge(verifier, value, value) is Verdict.CORRECT, verifier


@given(VALUES.filter(lambda value: "x" not in value), st.sampled_from([("x", "y"), ("n", "k"), ("A", "B")]))
def test_another_variable_is_wrong(value: str, names: tuple[str, str]) -> None:
    for verifier in ("boxed_match", "math"):
        assert judge(verifier, f"{names[0]}={value}", f"{names[1]} = {value}") is Verdict.WRONG
        assert judge(verifier, f"{names[0]}={value}", f"{names[0]} = {value}") is Verdict.CORRECT


UNITS = ["cm", "m", "hours", "minutes", "degrees", "radians", "square units", "cubic units", "dollars"]


@given(VALUES, st.sampled_from(UNITS), st.sampled_from(UNITS))
def test_another_unit_is_wrong(value: str, one: str, other: str) -> None:
    for verifier in ("boxed_match", "math"):
        verdict = judge(verifier, rf"{value}\text{{ {one}}}", rf"{value} \mathrm{{~{other}}}")
        assert verdict is (Verdict.CORRECT if one == other else Verdict.WRONG)


@given(VALUES, st.integers(0, 20), st.sampled_from("0123456789-+"))
def test_another_digit_or_sign_is_wrong(value: str, at: int, put: str) -> None:
    at %= len(value)
    changed = value[:at] + put + value[at + 1 :] if value[at].isdigit() else value
    number, other = parse_number(value), parse_number(changed)
    is_same = changed == value or (number is not None and number == other)
    if not is_same and changed[0] != "+":
        assert judge("boxed_match", value, changed) is Verdict.WRONG


CHOICES = (r"4\text{ cm}", "two", r"\frac{1}{2}", "none of these")


@pytest.mark.parametrize(
    ("answer", "chosen"),
    [
        ("B", 1),
        (r"\textbf{(B)}\ \text{two}", 1),
        ("The correct option is B", 1),
        ("B\\", 1),  # what is left of `B\ `
        ("4", 0),
        ("A. 4 cm", 0),
        (r"(A)\text{ 4 cm}", 0),
        (r"(C)\ \frac12", 2),
        # a letter in front of anything else names no option
        ("(B) or (C)", None),
        ("B/C", None),
        ("(B)(C)", None),
        (r"(B)\text{ is wrong}", None),
        ("B. 4 cm", None),
        ("3", None),
    ],
)
def test_a_box_names_one_option_or_none(answer: str, chosen: int | None) -> None:
    assert chosen_option(answer, CHOICES) == chosen


def test_a_text_that_is_near_to_two_options_names_neither() -> None:
    assert chosen_option("4", ("4 cm", r"4\text{ cm}", r"4\text{ m}")) is None


@pytest.mark.parametrize(
    ("gold", "text", "verdict"),
    [
        ("5", "it is 5", Verdict.NO_ANSWER),
        ("5", r"\boxed{}", Verdict.NO_ANSWER),
        ("", r"\boxed{}", Verdict.UNJUDGED),
        ("", r"\boxed{\,}", Verdict.UNJUDGED),
        (r"\,", r"\boxed{\,}", Verdict.NO_ANSWER),
        ("1 + " * 300, rf"\boxed{{{'1  + ' * 300}}}", Verdict.CORRECT),  # word for word, whatever its length
        ("1 + " * 300, rf"\boxed{{{'1 + ' * 299} 2 +}}", Verdict.WRONG),
        ("5", rf"\boxed{{{'0' * MAX_ANSWER_CHARS}5}}", Verdict.WRONG),
        ("5", rf"\boxed{{{'0' * (MAX_ANSWER_CHARS - 1)}5}}", Verdict.CORRECT),
        ("5", rf"\boxed{{{'(' * (MAX_NESTING + 1)}5{')' * (MAX_NESTING + 1)}}}", Verdict.WRONG),
    ],
)
async def test_boxed_match_verdicts(gold: str, text: str, verdict: Verdict) -> None:
    async with BoxedMatch(BoxedMatch.Settings()) as verifier:
        assert await verifier.verify(problem(gold), text, deadline=0.0) is verdict


@pytest.mark.parametrize("kind", ["boxed_match", "math", "math_verify", "multiple_choice"])
async def test_nothing_is_judged_without_an_answer(kind: str) -> None:
    verifier = registry.load("verifiers", kind)
    judge = verifier(verifier.Settings())  # not entered: no worker is asked
    for text in (r"\boxed{5}", "no box"):
        verdict = await judge.verify(problem(""), text, deadline=FAR)
        assert verdict is Verdict.UNJUDGED
        assert verdict.reward is None
        assert not verdict.is_missing  # so that it is not asked for again


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4.5e33", "4.5e33"),
        (r"4.6 \times 10^{-24}", "4.6e-24"),
        (r"3\cdot10^5", "3e5"),
        (r"1\,234{,}567.50", None),
        (r"1,\!234", "1234"),
        ("-.5", "-0.5"),
        ("5.", "5"),
        ("1 234", "1234"),
        (r"58\ 500", "58500"),
        ("12 34", None),
        ("12,34", None),
        ("1e9999", "1e9999"),
        ("1e999999", None),
        ("2e", None),
        ("٣", None),
        ("", None),
    ],
)
def test_which_strings_are_numbers(text: str, value: str | None) -> None:
    assert parse_number(text) == (None if value is None else Decimal(value))


@pytest.mark.parametrize(
    ("gold", "number", "equal"),
    [
        ("928", "9.28e2", True),
        ("870000000", "8.7e8", True),
        ("2.88e-19", "5.76e-19", False),  # six absolute decimals make both zero
        ("4.6e-24", "0", False),
        ("1000001", "1000000", False),  # integers exactly
        ("0.333333", "0.3333333", True),
        ("0.3333", "0.3334", False),
        ("72", "72.0000009", False),  # no more than in Math-Verify, whichever is the gold
        ("72.0000009", "72", False),
        ("0", "0.0000001", False),
        ("72", "72.000", True),
        ("1.5", "1.5000004", True),
        ("9" * 40, "9" * 39 + "8", False),
    ],
)
def test_numbers_are_compared_as_numbers(gold: str, number: str, equal: bool) -> None:
    assert numbers_equal(Decimal(gold), Decimal(number)) is equal


def test_a_relative_tolerance_is_a_share_of_the_gold() -> None:
    tolerance = Decimal("0.01")
    assert numbers_equal(Decimal("4.5e33"), Decimal("4.54e33"), tolerance)
    assert numbers_equal(Decimal("100"), Decimal("99"), tolerance)
    assert not numbers_equal(Decimal("99"), Decimal("100"), tolerance)
    assert not numbers_equal(Decimal("2.88e-19"), Decimal("0"), tolerance)
    assert not numbers_equal(Decimal("0"), Decimal("1e-9"), tolerance)


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("x + 1", "x  +\n1", Verdict.CORRECT),
        ("27.0", "27", Verdict.CORRECT),
        ("27", "28", Verdict.WRONG),
        ("43_5", "43_{7}", Verdict.WRONG),
        ("43_5", "43_{5}", Verdict.CORRECT),
        ("809", "809_{7}", Verdict.WRONG),
        ("809", r"809_{\text{seven}}", Verdict.WRONG),
        ("3", r"3\text{ million}", Verdict.WRONG),
        ("3", r"3\text{ is wrong}", Verdict.WRONG),
        ("3", r"\neq 3", Verdict.WRONG),
        ("3", r"\ge 3", Verdict.WRONG),
        ("3", r"1 \quad 2", Verdict.WRONG),
        ("3t", "3", None),
        (r"7\text{ hours}", r"7\text{ minutes}", Verdict.WRONG),
        (r"90^\circ", r"90\text{ radians}", Verdict.WRONG),
        ("x=5", "y=5", Verdict.WRONG),
        ("east", "seat", Verdict.WRONG),
        ("f(x)", "f'(x)", Verdict.WRONG),
        ("x + y + z = 0", "0", Verdict.WRONG),
        (r"40\text{ a}, 60\text{ b}", r"40\text{ a}, 50\text{ b}", Verdict.WRONG),
        ("x<sup>2</sup>", "x", None),
        ("0", r"1 \times 10^{-400} \mathrm{~J}", Verdict.WRONG),
        (r"90^\circ", r"90\degree", Verdict.CORRECT),
        (r"44\%", r"44\,\%", Verdict.CORRECT),
        (r"(3,\frac{\pi}{2})", r"\bigl(3,\tfrac{\pi}{2}\bigr)", Verdict.CORRECT),
        ("-1./3", r"-\frac{1}{3}", Verdict.CORRECT),
        ("a=b", r"\text{a}=\text{b}", Verdict.CORRECT),
        ("-7", "\N{MINUS SIGN}7", Verdict.CORRECT),
        ("0.5", r"50\%", None),
        ("5", "m+n=5", None),
        ("x", "(" * (MAX_NESTING + 1) + ")" * (MAX_NESTING + 1), Verdict.WRONG),
        ("x", "9" * (MAX_ANSWER_CHARS + 1), Verdict.WRONG),
        ("5", r"\frac{10}{2}", None),
    ],
)
def test_what_math_decides_without_a_parser(gold: str, answer: str, verdict: Verdict | None) -> None:
    assert decided(gold, answer) is verdict


class ScriptedPool:
    """Stands in for the worker processes: answers or raises what it was told, in order."""

    def __init__(self, *replies: dict[str, Any] | Exception) -> None:
        self.replies = list(replies)

    async def ask(self, request: dict[str, Any], *, timeout_s: float, deadline: float) -> dict[str, Any]:
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply


async def test_outcomes_are_remembered_but_missing_evidence_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spot_async.verification.math_verify.CACHE_ENTRIES", 2)
    verifier = MathVerify(MathVerify.Settings())
    right, wrong = {"equal": True}, {"equal": False}
    pool = ScriptedPool(TimeoutError(), WorkerDiedError("gone"), right, wrong, wrong, wrong)
    monkeypatch.setattr(verifier, "_pool", pool)

    async def verify(answer: str) -> Verdict:
        return await verifier.verify(problem(r"\frac{7}{2}"), rf"\boxed{{{answer}}}", deadline=FAR)

    assert await verify("3.5") is Verdict.TIMEOUT
    assert await verify("3.5") is Verdict.ERROR
    assert await verify("3.5") is Verdict.CORRECT
    assert await verify("4.5") is Verdict.WRONG
    assert await verify("3.5") is Verdict.CORRECT  # from memory
    assert await verify("5.5") is Verdict.WRONG  # the third: the least recently asked for is forgotten
    assert await verify("3.5") is Verdict.CORRECT
    assert len(pool.replies) == 1
    assert await verify("4.5") is Verdict.WRONG
    assert not pool.replies


def test_verifiers_are_found_by_name() -> None:
    assert registry.load("verifiers", "boxed_match") is BoxedMatch
    assert registry.load("verifiers", "math") is MathMatch
    assert registry.load("verifiers", "math_verify") is MathVerify


def test_importing_verification_imports_no_parser() -> None:
    code = "import sys, spot_async.verification; assert not {'sympy', 'math_verify', 'antlr4'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
