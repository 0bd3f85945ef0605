r"""The evaluation verifier: the last balanced box, judged by Math-Verify.

What two strings show is decided here. The rest goes to worker processes, since text that a model wrote can keep a
parser busy for ever (`9^{9^{9^{9}}}`). This differs from Math-Verify on a whole response, deliberately:

* Only the last box counts, and without a box there is no answer.
* Plain numbers are compared as numbers. Math-Verify rounds to six decimals, so 2e-19 would be 0.
* What Math-Verify overlooks is wrong (`is_overlooked`): other base suffixes, variables, units, words such as `million`.
* Answers with the same normal form (normalization.py) are right, also where Math-Verify cannot read them.
* A relative tolerance is ours, not Math-Verify's.

Math-Verify's other leniencies (units, order of a list, `50\%` for `0.5`) stay, so that results can be compared with
other people's.

Math-Verify drops what it cannot read and compares the rest. It takes `3\text{ million}`, `\neq 3` and `3_7` for 3, and
a policy that is trained on such verdicts learns to write them. What is found here is wrong, unless both answers have
the same normal form.
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from contextlib import AsyncExitStack
from decimal import Decimal
from pathlib import Path

from pydantic import Field

from spot_async.base.tasks import Opened
from spot_async.config import NonNegativeFloat, PluginSettings, PositiveFloat, PositiveInt
from spot_async.types import Problem, Verdict
from spot_async.verification.normalization import (
    UNITS,
    NormalForm,
    changes_value,
    extract_boxed,
    is_oversized,
    normal_form,
    parse_number,
    strip_answer,
    variables_agree,
)
from spot_async.verification.worker_pool import WorkerDiedError, WorkerPool

_WORKER = Path(__file__).with_name("math_verify_worker.py")
_EXPONENT = re.compile(r"([+-]?[0-9.,]+)[eE]([+-]?[0-9]{1,3})")
_TOLERANCE = Decimal("1e-6")
_MIB = 1 << 20
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


class MathVerify(Opened):
    """Math-Verify in processes that can be killed. Outcomes are cached, missing evidence is not."""

    class Settings(PluginSettings):
        READS_BOX = True
        WITHOUT_EFFECT = frozenset({"workers", "cache_entries"})

        kind: str = "math_verify"
        workers: PositiveInt = Field(2, description="worker processes, started as they are needed")
        timeout_s: PositiveFloat = Field(5.0, description="longest time one comparison may take before it is killed")
        memory_limit_bytes: int = Field(2 << 30, ge=256 * _MIB, description="address space of one worker process")
        cache_entries: PositiveInt = Field(65536, description="outcomes remembered by (gold, answer)")
        relative_tolerance: NonNegativeFloat = Field(
            0.0,
            lt=1,
            description="a number that differs from the gold by at most this share of it is right too, such as 0.01 "
            "for Minerva; results are then not comparable with Math-Verify's. Default: Math-Verify's own 1e-6",
        )

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        # -P keeps this directory off the module path, since it also holds a math_verify.
        command = (sys.executable, "-P", str(_WORKER), str(settings.memory_limit_bytes))
        self._pool = WorkerPool(command, size=settings.workers)
        self._tolerance = Decimal(str(settings.relative_tolerance))
        self._outcomes: OrderedDict[tuple[str, str], Verdict] = OrderedDict()

    async def _open(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(self._pool)

    async def verify(self, problem: Problem, response_text: str, *, deadline: float) -> Verdict:
        """Judge the response's last box against `problem.answer`.

        UNJUDGED if that is empty, NO_ANSWER if there is no box or it is empty, TIMEOUT if the comparison was killed for
        taking too long, ERROR if its worker died. Raises `DeadlineExceededError` if no worker was free before the
        deadline, and `ProcessDiedError` if workers do nothing but die.
        """
        if not problem.answer:
            return Verdict.UNJUDGED
        answer = extract_boxed(response_text)
        if not answer:
            return Verdict.NO_ANSWER
        gold = strip_answer(problem.answer)
        outcome = compare_strings(gold, answer, self._tolerance) or self._recall(gold, answer)
        return outcome or await self._compare_in_worker(gold, answer, deadline)

    async def _compare_in_worker(self, gold: str, answer: str, deadline: float) -> Verdict:
        request = {
            "gold": _spell_exponent(gold),
            "answer": _spell_exponent(answer),
            "relative_tolerance": self.settings.relative_tolerance,
        }
        try:
            reply = await self._pool.ask(request, timeout_s=self.settings.timeout_s, deadline=deadline)
        except TimeoutError:
            return Verdict.TIMEOUT
        except WorkerDiedError:
            return Verdict.ERROR
        outcome = Verdict.CORRECT if reply["equal"] else Verdict.WRONG
        self._remember(gold, answer, outcome)
        return outcome

    def _recall(self, gold: str, answer: str) -> Verdict | None:
        outcome = self._outcomes.get((gold, answer))
        if outcome is not None:
            self._outcomes.move_to_end((gold, answer))
        return outcome

    def _remember(self, gold: str, answer: str, outcome: Verdict) -> None:
        self._outcomes[gold, answer] = outcome
        if len(self._outcomes) > self.settings.cache_entries:
            self._outcomes.popitem(last=False)


def compare_strings(gold: str, answer: str, relative_tolerance: Decimal = Decimal(0)) -> Verdict | None:
    """Judge what needs no parser: None if only Math-Verify can tell.

    Equal strings and equal normal forms are right. Oversized answers, and what Math-Verify would overlook, are wrong.
    Two numbers are compared as numbers, also with units.
    """
    if gold.split() == answer.split():
        return Verdict.CORRECT
    if is_oversized(answer):
        return Verdict.WRONG
    wanted, given = normal_form(gold), normal_form(answer)
    if wanted == given and wanted.value:
        return Verdict.CORRECT
    if is_overlooked(gold, answer, wanted, given):
        return Verdict.WRONG
    gold_number, number = parse_number(wanted.value), parse_number(given.value)
    if gold_number is None or number is None or "%" in (wanted.unit, given.unit):
        return None  # 50% may be 50 or 0.5, as in Math-Verify
    return Verdict.CORRECT if numbers_equal(gold_number, number, relative_tolerance) else Verdict.WRONG


def numbers_equal(gold: Decimal, number: Decimal, relative_tolerance: Decimal = Decimal(0)) -> bool:
    """Return whether two numbers count as equal: integers exactly, others within Math-Verify's 1e-6.

    That is 1e-6 in absolute terms, but below 1 relative to the larger number. With a relative tolerance a number within
    that share of the gold is equal too, also if it is an integer.
    """
    if gold == number or abs(gold - number) <= relative_tolerance * abs(gold):
        return True
    if gold == gold.to_integral_value() or number == number.to_integral_value():
        return False  # as in Math-Verify, where only 72.0 equals the integer 72
    return abs(gold - number) <= _TOLERANCE * min(Decimal(1), max(abs(gold), abs(number)))


def _spell_exponent(answer: str) -> str:
    r"""Write `4.5e33` as `4.5 \times 10^{33}`, because Math-Verify would read the e as Euler's number."""
    match = _EXPONENT.fullmatch(answer)
    return rf"{match[1]} \times 10^{{{match[2]}}}" if match else answer


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
