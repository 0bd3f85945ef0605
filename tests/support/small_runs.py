"""Configurations of small runs, and the rows that runs write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[2] / "examples" / "running_sum"
HELD_OUT = str(EXAMPLE / "data" / "heldout.jsonl")
NAMED: dict[str, Any] = {  # of names alone, for what reads no model and no problem
    "student": {"model": "s"},
    "teacher": {"model": "t"},
    "data": {"train": "train.jsonl"},
    "policy": "opd",
    "training": {"iterations": 3, "batch_size": 8, "mini_batch_size": 4},
}


def example_run(**sections: Any) -> dict[str, Any]:
    """Return an iteration of the example's student on its held-out problems. It has no teacher unless one is given."""
    return {
        "student": {"model": str(EXAMPLE / "student")},
        "data": {"train": HELD_OUT},
        "prompt": {"instruction": ""},
        "sampling": {"max_prompt_tokens": 64, "max_response_tokens": 160},
        "policy": "opd",
        "training": {"iterations": 1, "batch_size": 8, "mini_batch_size": 4},
        **sections,
    }


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
