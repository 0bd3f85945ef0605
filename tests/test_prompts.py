"""Problem files, prompt order, and what happens to problems that do not fit."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from spot_async.config import ProblemSetConfig
from spot_async.data import load_problem_set
from spot_async.errors import DataError
from spot_async.prompts import PromptSchedule, PromptSource
from spot_async.types import Problem


def write(tmp_path, text):
    path = tmp_path / "problems.jsonl"
    path.write_text(text)
    return ProblemSetConfig(path=str(path))


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ('{"problem": "1+1", "answer": "2"}\n\n{"problem": "1+2", "answer": "3"}\n', ":2:", "empty line"),
        ('{"problem": "1+1", "answer": "2"}\n{"problem": "1+2"}\n', ":2:", "answer"),
        ('{"problem": "1+1", "answer": "2"}\n{"problem": "1+2", "answer"\n', ":2:", ""),
        ('{"problem": "1+1", "answer": ""}\n', ":1:", "`answer` is empty"),
        ('{"problem": "  ", "answer": "2"}\n', ":1:", "`problem` is empty"),
        ('{"problem": ["1+1"], "answer": "2"}\n', ":1:", "$.problem"),
        (
            '{"id": 1, "problem": "a", "answer": "2"}\n{"id": "1", "problem": "b", "answer": "2"}\n',
            ":2:",
            "problems.jsonl:1 already",
        ),
        ("", "problems.jsonl:", "no problems"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_by_line(tmp_path, text, where, what):
    with pytest.raises(DataError) as raised:
        load_problem_set(write(tmp_path, text), "data.train")
    assert where in str(raised.value)
    assert what in str(raised.value)
    assert "\n" not in str(raised.value)


def test_numbers_are_accepted_as_answers_and_further_fields_ignored(tmp_path):
    (problem,) = load_problem_set(
        write(tmp_path, '{"problem": "1+1", "answer": 2, "tier": 5, "source": "x"}\n'), "data.train"
    ).problems
    assert problem == Problem(id="line-1", text="1+1", answer="2", tier="5")


def schedule(count=23, **arguments):
    sources = [
        PromptSource(problem=Problem(id=str(i), text=str(i), answer="1"), token_ids=np.array([i], np.int32))
        for i in range(count)
    ]
    return PromptSchedule(sources, **{"batch_size": 5, "run_seed": 3, "shuffle": True, **arguments})


def test_an_epoch_drops_its_incomplete_batch_and_repeats_no_problem():
    plan = schedule(epochs=2)
    assert plan.iterations == 8  # 2 * (23 // 5)
    prompts = list(islice(plan, 40))
    assert [p.ordinal for p in prompts] == list(range(40))
    first, second = ([p.problem.id for p in prompts[i : i + 20]] for i in (0, 20))
    assert len(set(first)) == len(set(second)) == 20
    assert first != second


def test_the_order_follows_from_the_seed_alone():
    ids = [[p.problem.id for p in islice(schedule(epochs=1, run_seed=seed), 20)] for seed in (3, 3, 4)]
    assert ids[0] == ids[1] != ids[2]


def test_fewer_problems_than_a_batch_are_refused():
    with pytest.raises(DataError, match=r"4 usable problems make no batch of training\.batch_size=5"):
        schedule(count=4, epochs=1)
