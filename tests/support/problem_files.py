"""Writes and reads problem files for tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spot_async.config import ProblemSetConfig
from spot_async.data import ProblemSet, load_problem_set

# 180 problems from the checkout, for runs that need not render the 8,000 of the quickstart.
FEW = "data.train=examples/running_sum/data/heldout.jsonl"
FOUR = ("training.batch_size=4", "training.mini_batch_size=4", "training.warmup_iterations=0")  # prompts an iteration
CANONICAL = Path(__file__).parents[3] / "shared" / "data" / "canonical"
needs_data = pytest.mark.skipif(not CANONICAL.is_dir(), reason="real problem files are not here")
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


def write(tmp_path, rows, name="problems.jsonl") -> str:
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path, needs_answers=True, **more) -> ProblemSet:
    return load_problem_set(ProblemSetConfig(path=str(path), **more), "data.train", needs_answers=needs_answers)


def load(tmp_path, rows, **more) -> ProblemSet:
    return read(write(tmp_path, rows), **more)


def doubts(tmp_path, rows, **more) -> list[str]:
    return load(tmp_path, rows, needs_answers=False, **more).doubts("data.train", None)
