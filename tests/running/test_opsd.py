"""OPSD in its sampled form, by configuration alone: the frozen student teaches itself behind the solution."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from engine_requests import dense_logprobs
from problem_files import write
from small_runs import EXAMPLE, example_run, rows

import spot_async
from spot_async.checks.plan import plan_training
from spot_async.config.loading import config_from
from spot_async.models.vocabulary import Vocabulary
from spot_async.running.assembly import make_stages
from spot_async.types import ChatTurn

ROOT = Path(__file__).parents[2]
STUDENT = EXAMPLE / "student"
PROBLEMS = 16


def solved(problem: str) -> str:
    """A worked solution of a running sum, one term a line."""
    total, lines = 0, []
    for label, term in re.findall(r"([a-p])([+-]?\d+)", problem):
        before, total = total, total + int(term)
        if label != "a":
            lines.append(f"one {chr(ord(label) - 1)}{before}{term}={total}")
    return " so ".join([*lines, f"\\boxed{{{total}}}"])


@pytest.fixture
def outcome(tmp_path, monkeypatch, servers_on_threads, trainer_on_thread):
    monkeypatch.chdir(ROOT)
    some = rows(EXAMPLE / "data" / "train.jsonl")[:PROBLEMS]
    data = write(tmp_path, [row | {"solution": solved(row["problem"])} for row in some])
    return spot_async.run(
        example_run(
            run={"directory": str(tmp_path / "run")},
            teacher={"model": str(STUDENT)},
            data={"train": data},
            prompt={"instruction": "", "teacher": {"text": "{problem} {solution}", "max_tokens": 256}},
            sampling={"max_prompt_tokens": 64, "max_response_tokens": 48},
            training={"iterations": 2, "batch_size": 8, "mini_batch_size": 4, "learning_rate": 1e-3},
        )
    )


def test_a_policys_turns_are_rendered_by_the_template_of_the_teachers_prompts(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    (tmp_path / "own.jinja").write_text("{% for turn in messages %}{{ turn.role[0] + turn.content }}{% endfor %}")
    read = {"template": str(tmp_path / "own.jinja"), "max_tokens": 64}
    for own, expected in ((None, "<|user|>a1<|assistant|>one<|end|><|user|>b2<|assistant|>"), (read, "<|unk|>a1aone")):
        prompt = {"instruction": "", "teacher": own}
        config = config_from(example_run(teacher={"model": str(STUDENT)}, prompt=prompt))
        plan = plan_training(config)
        services = SimpleNamespace(student=None, reference=None, backends={}, capabilities={}, kept_scores={})
        stages = make_stages(config, plan, services, None).for_prompt(next(iter(plan.schedule)))
        turns = ("a1", ChatTurn(role="assistant", content="one"), "b2")
        text = plan.student.vocabulary.whole_text(stages.teacher_prompt(*turns)).replace(" ", "")
        assert text.startswith(expected)


def test_a_student_learns_from_itself_behind_the_solution(outcome):
    samples = rows(outcome.directory / "samples.jsonl")
    tokenizer = Vocabulary.load(STUDENT).tokenizer
    assert len(samples) == 16
    for sample in samples[:4]:  # of the first iteration: teacher and student have the same weights
        problem, response = sample["problem"], np.array(sample["response_ids"])
        assert sample["teacher_prompt"].replace(" ", "") == (
            f"<|user|>{problem}{solved(problem).replace(' ', '')}<|assistant|>"
        )
        read = tokenizer(sample["teacher_prompt"], add_special_tokens=False, return_tensors="np").input_ids[0]
        own = tokenizer(f"<|user|>{problem}<|assistant|>", add_special_tokens=False, return_tensors="np").input_ids[0]
        at = np.arange(len(response)), response
        np.testing.assert_allclose(sample["teacher_logprobs"], dense_logprobs(STUDENT, read, response)[at], atol=1e-4)
        np.testing.assert_allclose(sample["behavior_logprobs"], dense_logprobs(STUDENT, own, response)[at], atol=1e-4)
        assert np.abs(np.subtract(sample["teacher_logprobs"], sample["behavior_logprobs"])).max() > 0.1
    # The trainer computes what the student's server did: it trains on the student's prompt.
    for row in rows(outcome.directory / "metrics.jsonl"):
        assert row["train/mismatch_max"] < 1e-3
        assert row["train/grad_norm"] > 0
