"""Several training sets: shares of the prompts, and of each set a category, an instruction and a verifier."""

from __future__ import annotations

import json
from collections import Counter
from io import StringIO
from itertools import islice
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from problem_files import write
from rich.console import Console

from spot_async.checks.plan import plan_training
from spot_async.checks.resuming import check_same_numbers, check_same_prompts, digest_of_prompts
from spot_async.config.loading import config_from, dump_yaml, load_config, parse_yaml
from spot_async.data.prompts import PromptSchedule
from spot_async.errors import ConfigError, DataError
from spot_async.tools.check.check_command import check_files, show_run
from spot_async.types import Problem, PromptSource

ROOT = Path(__file__).parents[2]
BATCH = 8


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def files(tmp_path):
    """The paths of two files of 12 and of 5 problems."""
    lines = (ROOT / "examples/running_sum/data/heldout.jsonl").read_text().splitlines()
    paths = [tmp_path / "math.jsonl", tmp_path / "code.jsonl"]
    for path, chosen in zip(paths, (lines[:12], lines[12:17]), strict=True):
        path.write_text("\n".join(chosen) + "\n")
    return [str(path) for path in paths]


def configured(train, *overrides):
    keys = ["evaluation=null", f"training.batch_size={BATCH}", "training.mini_batch_size=4", *overrides]
    return load_config(Path("configs/quickstart.yaml"), [f"data.train={json.dumps(train)}", *keys])


def planned(train, *overrides):
    return plan_training(configured(train, *overrides))


def by_domain(files, **code):
    return [{"path": files[0], "share": 0.75, "category": "math"}, {"path": files[1], "share": 0.25, **code}]


def prompts(plan, count):
    return list(islice(plan.schedule, count))


# --- the order --------------------------------------------------------------------------------------------------------


def schedule(sizes, shares, **arguments):
    sources = [
        PromptSource(
            problem=Problem(id=f"{key}/{i}", text=str(i), answer="1", set_key=key), token_ids=np.array([i], np.int32)
        )
        for key, size in sizes.items()
        for i in range(size)
    ]
    return PromptSchedule(
        sources, **{"batch_size": 1, "run_seed": 3, "shuffle": True, "iterations": 1, "shares": shares, **arguments}
    )


@hypothesis.given(
    weights=st.lists(st.integers(1, 100), min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 40), min_size=6, max_size=6),
    seed=st.integers(0, 3),
)
def test_every_stretch_has_the_sets_in_their_shares_and_every_set_is_gone_through_before_it_repeats(
    weights, sizes, seed
):
    keys = [f"data.train.{index}" for index in range(len(weights))]
    shares = {key: weight / sum(weights) for key, weight in zip(keys, weights, strict=True)}
    size_of = dict(zip(keys, sizes, strict=False))
    ordered = schedule(size_of, shares, run_seed=seed)
    found = [each.problem for each in islice(ordered, 300)]
    assert found == [each.problem for each in islice(ordered, 300)]
    for end in range(1, 301):
        drawn = Counter(each.set_key for each in found[:end])
        assert all(abs(drawn[key] - share * end) < 2 for key, share in shares.items())
    for key, size in size_of.items():
        own = [each.id for each in found if each.set_key == key]
        for start in range(0, len(own) - size + 1, size):
            assert len(set(own[start : start + size])) == size


def test_epochs_of_a_set_differ_and_an_epoch_has_as_many_prompts_as_there_are_problems():
    ordered = schedule({"a": 30, "b": 10}, {"a": 0.5, "b": 0.5}, batch_size=6, iterations=None, epochs=2)
    assert (ordered.iterations, ordered.left_over_per_epoch) == (12, 0)
    of_b = [each.problem.id for each in islice(ordered, 40) if each.problem.set_key == "b"]
    assert sorted(of_b[:10]) == sorted(of_b[10:])
    assert of_b[:10] != of_b[10:]
    in_order = schedule({"a": 30, "b": 10}, {"a": 0.5, "b": 0.5}, shuffle=False)
    assert [each.problem.id for each in islice(in_order, 4)] == ["a/0", "b/0", "a/1", "b/1"]


