r"""Draws problems of the labelled running sum, and worked solutions in a chosen style.

A problem is a start value followed by signed one-digit terms, each with a letter in front, such as `a15b-9c-4d+5e+2`.
The letters let a two-layer model find the next term by look-up instead of by counting. A solution applies one, two or
three terms a line and ends in a boxed total:

    one b15-9=6 so two c6-4+5=7 next one e7+2=9 so \boxed{9}

How many terms a line takes is the *decision* that distillation can improve: long lines are short to write and easy to
get wrong. The connective after each line is as uncertain and decides nothing, so it serves as a control.

This module draws and reads text only. It knows nothing of tokens, models or files.
"""

from __future__ import annotations

import random
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Tier = Literal["easy", "medium", "hard"]
StrategyMix = tuple[float, float, float]

TIERS: tuple[Tier, ...] = get_args(Tier)
TERMS_BY_TIER: dict[Tier, tuple[int, int]] = {
    "easy": (4, 6),
    "medium": (8, 10),
    "hard": (13, 16),
}  # start value included
LABELS = "abcdefghijklmnop"
LARGEST_SUM = 39
SMALLEST_START = 5

STRATEGIES = ("one", "two", "three")  # the name at index i takes i + 1 terms
CONNECTIVES = ("so", "then", "next")
CONNECTIVE_WEIGHTS = (0.5, 0.3, 0.2)
# The chance that a plan is kept for the next line. If every line were drawn afresh, one decision would hardly matter:
# three short lines would replace one long line, and the rest of the solution would fall back to the old habit.
COMMITMENT = 0.85

HELDOUT_SEED = "running-sum-heldout-1"
HELDOUT_PER_TIER = 60

_LINE = re.compile(r"(one|two|three) ?[a-p](\d+)((?:[+-]\d)+)=(\d+)")
_BOXED = re.compile(r"\\boxed\{(\d+)\}")


@dataclass(frozen=True, slots=True)
class Problem:
    """A start value and the signed terms to add to it, in order."""

    start: int
    steps: tuple[int, ...]
    tier: Tier

    @property
    def text(self) -> str:
        return f"{LABELS[0]}{self.start}" + "".join(
            f"{label}{step:+d}" for label, step in zip(LABELS[1:], self.steps, strict=False)
        )

    @property
    def answer(self) -> str:
        return str(self.start + sum(self.steps))


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a solution as it was written, right or wrong."""

    strategy: str
    before: int
    steps: tuple[int, ...]
    after: int

    @property
    def is_exact(self) -> bool:
        """Whether the line takes as many terms as it announces and adds them correctly."""
        return len(self.steps) == STRATEGIES.index(self.strategy) + 1 and self.before + sum(self.steps) == self.after


def draw_problem(rng: random.Random, tier: Tier) -> Problem:
    """Draw a problem of the tier. Every partial sum stays within 0..LARGEST_SUM."""
    term_count = rng.randint(*TERMS_BY_TIER[tier])
    start = total = rng.randint(SMALLEST_START, LARGEST_SUM)
    steps: list[int] = []
    while len(steps) < term_count - 1:
        step = rng.choice([step for step in range(-9, 10) if step and 0 <= total + step <= LARGEST_SUM])
        steps.append(step)
        total += step
    return Problem(start, tuple(steps), tier)


def draw_problems(rng: random.Random, excluded_texts: Container[str] = ()) -> Iterator[Problem]:
    """Draw problems without end, with equally likely tiers and no excluded texts."""
    while True:
        problem = draw_problem(rng, rng.choice(TIERS))
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


def write_solution(problem: Problem, mix: StrategyMix, rng: random.Random) -> str:
    """Write a correct solution. Its line lengths follow the mix, and its plan is mostly kept from line to line."""
    total, taken, lines = problem.start, 0, []
    plan = _draw_plan(mix, rng)
    while taken < len(problem.steps):
        if lines and rng.random() >= COMMITMENT:
            plan = _draw_plan(mix, rng)
        steps = problem.steps[taken : taken + plan]
        added = "".join(f"{step:+d}" for step in steps)
        connective = rng.choices(CONNECTIVES, CONNECTIVE_WEIGHTS)[0]
        label = LABELS[taken + 1]
        lines.append(f"{STRATEGIES[len(steps) - 1]} {label}{total}{added}={total + sum(steps)} {connective} ")
        total += sum(steps)
        taken += len(steps)
    return "".join(lines) + f"\\boxed{{{total}}}"


def read_lines(solution: str) -> list[Line]:
    """Return the well-formed lines of a solution; anything else in the text is skipped."""
    return [
        Line(name, int(before), tuple(int(step) for step in re.findall(r"[+-]\d", steps)), int(after))
        for name, before, steps, after in _LINE.findall(solution)
    ]


def read_answer(solution: str) -> str | None:
    """Return the last boxed number of a solution."""
    answers: Sequence[str] = _BOXED.findall(solution)
    return answers[-1] if answers else None


def _draw_plan(mix: StrategyMix, rng: random.Random) -> int:
    return rng.choices((1, 2, 3), mix)[0]
