r"""The verifier that gives other people's figures: the last balanced box, judged by Math-Verify as lighteval has it.

What two strings show is decided here. The rest goes to worker processes, since text that a model wrote can keep a
parser busy for ever (`9^{9^{9^{9}}}`). This differs from Math-Verify on a whole response, deliberately:

* Only the last box counts, and without a box there is no answer.
* Plain numbers are compared as numbers. Math-Verify rounds to six decimals, so 2e-19 would be 0.
* A relative tolerance is ours, not Math-Verify's.

All other leniencies are Math-Verify's (`3\text{ million}`, `\neq 3` and `3_7` are 3), so that results can be compared
with other people's. A policy that is trained on such verdicts learns to write them: `math_match.py` has the verifier
without them.
"""

from __future__ import annotations

import math
import re
import sys
from collections import OrderedDict
from contextlib import AsyncExitStack
from decimal import Decimal
from pathlib import Path

from pydantic import Field

from spot_async.base.processes.worker_pool import Words, WorkerDiedError, WorkerPool
from spot_async.base.tasks import Opened
from spot_async.config import NonNegativeFloat, PluginSettings, PositiveFloat, PositiveInt
from spot_async.types import Problem, Verdict
from spot_async.verification.normalization import (
    extract_boxed,
    is_oversized,
    parse_number,
    same_answer,
    strip_answer,
)

_WORKER = Path(__file__).with_name("math_verify_worker.py")
WORDS = Words("verification worker", "die at the answers they judge", "the verifier's `workers`")
_EXPONENT = re.compile(r"([+-]?[0-9.,]+)[eE]([+-]?[0-9]{1,3})")
_TOLERANCE = Decimal("1e-6")
MEMORY_LIMIT_BYTES = 2 << 30  # address space of a worker: a comparison that needs more is none that counts
CACHE_ENTRIES = 65536  # outcomes that are remembered, by (gold, answer)
FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|log|ln|exp|sqrt|frac|pi|infty"
_BARE_FUNCTION = re.compile(rf"(?<![A-Za-z\\])(?:{FUNCTIONS})(?![A-Za-z])")


class MathVerify(Opened):
    """Math-Verify in processes that can be killed. Outcomes are cached, missing evidence is not."""

    class Settings(PluginSettings):
        READS_BOX = True
        WITHOUT_EFFECT = frozenset({"workers"})

        kind: str = "math_verify"
        workers: PositiveInt = Field(2, description="worker processes, started as they are needed")
        timeout_s: PositiveFloat = Field(5.0, description="longest time one comparison may take before it is killed")
        relative_tolerance: NonNegativeFloat = Field(
            0.0,
            lt=1,
            description="a number that differs from the gold by at most this share of it is right too, such as 0.01 "
            "for Minerva; results are then not comparable with Math-Verify's. Default: Math-Verify's own 1e-6",
        )

    _is_whole = False  # whether workers do all that `math_match.py` does, and not Math-Verify's part alone

    def __init__(self, settings: Settings, pool: WorkerPool | None = None) -> None:
        """Make a verifier that starts nothing yet. The `pool` of another one is not its to open."""
        self.settings = settings
        # -P keeps this directory off the module path, since it also holds a math_verify.
        command = (sys.executable, "-P", str(_WORKER), str(MEMORY_LIMIT_BYTES))
        self._pool = pool or WorkerPool(command, size=settings.workers, words=WORDS)
        self._tolerance = Decimal(str(settings.relative_tolerance))
        self._outcomes: OrderedDict[tuple[str, str | None], bool] = OrderedDict()

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
        gold, verdict = strip_answer(problem.answer), Verdict.NO_ANSWER
        for answer in self._answers(response_text):
            if verdict in (Verdict.NO_ANSWER, Verdict.WRONG):
                verdict = await self._compare(gold, answer, deadline)
        return verdict

    def _answers(self, response_text: str) -> tuple[str, ...]:
        """Return what the response may mean as its answer: the next one counts if those before it are wrong."""
        return tuple(filter(None, [extract_boxed(response_text)]))

    async def _compare(self, gold: str, answer: str, deadline: float) -> Verdict:
        """Compare here what needs no parser, and all else where it can be killed."""
        is_equal: bool | Verdict | None = compare_strings(gold, answer, self._tolerance)
        if is_equal is None and not self._is_whole:
            is_equal = await self._ask(spell_exponent(gold), spell_exponent(answer), deadline)
        elif is_equal is None:
            is_equal = same_answer(gold, answer) or await self._ask(gold, answer, deadline)
        return is_equal if isinstance(is_equal, Verdict) else Verdict.CORRECT if is_equal else Verdict.WRONG

    async def reads(self, answer: str) -> bool:
        """Return whether Math-Verify reads an answer as the mathematics that it is.

        Otherwise only the same text is right: `-1./3`, or `sqrt{7}`, where it reads a product of letters.
        """
        return not _BARE_FUNCTION.search(answer) and await self._ask(answer, None, math.inf) is not False

    async def _ask(self, gold: str, answer: str | None, deadline: float) -> bool | Verdict:
        """Return whether the gold equals the answer, or the missing verdict. See `verify` for what it raises."""
        asked = gold, answer
        if asked in self._outcomes:
            self._outcomes.move_to_end(asked)
            return self._outcomes[asked]
        whole, tolerance = self._is_whole or answer is None, self.settings.relative_tolerance
        request = {"gold": gold, "answer": answer, "whole": whole, "relative_tolerance": tolerance}
        try:
            reply = await self._pool.ask(request, timeout_s=self.settings.timeout_s, deadline=deadline)
        except TimeoutError:
            return Verdict.TIMEOUT
        except WorkerDiedError:
            return Verdict.ERROR
        self._outcomes[asked] = is_equal = bool(reply["equal"])
        if len(self._outcomes) > CACHE_ENTRIES:
            self._outcomes.popitem(last=False)
        return is_equal


def compare_strings(gold: str, answer: str, relative_tolerance: Decimal = Decimal(0)) -> bool | None:
    """Return whether the strings are equal or two equal numbers; None if only Math-Verify can tell.

    Oversized answers are wrong.
    """
    if gold.split() == answer.split():
        return True
    if is_oversized(answer, gold):
        return False
    gold_number, number = parse_number(gold), parse_number(answer)
    if gold_number is None or number is None:
        return None
    return numbers_equal(gold_number, number, relative_tolerance)


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


def spell_exponent(answer: str) -> str:
    r"""Write `4.5e33` as `4.5 \times 10^{33}`, because Math-Verify would read the e as Euler's number."""
    match = _EXPONENT.fullmatch(answer)
    return rf"{match[1]} \times 10^{{{match[2]}}}" if match else answer
