"""The example's calculator, which notes what it is asked. TRL's trainer and spot-async import it as it stands."""

from __future__ import annotations

import json

from calculator import Calculator


class Sums(Calculator):
    def __init__(self, log: str) -> None:
        self._log = log

    def reset(self, **row: str) -> str:
        """Begin. The problem is a product, and what is said of it the number that makes it the answer."""
        self._answer, self._last = row["answer"], ""
        self._note({name: row[name] for name in ("id", "problem", "answer", "tier")})
        return f"{int(self._answer) - int(super().calculate(row['problem'])):+d}"

    def calculate(self, expression: str) -> str:
        self._note(expression)
        self._last = super().calculate(expression)
        return self._last

    def get_reward(self) -> float:
        return float(self._last == self._answer)

    def _note(self, asked: str | dict[str, str]) -> None:
        with open(self._log, "a") as file:  # noqa: PTH123
            file.write(json.dumps(asked) + "\n")