def test_sets_without_shares_are_the_run_that_a_list_of_their_files_is(files):
    listed, sets = planned(files), planned([{"path": files[0]}, files[1]])
    told = [[(each.problem.id, each.token_ids.tolist()) for each in prompts(plan, 40)] for plan in (listed, sets)]
    assert told[0] == told[1]
    assert digest_of_prompts(listed) == digest_of_prompts(sets)


# --- what a set says of its problems ----------------------------------------------------------------------------------


def test_problems_have_the_category_and_the_instruction_of_their_set(files):
    plan = planned(by_domain(files, instruction="Write code."), "prompt.instruction=Think.")
    found = prompts(plan, BATCH)
    assert Counter(each.problem.set_key for each in found) == {"data.train.0": 6, "data.train.1": 2}
    for each in found:
        is_math = each.problem.set_key == "data.train.0"
        text = plan.renderer.text(each.problem)
        assert (each.problem.category == "math") == is_math
        assert ("Think." in text, "Write code." in text) == (is_math, not is_math)
        assert each.problem.id.startswith("1/" if is_math else "2/")


def test_training_on_choices_that_no_prompt_shows_is_warned_of(files, tmp_path):
    shown = {"problem": "a1+2b (A) 3 (B) 4", "options": ["3", "4"], "answer": "A"}
    rows = [{**shown, "problem": f"{i} {shown['problem']}"} for i in range(8)]
    rows[1]["problem"] = "a1+2b"
    set_of_choices = {"path": write(tmp_path, rows), "fields": {"choices": "options"}}
    plan = planned([files[0], set_of_choices], "training.iterations=4")
    (line,) = [line for line in plan.doubts if "choices" in line]
    said = "choices that are not in the problem stand in no prompt (write them into it): 1 of 8 rows, first row-2"
    assert line == f"data.train.1: {said}"


def test_the_teachers_text_has_the_instruction_of_the_set(files):
    own = '{template: student, text: "{instruction} {problem}", max_tokens: 128}'
    plan = planned(by_domain(files, instruction="Write code."), f"prompt.teacher={own}")
    shown = {
        each.problem.set_key: plan.teacher_renderers["teacher"].text(each.problem) for each in prompts(plan, BATCH)
    }
    assert "Write code." in shown["data.train.1"]
    assert "Write code." not in shown["data.train.0"]
    with pytest.raises(ConfigError, match=r"all 5 prompts of data\.train\.1 are longer, .*prompt\.teacher\.max_tokens"):
        planned(
            by_domain(files, instruction="Write code. " * 20), f"prompt.teacher={own}", "sampling.max_prompt_tokens=300"
        )


def test_a_set_that_a_server_judges_needs_no_answers_and_its_neighbour_does(files):
    Path(files[1]).write_text("".join(json.dumps({"problem": f"sort {i} numbers, in Python"}) + "\n" for i in range(5)))
    judge = {"kind": "http", "url": "http://127.0.0.1:1/judge"}
    plan = planned(by_domain(files, verifier=judge), "policy=grpo", "policy.samples=2")
    assert [len(each.problems) for each in plan.sets.values()] == [12, 5]
    with pytest.raises(DataError, match=r"code\.jsonl:1: no `answer`"):
        planned(by_domain(files), "policy=grpo", "policy.samples=2")


