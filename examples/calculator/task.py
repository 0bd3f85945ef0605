r"""Draws problems that need a calculator, and episodes in which it is used or not.

A problem is a product, `472*86`, or a product and a further number, `472*86+59`. Models of this size cannot multiply
such numbers. They can copy them into a call, and what the tool answers into a box:

    <tool_call>{"name": "calculate", "arguments": {"expression": "472*86"}}</tool_call>  40592  \boxed{40592}

Whether to call is the *decision* that distillation can improve: at once `\boxed{39212}` is short, and wrong.

This module draws and reads text only. It knows nothing of tokens, models or files.
"""

from __future__ import annotations

import random
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Tier = Literal["one", "two"]
TIERS: tuple[Tier, ...] = get_args(Tier)  # by how many operations are needed

HELDOUT_SEED = "calculator-heldout-1"
HELDOUT_PER_TIER = 60

_CALLED = re.compile(r'<tool_call>\{"name": ?"calculate", ?"arguments": ?\{"expression": ?"([^"]*)"\}\}</tool_call>')
_BOXED = re.compile(r"\\boxed\{(\d+)\}")


@dataclass(frozen=True, slots=True)
class Problem:
    """`first * second`, and then `+ third`, which may be below zero; without, it is 0."""

    first: int
    second: int
    third: int = 0

    @property
    def tier(self) -> Tier:
        return "two" if self.third else "one"

    @property
    def text(self) -> str:
        return f"{self.first}*{self.second}" + (f"{self.third:+d}" if self.third else "")

    @property
    def answer(self) -> str:
        return str(self.first * self.second + self.third)

    @property
    def operations(self) -> list[tuple[str, str]]:
        """The calls that solve it, each an expression and its result."""
        product = str(self.first * self.second)
        found = [(f"{self.first}*{self.second}", product)]
        return found + [(f"{product}{self.third:+d}", self.answer)] * bool(self.third)


def draw_problem(rng: random.Random, tier: Tier) -> Problem:
    first, second = rng.randint(100, 999), rng.randint(11, 99)
    return Problem(first, second, rng.choice((-1, 1)) * rng.randint(10, 99) if tier == "two" else 0)


def draw_problems(
    rng: random.Random, excluded_texts: Container[str] = (), tiers: Sequence[Tier] = TIERS
) -> Iterator[Problem]:
    """Draw problems without end, with equally likely tiers and no excluded texts."""
    while True:
        problem = draw_problem(rng, rng.choice(tiers))
        if problem.text not in excluded_texts:
            yield problem


def heldout_problems() -> list[Problem]:
    """Return the fixed evaluation set: HELDOUT_PER_TIER different problems of each tier, in tier order."""
    rng = random.Random(HELDOUT_SEED)
    problems: dict[str, Problem] = {}
    for place, tier in enumerate(TIERS, start=1):
        while len(problems) < place * HELDOUT_PER_TIER:
            problem = draw_problem(rng, tier)
            problems.setdefault(problem.text, problem)
    return list(problems.values())


def write_call(expression: str) -> str:
    return f'<tool_call>{{"name": "calculate", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


def write_turns(problem: Problem, *, at_once: bool) -> list[tuple[str, str]]:
    """Write an episode that ends right: turns of the model, each with what the tool answers; `at_once` calls none."""
    calls = [] if at_once else [(write_call(expression), result) for expression, result in problem.operations]
    return [*calls, (f"\\boxed{{{problem.answer}}}", "")]


def read_call(turn: str) -> str | None:
    """Return the expression that a turn calls the tool with."""
    found = _CALLED.fullmatch(turn)
    return found[1] if found else None


def read_answer(turn: str) -> str | None:
    """Return the last boxed number of a turn."""
    answers: list[str] = _BOXED.findall(turn)
    return answers[-1] if answers else None
