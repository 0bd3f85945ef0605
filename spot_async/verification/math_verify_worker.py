r"""A process that compares answers with Math-Verify. Started by `math_verify.py` as a script, never imported.

It reads `{"gold": ..., "answer": ..., "whole": ..., "relative_tolerance": ...}`, one JSON object per line, and writes
`{"equal": true}`. An answer that does not parse is not equal. `whole` is all of `math_match.py`, and has Math-Verify
read nothing but LaTeX, units included; a set may be a relation. With null for the answer, the question is whether
Math-Verify reads the gold as mathematics.

Math-Verify's own time limits are off, since they need SIGALRM and leave half-built caches. The parent kills the process
instead. Running out of memory ends the process, and the parent takes that for missing evidence. If sympy swallows the
MemoryError, the answer counts as not equal, which is true of an answer so unlike any gold.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from functools import partial
from typing import Any

from spot_async.base.processes.exits import answer_lines

# Below this, equality by Math-Verify is checked again, within TINY relative to the gold: Math-Verify rounds to six
# decimals, which leaves three digits of 1e-3 and nothing of 2e-19.
TINY = 1e-3
_OR = re.compile(r"(?<![A-Za-z])or(?![A-Za-z])")


def load_comparison() -> Callable[[dict[str, Any]], bool]:
    """Import Math-Verify and return what answers a request. What takes long to import counts for no request."""
    import sympy
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy.core.relational import Relational

    from spot_async.verification.math_match import same

    whole = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last")
    only_latex = {"extraction_config": [LatexExtractionConfig(boxed_match_priority=0, normalization_config=whole)]}

    def read(text: str, guarded: bool) -> list[Any]:
        # In a box: a bare gold fails to parse in one case of five, and one between dollars if it holds one.
        options: dict[str, Any] = only_latex if guarded else {}
        return list(parse(rf"\boxed{{{text}}}", parsing_timeout=None, raise_on_error=True, **options))

    def as_sets(found: list[Any], other: list[Any], text: str) -> list[Any]:
        """Turn several relations into the numbers for which they hold, where the other is an interval."""
        relations = found[0].args if found and isinstance(found[0], sympy.FiniteSet) else ()
        is_list = not other or not isinstance(other[0], sympy.Set) or isinstance(other[0], sympy.FiniteSet)
        if is_list or not relations or not all(isinstance(each, Relational | sympy.And) for each in relations):
            return found
        sets = [each.as_set() for each in relations]
        both = sympy.Intersection(*sets)
        return [sympy.Union(*sets) if _OR.search(text) or both.is_empty else both]

    def numbers(found: list[Any]) -> list[Any] | None:
        """Return the answer's numbers, those of a list or an interval in order; None if it holds anything else.

        Of an equation or an inequality they are the sides that are numbers.
        They are sympy's own, whose exponents have no limit: as floats 1e-400 would be 0.
        """
        each = found[0] if found else None
        if isinstance(each, sympy.Tuple | sympy.FiniteSet | sympy.Interval):
            inner = [numbers([arg]) for arg in each.args if arg not in (sympy.true, sympy.false)]
            return None if None in inner else [number for part in inner for number in part or ()]
        if isinstance(each, Relational):
            return [number for side in each.args for number in numbers([side]) or ()]
        if not (isinstance(each, sympy.Expr) and each.is_number):
            return None
        with suppress(TypeError, ValueError, ArithmeticError):
            return [sympy.N(each.doit())]
        return None

    def difference(found: list[Any]) -> Any:
        """Return the left side of an equation less its right side; None for anything else."""
        sides = found[0].args if found and isinstance(found[0], sympy.Eq) else ()
        return sides[0] - sides[1] if sides and all(isinstance(side, sympy.Expr) for side in sides) else None

    def near(wanted: Any, given: Any, tolerance: float) -> bool:
        return bool(sympy.Abs(wanted - given) <= tolerance * sympy.Abs(wanted))

    def equal(gold: str, answer: str | None, guarded: bool, relative_tolerance: float) -> bool:
        if answer is None:
            return any(not isinstance(each, str) for each in read(gold, guarded))
        parsed = [read(text, guarded) for text in (gold, answer)]
        if guarded:
            parsed = [as_sets(parsed[0], parsed[1], gold), as_sets(parsed[1], parsed[0], answer)]
        is_equal = bool(verify(*parsed, allow_set_relation_comp=guarded, timeout_seconds=None, raise_on_error=True))
        sides: list[Any] = list(map(difference, parsed)) if guarded else [None]
        if None not in sides and 0 in (sympy.expand(sides[0] - sides[1]), sympy.expand(sides[0] + sides[1])):
            return True  # terms on the other side: `x+y=5` for `x+y-5=0`
        if not (is_equal or relative_tolerance):
            return False
        wanted, given = map(numbers, parsed)
        if wanted is None or given is None or len(wanted) != len(given):
            return is_equal
        if not is_equal:
            are_plain = len(wanted) == 1 and not any(isinstance(each[0], Relational) for each in parsed)
            return are_plain and near(wanted[0], given[0], relative_tolerance)
        # A set has no order, so its tiny numbers are compared by size.
        tiny = [sorted((n for n in each if sympy.Abs(n) < TINY), key=sympy.Abs) for each in (wanted, given)]
        tolerance = max(relative_tolerance, TINY)
        return len(tiny[0]) == len(tiny[1]) and all(near(w, g, tolerance) for w, g in zip(*tiny, strict=True))

    def equal_or_unparsable(gold: str, answer: str | None, guarded: bool, relative_tolerance: float) -> bool:
        try:
            return equal(gold, answer, guarded, relative_tolerance)
        except Exception as error:
            if isinstance(error, MemoryError):
                raise
            return False  # sympy and ANTLR raise nearly every type for text that is not mathematics

    def answers(request: dict[str, Any]) -> bool:
        gold, answer, tolerance = request["gold"], request["answer"], request["relative_tolerance"]
        compare = partial(equal_or_unparsable, guarded=request["whole"], relative_tolerance=tolerance)
        if request["whole"] and answer is not None:
            return same(gold, answer, compare, Decimal(str(tolerance)))
        return compare(gold, answer)

    return answers


def load() -> Callable[[dict[str, Any]], dict[str, Any]]:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy only comes along: a thread for each core would take the memory
    logging.disable(logging.CRITICAL)  # Math-Verify logs whole responses
    # A right answer may have many digits and levels, and the parent ends what takes too long.
    sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(3000)
    answers = load_comparison()
    # From here on parsers may print what they like. Until here, messages of a failure to start are still seen.
    os.dup2(sys.stdout.fileno(), sys.stderr.fileno())
    return lambda request: {"equal": answers(request)}


if __name__ == "__main__":
    answer_lines(load)
