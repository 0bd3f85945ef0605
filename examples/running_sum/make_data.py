"""Writes the problem files of the running sum, or checks that the shipped ones are what the generator makes.

    python examples/running_sum/make_data.py [--check] [--out DIR]

`heldout.jsonl` is the evaluation set. `train.jsonl` has the prompts for distillation: all different, and none held out.
Each of them has a worked solution beside the answer, for methods that show it to a teacher.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

import task

TRAIN_SEED = "running-sum-train-1"
TRAIN_PROBLEMS = 8_000
SOLUTION_SEED = "running-sum-solution-1"
SOLUTION_MIX: task.StrategyMix = (1 / 3, 1 / 3, 1 / 3)  # solutions lean towards no style


def train_problems() -> list[task.Problem]:
    """Return TRAIN_PROBLEMS problems with different texts and equally likely tiers."""
    excluded = {problem.text for problem in task.heldout_problems()}
    problems: dict[str, task.Problem] = {}
    stream = task.draw_problems(random.Random(TRAIN_SEED), excluded)
    while len(problems) < TRAIN_PROBLEMS:
        problem = next(stream)
        problems.setdefault(problem.text, problem)
    return list(problems.values())


def rows_of(split: str, problems: Iterable[task.Problem]) -> list[dict[str, str]]:
    return [
        {"id": f"{split}-{i:04d}", "problem": problem.text, "answer": problem.answer, "tier": problem.tier}
        for i, problem in enumerate(problems)
    ]


def with_solutions(rows: Iterable[dict[str, str]], problems: Iterable[task.Problem]) -> list[dict[str, str]]:
    """Return the rows of these problems with a solution each. A problem's own text decides how it is solved."""
    return [
        row | {"solution": task.write_solution(problem, SOLUTION_MIX, random.Random(f"{SOLUTION_SEED} {problem.text}"))}
        for row, problem in zip(rows, problems, strict=True)
    ]


def as_jsonl(rows: Iterable[dict[str, str]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description="Write or check the problem files.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing; exit 1 on a difference")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    arguments = parser.parse_args()
    problems = train_problems()
    files = {
        "train.jsonl": as_jsonl(with_solutions(rows_of("train", problems), problems)),
        "heldout.jsonl": as_jsonl(rows_of("heldout", task.heldout_problems())),
    }
    for name, content in files.items():
        path = arguments.out / name
        if not arguments.check:
            arguments.out.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        elif not path.is_file() or path.read_bytes() != content:
            sys.exit(f"{path} is not what the generator makes: run make_data.py without --check")


if __name__ == "__main__":
    main()
