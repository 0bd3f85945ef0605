"""The calculator example: its files are made again as shipped, and a run's responses call its tool."""

from __future__ import annotations

import hashlib
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import AutoTokenizer
from transformers.utils import get_json_schema

import spot_async
from spot_async.models.bridges import Bridges
from spot_async.models.calls import check_calls, read_calls, response_template
from spot_async.models.vocabulary import Vocabulary

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "calculator"
MODELS = ("student", "teacher")
TASK = runpy.run_path(str(EXAMPLE / "task.py"))
CALCULATOR = runpy.run_path(str(EXAMPLE / "calculator.py"))["Calculator"]


def manifest(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((EXAMPLE / name / "manifest.json").read_text())
    return found


def test_problem_files_are_what_the_generator_makes_and_the_tool_solves_them() -> None:
    assert subprocess.run([sys.executable, EXAMPLE / "make_data.py", "--check"], check=False).returncode == 0
    texts = set()
    for name in ("train", "heldout"):
        for row in map(json.loads, (EXAMPLE / "data" / f"{name}.jsonl").read_text().splitlines()):
            assert str(eval(row["problem"])) == row["answer"]
            assert row["problem"] not in texts
            texts.add(row["problem"])
    for problem in TASK["heldout_problems"]():
        *calls, (boxed, _) = TASK["write_turns"](problem, at_once=False)
        assert [CALCULATOR().calculate(TASK["read_call"](turn)) for turn, _ in calls] == [each for _, each in calls]
        assert calls[-1][1] == TASK["read_answer"](boxed) == problem.answer


@pytest.mark.parametrize("expression", ["472*86+59", "86", "4**2", "-4*2", "", "1e3*2", "4" * 10 + "*1"])
def test_the_tool_refuses_what_is_not_one_operation(expression: str) -> None:
    with pytest.raises(ValueError, match="two numbers only"):
        CALCULATOR().calculate(expression)


@pytest.mark.parametrize("name", MODELS)
def test_the_shipped_tokenizer_is_the_built_one_and_the_manifest_that_of_the_weights(name: str, tmp_path: Path) -> None:
    runpy.run_path(str(EXAMPLE / "tokenizer.py"))["save_tokenizer"](tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_text() == (EXAMPLE / name / path.name).read_text()
    weights = (EXAMPLE / name / "model.safetensors").read_bytes()
    assert manifest(name)["sha256"] == {"model.safetensors": hashlib.sha256(weights).hexdigest()}


def test_the_template_writes_between_turns_what_the_models_were_trained_on() -> None:
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / "student", local_files_only=True)
    vocabulary = Vocabulary(tokenizer, (tokenizer.eos_token_id,))
    tools = [get_json_schema(CALCULATOR.calculate)]
    bridges = Bridges(vocabulary, {}, tools)
    assert bridges.doubts == []
    assert bridges.turn_end == tokenizer.eos_token_id
    assert np.array_equal(bridges.between(["40592"]), tokenizer("<|tool|>40592<|assistant|>")["input_ids"])
    template = response_template(vocabulary, bridges.template_text)
    check_calls(bridges, template, tools)
    problem = TASK["heldout_problems"]()[-1]
    messages: list[dict[str, Any]] = [{"role": "user", "content": problem.text}]
    trained = f"<|user|>{problem.text}"
    for turn, answer in TASK["write_turns"](problem, at_once=False):
        calls = read_calls(template, tokenizer.decode(tokenizer(turn)["input_ids"]), tools, bridges.generation_prompt)
        assert [each.arguments["expression"] for each in calls] == [TASK["read_call"](turn)] * bool(answer)
        called = [{"type": "function", "function": msgspec.to_builtins(each)} for each in calls]
        messages.append({"role": "assistant", "content": "" if answer else turn, "tool_calls": called})
        messages += [{"role": "tool", "content": answer}] * bool(answer)
        trained += f"<|assistant|>{turn}<|end|>" + f"<|tool|>{answer}" * bool(answer)
    ids = tokenizer(trained)["input_ids"]
    assert tokenizer.apply_chat_template(messages, return_dict=False) == ids
    assert tokenizer.unk_token_id not in ids


def test_the_student_calls_in_fewer_than_half_of_its_responses_and_the_teacher_nearly_always() -> None:
    student, teacher = (manifest(name)["with_tool"] for name in MODELS)
    assert student["calls"] < 0.5
    assert student["right"] < 0.5
    assert min(teacher["calls"], teacher["right"]) > 0.9


@pytest.mark.long
def test_two_iterations_of_opd_play_turns_and_learn_from_what_the_student_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers_on_threads: None, trainer_on_thread: None
) -> None:
    monkeypatch.chdir(ROOT)
    small = ["training.iterations=2", "training.batch_size=8", "training.mini_batch_size=4", "evaluation=null"]
    spot_async.run("examples/calculator/opd.yaml", [f"run.directory={tmp_path / 'run'}", *small])
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2]
    for row in rows:
        assert 0 < row["environment/calls"] < 1 < row["environment/turns"]
        assert 0 < row["environment/read_share"] < 0.5
        assert row["environment/unreadable"] < 1
