"""Writes the problem files of the calculator, or checks that the shipped ones are what the generator makes.

    python examples/calculator/make_data.py [--check] [--out DIR]

`heldout.jsonl` is the evaluation set. `train.jsonl` has the prompts for training: all different, and none held out.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

import task

TRAIN_SEED = "calculator-train-1"
TRAIN_PROBLEMS = 3_000


def train_problems() -> list[task.Problem]:
    """Return TRAIN_PROBLEMS problems with different texts and equally likely tiers."""
    problems: dict[str, task.Problem] = {}
    stream = task.draw_problems(random.Random(TRAIN_SEED), {problem.text for problem in task.heldout_problems()})
    while len(problems) < TRAIN_PROBLEMS:
        problem = next(stream)
        problems.setdefault(problem.text, problem)
    return list(problems.values())


def as_jsonl(split: str, problems: Iterable[task.Problem]) -> bytes:
    rows = (
        {"id": f"{split}-{i:04d}", "problem": problem.text, "answer": problem.answer, "tier": problem.tier}
        for i, problem in enumerate(problems)
    )
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description="Write or check the problem files.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing; exit 1 on a difference")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    arguments = parser.parse_args()
    for split, problems in (("train", train_problems()), ("heldout", task.heldout_problems())):
        path, content = arguments.out / f"{split}.jsonl", as_jsonl(split, problems)
        if not arguments.check:
            arguments.out.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        elif not path.is_file() or path.read_bytes() != content:
            sys.exit(f"{path} is not what the generator makes: run make_data.py without --check")


if __name__ == "__main__":
    main()
