"""How the verifiers judge the answers and responses of real problem sets, if those are on this machine."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from spot_async.verification import Verdict, boxed_match
from spot_async.verification.math_verify import compare_strings

DATA = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="real problem files are not here")


def rows(name: str) -> list[dict[str, Any]]:
    with gzip.open(DATA / name, "rt") as lines:
        return [json.loads(line) for line in lines]


@needs_data
@pytest.mark.parametrize("path", sorted((DATA / "canonical").glob("*.jsonl.gz")), ids=lambda path: path.name)
def test_boxed_match_accepts_every_real_gold_and_the_solution_it_came_from(path: Path) -> None:
    for row in rows(f"canonical/{path.name}"):
        gold = row["answer"]
        expected = Verdict.CORRECT if gold else Verdict.NO_ANSWER
        assert boxed_match(gold, rf"The answer is \boxed{{{gold}}}.") is expected, row["id"]
        if path.name.startswith("math"):
            assert boxed_match(gold, row["solution"]) is expected, row["id"]


@needs_data
def test_minervas_exponents_equal_powers_of_ten() -> None:
    golds = [row["answer"] for row in rows("canonical/minerva_math.jsonl.gz")]
    powers = {
        gold: gold.replace("e", r" \times 10^{", 1) + "}" for gold in golds if re.fullmatch(r"[0-9.]+e-?\d+", gold)
    }
    assert len([gold for gold in golds if gold in powers]) == 58
    for gold, power in powers.items():
        assert compare_strings(gold, power), gold
        assert boxed_match(gold, rf"\boxed{{{power}}}") is Verdict.CORRECT, gold


@needs_data
@pytest.mark.parametrize("path", sorted((DATA / "canonical").glob("*.jsonl.gz")), ids=lambda path: path.name)
def test_every_real_gold_but_the_empty_ones_equals_itself_without_a_parser(path: Path) -> None:
    golds = [row["answer"].strip() for row in rows(f"canonical/{path.name}")]
    undecided = [gold for gold in golds if gold and not compare_strings(gold, gold)]
    assert not undecided
    assert len(golds) - len(list(filter(None, golds))) == (2 if path.name == "math_train.jsonl.gz" else 0)


@needs_data
def test_boxed_match_accepts_almost_nothing_that_graders_call_wrong() -> None:
    graded = [row for row in rows("graded/graded.jsonl.gz") if row["response"]]
    accepted = [row for row in graded if boxed_match(row["gold"], row["response"]) is Verdict.CORRECT]
    assert len(accepted) > 200
    assert sum(not row["label"] for row in accepted) <= 1  # `10{,}000` for 10000, which the label's grader misses
