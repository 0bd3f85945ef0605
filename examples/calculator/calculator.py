"""A tool: `environment: {object: examples/calculator/calculator.py:Calculator}`.

The class has the shape that TRL takes as `GRPOTrainer(environment_factory=Calculator)`, and imports nothing of ours.
"""

from __future__ import annotations

import operator
import re

_OPERATION = re.compile(r"(\d{1,9})([+*-])(\d{1,9})", re.ASCII)
_MEANS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Calculator:
    """Does one operation at a time."""

    def reset(self, **row: object) -> None:
        """Begin an episode: it is the same for all problems, and nothing is kept."""

    def calculate(self, expression: str) -> str:
        """Return what one operation makes of two numbers.

        Args:
            expression: Two whole numbers with +, - or * between them, such as 472*86.
        """
        found = _OPERATION.fullmatch(expression)
        if found is None:
            raise ValueError("two numbers only")
        return str(_MEANS[found[2]](int(found[1]), int(found[3])))