def test_a_policy_that_looks_for_boxes_is_refused_where_one_set_has_none(files):
    judge = {"kind": "http", "url": "http://127.0.0.1:1/judge"}
    planned(by_domain(files, verifier="math_verify"), "policy.skip_answer=true")
    with pytest.raises(ConfigError, match=r"^policy\.skip_answer=true: the verifier reads no box"):
        planned(by_domain(files, verifier=judge), "policy.skip_answer=true")


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ({"share": 0.5}, r"^data\.train: shares 0\.75, 0\.5 add up to 1\.25, and not to 1$"),
        ({"share": None}, r"^data\.train: set 1 has no share, and others have \(the first is set 0\): give all one"),
        ({"verifier": "unit_tests"}, r"^data\.train\.1\.verifier: no verifier called 'unit_tests'; known: boxed_match"),
        ({"path": "missing.jsonl"}, r"^data\.train\.1: cannot read missing\.jsonl: No such .*; paths count from /"),
        ({"shares": 1}, r"^data\.train\.1\.shares: unknown key; did you mean `share`\?$"),
        (
            {"verifier": {"kind": "http", "url": "http://127.0.0.1:1/j", "prices": {"request": 1}}},
            r"^data\.train\.1\.verifier\.prices: only what the run's own verifier costs counts: remove it$",
        ),
        (
            {"verifier": {"kind": "http", "url": "http://127.0.0.1:1/j", "api_key_env": "NO_SUCH_KEY"}},
            r"^data\.train\.1\.verifier: the environment variable NO_SUCH_KEY is not set$",
        ),
        (
            {"instruction": "so long " * 200},
            r"^sampling\.max_prompt_tokens=64: all 5 prompts of data\.train\.1 are longer, the instruction included",
        ),
    ],
)
def test_what_cannot_work_is_one_line_that_names_the_set(files, code, complaint):
    with pytest.raises((ConfigError, DataError), match=complaint) as refused:
        planned(by_domain(files, **code))
    assert "\n" not in str(refused.value)


def test_check_says_what_each_set_gives(files):
    config = configured(by_domain(files, verifier="math_verify", category="code"), "training.iterations=5")
    plan, screen = plan_training(config), Console(width=200, record=True, file=StringIO())
    show_run(screen, config, plan, Path("run"), check_files(config, plan, Path("run"), None, nodes=1))
    told = screen.export_text()
    rows = [line.split() for line in told.splitlines()]
    assert ["data.train.0", "12", "math", "boxed_match", "0.75", "30", "2.5"] in rows
    assert ["data.train.1", "5", "code", "math_verify", "0.25", "10", "2"] in rows
    assert "data.train.1: answers against themselves, by math_verify" in told


# --- a run that is continued ------------------------------------------------------------------------------------------


def test_a_resumed_run_keeps_shares_and_judges_and_may_ask_its_server_elsewhere(files):
    def config(verifier, share=0.25):
        code = {"path": files[1], "share": share, "verifier": verifier}
        return configured([{"path": files[0], "share": 1 - share}, code])

    judge = {"kind": "http", "url": "http://127.0.0.1:1/judge"}
    before = config(judge)
    assert config_from(parse_yaml(dump_yaml(before), "config.yaml")) == before
    check_same_numbers(before, config({**judge, "url": "http://127.0.0.1:2/judge", "requests_per_minute": 9}))
    with pytest.raises(ConfigError, match=r"^data\.train\.0\.share=0\.5: the run began with 0\.75"):
        check_same_numbers(before, config(judge, share=0.5))
    with pytest.raises(ConfigError, match=r"^data\.train\.1\.verifier\.kind=boxed_match: the run began with http"):
        check_same_numbers(before, config("boxed_match"))


def test_a_problem_that_changed_is_found_also_where_an_epoch_does_not_reach_it(files):
    train = [{"path": files[0], "share": 0.02}, {"path": files[1], "share": 0.98}]
    begun_with = digest_of_prompts(planned(train))
    lines = Path(files[0]).read_text().splitlines()
    changed = json.loads(lines[-1]) | {"answer": "77"}
    Path(files[0]).write_text("\n".join([*lines[:-1], json.dumps(changed)]) + "\n")
    with pytest.raises(DataError, match=r"data\.train has other problems"):
        check_same_prompts(begun_with, planned(train))
