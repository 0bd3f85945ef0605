"""Writes the problem files of the relay, or checks that the shipped ones are what the generator makes.

    python experiments/mechanism/relay/make_data.py [--check] [--out DIR]

`heldout.jsonl` is the evaluation set. `train.jsonl` has the prompts for distillation: all different, and none held out.
`heldout-wide.jsonl` is a part of the evaluation set, small enough for 64 responses to each of its problems.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import task

WIDE_PER_TIER = 40


def files() -> dict[str, bytes]:
    """Return the content of each file by its name."""
    train, heldout = (rows(split, getattr(task.RELAY, split)) for split in ("train", "heldout"))
    wide = [row for tier in task.TIERS for row in [row for row in heldout if row["tier"] == str(tier)][:WIDE_PER_TIER]]
    named = {"train": train, "heldout": heldout, "heldout-wide": wide}
    return {
        f"{name}.jsonl": "".join(json.dumps(row) + "\n" for row in content).encode() for name, content in named.items()
    }


def rows(split: str, problems: dict[str, tuple[int, str]]) -> list[dict[str, str]]:
    return [
        {"id": f"{split}-{i:04d}", "problem": text, "answer": answer, "tier": str(operations)}
        for i, (text, (operations, answer)) in enumerate(problems.items())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write or check the problem files.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing; exit 1 on a difference")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    arguments = parser.parse_args()
    for name, content in files().items():
        path = arguments.out / name
        if not arguments.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        elif not path.is_file() or path.read_bytes() != content:
            sys.exit(f"{path} is not what the generator makes: run make_data.py without --check")


if __name__ == "__main__":
    main()
