"""lighteval beside `spot-async eval`: equal responses and verdicts where both are greedy, and its grader beside ours.

`make test-lighteval` runs this. SPOT_LIGHTEVAL_PYTHON is the interpreter of an environment with lighteval.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"
STUDENT = ROOT / "examples" / "running_sum" / "student"
PYTHON = os.environ.get("SPOT_LIGHTEVAL_PYTHON", "")
PROBLEMS = 40

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON, reason="SPOT_LIGHTEVAL_PYTHON names no interpreter with lighteval"),
]


def test_greedy_responses_and_verdicts_are_the_same(tmp_path: Path) -> None:
    folder, theirs = tmp_path / "sums", tmp_path / "theirs"
    folder.mkdir()
    rows = (ROOT / "examples/running_sum/data/heldout.jsonl").read_text().splitlines()[:PROBLEMS]
    (folder / "test.jsonl").write_text("\n".join(rows) + "\n")
    subprocess.run(
        [sys.executable, "-m", "spot_async", "eval", "--model", STUDENT, "--benchmark", folder / "test.jsonl",
         "evaluation.samples=1", "evaluation.temperature=0", "evaluation.max_response_tokens=100",
         "evaluation.verifier=math_verify", "prompt.instruction=", f"run.directory={tmp_path / 'ours'}"],
        check=True,
    )  # fmt: skip
    student = shutil.copytree(STUDENT, tmp_path / "student")  # lighteval keeps responses beside the model
    command = [PYTHON, Path(__file__).with_name("lighteval_task.py"), folder, "accelerate"]
    subprocess.run(
        [*command, f"model_name={student},max_length=512,dtype=float32", "sums|0", "--save-details",
         "--output-dir", theirs],
        check=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")},
    )  # fmt: skip
    (details,) = theirs.rglob("*.parquet")
    found = {
        row["doc"]["choices"][0] + row["doc"]["query"]: (row["model_response"]["text"][0], [*row["metric"].values()])
        for row in pyarrow.parquet.read_table(details).to_pylist()
    }
    ours = [json.loads(line) for line in (tmp_path / "ours" / "evaluation.jsonl").read_text().splitlines()]
    assert {
        row["gold"] + row["problem"]: (row["response"], [float(row["verdict"] == "correct")]) for row in ours
    } == found
    assert len({verdict for _, (verdict,) in found.values()}) == 2
    assert len(found) == PROBLEMS


@pytest.mark.skipif(not SHARED.exists(), reason="needs the benchmark rows")
def test_our_grader_errs_less_often_than_lightevals_in_every_kind(tmp_path: Path) -> None:
    rows = [SHARED / f"data/canonical/{name}.jsonl.gz" for name in ("math500", "hmmt25", "amc23")]
    command = [sys.executable, ROOT / "benchmarks" / "graders.py", *rows, "--golds", "15"]
    command += ["--pairs", SHARED / "cases" / "verdicts.jsonl", "--peer", f"lighteval={PYTHON}"]
    table = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"})
    counts = {
        name: [int(cell) for cell in cells.split("│")[:5] if cell.strip().isdigit()]
        for name, cells in re.findall(r"│ (false negatives|false positives) +│([^\n]+)", table.stdout)
    }
    assert counts.keys() == {"false negatives", "false positives"}
    for pairs, ours, _, _, theirs in counts.values():
        assert ours <= 0.01 * pairs < 0.3 * pairs < theirs
