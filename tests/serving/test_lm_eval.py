"""lm-eval on `spot-async serve` gives the responses of `spot-async eval`, where both are greedy.

`make test-lm-eval` runs this. SPOT_LM_EVAL_PYTHON is the interpreter of an environment with lm-eval and transformers.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STUDENT = ROOT / "examples" / "running_sum" / "student"
PYTHON = os.environ.get("SPOT_LM_EVAL_PYTHON", "")
PROBLEMS = 40

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON, reason="SPOT_LM_EVAL_PYTHON names no interpreter with lm-eval"),
]


def test_greedy_responses_are_the_same_and_it_reads_our_results(tmp_path: Path, running_server: Any) -> None:
    problems = tmp_path / "sums.jsonl"
    rows = (ROOT / "examples/running_sum/data/heldout.jsonl").read_text().splitlines()[:PROBLEMS]
    problems.write_text("\n".join(rows) + "\n")
    (tmp_path / "task.yaml").write_text(
        json.dumps(  # which is YAML
            {
                "task": "sums",
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": str(problems)}},
                "test_split": "test",
                "output_type": "generate_until",
                "doc_to_text": "{{problem}}",
                "doc_to_target": "{{answer}}",
                "generation_kwargs": {"until": [], "do_sample": False, "temperature": 0, "max_gen_toks": 100},
                "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
            }
        )
    )
    keys = ["evaluation.samples=1", "evaluation.temperature=0", "evaluation.max_response_tokens=100"]
    subprocess.run(
        [sys.executable, "-m", "spot_async", "eval", "--model", STUDENT, "--benchmark", problems, *keys,
         "prompt.instruction=", f"run.directory={tmp_path / 'ours'}"],
        check=True,
    )  # fmt: skip
    with running_server(STUDENT) as url:
        subprocess.run(
            [PYTHON, "-m", "lm_eval", "--model", "local-completions", "--tasks", "sums", "--include_path", tmp_path,
             "--apply_chat_template", "--log_samples", "--output_path", tmp_path / "theirs", "--model_args",
             f"model=student,base_url={url}/v1/completions,tokenizer={STUDENT},num_concurrent=8,max_length=512"],
            check=True,
            env=os.environ | {"OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")},
        )  # fmt: skip
    (samples,) = (tmp_path / "theirs").rglob("samples_sums_*.jsonl")
    theirs = {row["doc"]["id"]: row["resps"][0][0] for row in map(json.loads, samples.read_text().splitlines())}
    ours = [json.loads(line) for line in (tmp_path / "ours" / "evaluation.jsonl").read_text().splitlines()]
    assert {row["problem_id"]: row["response"] for row in ours} == theirs
    assert len(theirs) == PROBLEMS

    runpy.run_path(str(ROOT / "examples" / "results_for_others.py"))["main"]([str(tmp_path / "ours")])
    read = "import json, sys; from lm_eval.utils import make_table; print(make_table(json.load(open(sys.argv[1]))))"
    file = tmp_path / "ours" / "results_lm_eval.json"
    table = subprocess.run([PYTHON, "-c", read, file], check=True, capture_output=True, text=True).stdout
    accuracy = json.loads(file.read_text())["results"]["sums"]["avg@1,none"]
    assert f"|{accuracy:.4g}|" in table.replace(" ", "")
