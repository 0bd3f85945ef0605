"""A policy is rehearsed before anything starts: what that finds, what it cannot see, and that it harms no run."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import faulty_policies
import pytest
import structlog
from command import error_lines, invoke
from problem_files import FEW
from recipes import NAMES, RECIPES

from spot_async.base import wire
from spot_async.checks.plan import plan_training
from spot_async.config.loading import load_config
from spot_async.errors import ConfigError
from spot_async.running import rehearsal
from spot_async.running.rehearsal import rehearse
from spot_async.testing import virtual_time

ROOT = Path(__file__).parents[2]
SOURCE = Path(faulty_policies.__file__)


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(RECIPES))


def keys(fault: str) -> list[str]:
    return [FEW, f"policy={{kind: 'faulty_policies:{fault}'}}", "evaluation=null", "training.warmup_iterations=0"]


def rehearsed(fault: str, *overrides: str) -> list[str]:
    config = load_config(Path("configs/quickstart.yaml"), [*keys(fault), *overrides])
    return rehearse(config, plan_training(config))


def line_of(fault: str) -> str:
    """Return where the fault lies: the first line that says so, from its class on."""
    lines = SOURCE.read_text().splitlines()
    first = lines.index(f"class {fault}(Whole):")
    return f", at {SOURCE}:{next(n for n, line in enumerate(lines, 1) if n > first and line.endswith('# at fault'))}"


TEN = [
    ("WrongAttribute", "policy WrongAttribute.supervise raised AttributeError: 'TokenScores' object has no", True),
    ("ChangedInPlace", "policy ChangedInPlace.supervise raised AttributeError: immutable type: 'Supervision'", True),
    ("AsksUnstated", "policy AsksUnstated.supervise: the policy asks for what its needs do not state: reference", True),
    ("AsksTwice", "asks rollout for 2 answers of a prompt at once, and its needs state 1: set PolicyNeeds.roll", True),
    ("WrongTarget", "soft_targets.probabilities and tails do not sum to 1", False),
    ("IndexInRevise", "policy IndexInRevise.revise raised IndexError: tuple index out of range", True),
    ("Impure", "policy Impure.revise gave other terms when it was asked once more: it must be a pure function", False),
    ("ChangesResponse", "policy ChangesResponse.revise changed response_ids of ", False),
    ("NeedsTooMuch", "policy.kind=faulty_policies:NeedsTooMuch: its top-k=100: lower it to 48, which is how", False),
    ("StatesTooLittle", "more than its needs state: raise PolicyNeeds.term_bytes_per_token by as many", False),
]
MORE = [
    ("ChangedArray", "raised ValueError: assignment destination is read-only", True),
    ("ForgetsAwait", "policy ForgetsAwait.supervise raised AttributeError: 'coroutine' object has no attribute", True),
    ("MasksNoForeign", "have a policy term, and no student sampled them: set policy_mask to false there", False),
    ("DividesByNothing", "is wrong: advantages hold what is no finite number", False),
]


@pytest.mark.parametrize(("fault", "said", "has_line"), [*TEN, *MORE])
def test_a_fault_is_found_before_a_server_starts_by_the_line_of_the_run(fault: str, said: str, has_line: bool) -> None:
    with pytest.raises(ConfigError) as refused:
        rehearsed(fault)
    line = str(refused.value)
    assert said in line
    assert "\n" not in line
    assert not has_line or line_of(fault) in line


@pytest.mark.parametrize(
    "given", [["KnowsTwoVerdicts"], ["KnowsShortResponses"], ["WrongAttribute", "run.rehearsal=false"]]
)
def test_what_it_cannot_see_and_what_a_key_leaves_out(given: list[str]) -> None:
    """Verdicts other than right and wrong, and responses longer than twelve tokens."""
    assert rehearsed(*given) == []


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("WaitsForSocket", "it waits for something that is no stage, or without end"),
        ("WaitsForOthers", "it waits for something that is no stage, or without end"),
        ("Polls", "it waits for something that is no stage, or without end"),
        ("AsksForEver", "it waits for something that is no stage, or without end"),
        ("TeachesNothing", "none of its samples was trained on"),
        ("WantsLongResponses", "sampling.max_response_tokens: at least 100"),
    ],
)
def test_one_that_cannot_be_rehearsed_is_told_so_in_a_line_and_may_run(
    fault: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "LONGEST_S", 3.0)
    monkeypatch.setattr(virtual_time, "MOST_TURNS", 1000)
    (line,) = rehearsed(fault)
    assert line.startswith(f"policy {fault} was not rehearsed: {why}")


@pytest.mark.parametrize(
    ("policy", "what"),
    [
        ("FrozenTopK", "asks for the student's log-probabilities of other tokens than it sampled"),
        ("FrozenCandidates", "asks for the student's log-probabilities of other tokens than it sampled"),
        ("FrozenDifference", "gives each token an advantage of its own beside a teacher"),
        ("FrozenReward", ""),
        ("Frozen", ""),
        ("RevisedTopK", ""),
    ],
)
def test_one_that_freezes_numbers_of_the_student_is_told_where_if_they_grow_old(policy: str, what: str) -> None:
    line = next(n for n, each in enumerate(SOURCE.read_text().splitlines(), 1) if each.endswith("# told of"))
    told = rehearsed(policy, "max_staleness=1")
    assert [each.partition(". ")[0] for each in told] == (
        [f"policy {policy} {what}, at {SOURCE}:{line}"] if what else []
    )
    assert rehearsed(policy) == []


def test_two_rehearsals_are_equal_and_of_policies_of_their_own_on_the_runs_first_prompts() -> None:
    config = load_config(Path("configs/quickstart.yaml"), [*keys("Remembers"), "max_staleness=1"])
    plan = plan_training(config)
    faulty_policies.Remembers.asked.clear()
    assert rehearse(config, plan) == rehearse(config, plan) == []
    first, second = faulty_policies.Remembers.asked
    assert plan.policy not in (first, second)
    assert wire.encode(first.seen) == wire.encode(second.seen)
    of_run = [prompt.token_ids.tolist() for prompt in itertools.islice(plan.schedule, 8)]
    assert sorted(each.prompt_ids.tolist() for each in first.seen) == sorted(of_run)
    assert max(len(each.response_ids) for each in first.seen) == 12
    assert {bool(each.response_ids[-1] in plan.stop_token_ids) for each in first.seen} == {True, False}


def test_the_runs_verifier_is_not_made_and_what_is_logged_goes_where_it_went() -> None:
    before = structlog.is_configured(), structlog.get_config()
    assert rehearsed("Whole", "verifier={kind: 'faulty_policies:NeverAsked'}") == []
    assert (structlog.is_configured(), structlog.get_config()) == before


@pytest.mark.parametrize("command", [["train"], ["train", "--dry-run"], ["check", "--no-servers"], ["check"]], ids=str)
def test_every_command_that_plans_a_run_refuses_it_in_one_line(command: Any, monkeypatch: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = [command[0], "configs/quickstart.yaml", *keys("IndexInRevise"), f"run.directory={run}", *command[1:]]
    done = invoke(monkeypatch, *given)
    assert done.exit_code == 2
    (line,) = error_lines(done.stderr)
    assert "policy IndexInRevise.revise raised IndexError: " in line
    assert "run.rehearsal=false" in line
    assert "Traceback" in done.stderr  # for its author
    assert not run.exists()


def test_train_says_why_it_rehearsed_nothing_and_leaves_shipped_policies_to_check(monkeypatch: Any) -> None:
    said = invoke(monkeypatch, "train", "configs/quickstart.yaml", *keys("TeachesNothing"), "--dry-run")
    assert "policy TeachesNothing was not rehearsed: none of its samples was trained on" in said.stdout
    asked, usual = [], rehearsal.make_run
    monkeypatch.setattr(rehearsal, "make_run", lambda policy, **given: asked.append(policy) or usual(policy, **given))
    for words in (["train", "--dry-run"], ["check", "--no-servers"]):
        assert not asked
        assert invoke(monkeypatch, words[0], "configs/quickstart.yaml", FEW, *words[1:]).exit_code == 0
    assert len(asked) == 1


def test_a_revise_that_never_ends_is_refused_in_its_line_and_keeps_no_process(tmp_path: Path) -> None:
    given = [*keys("NeverRevises"), f"run.directory={tmp_path / 'run'}", "training.step_timeout_s=1"]
    where = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(SOURCE.parent)])}
    ended = subprocess.run(
        [sys.executable, "-m", "spot_async", "train", "configs/quickstart.yaml", *given],
        env=where, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "policy NeverRevises.revise took longer than training.step_timeout_s=1: raise that" in ended.stderr
    assert not (tmp_path / "run").exists()


def test_a_program_is_refused_too(tmp_path: Path) -> None:
    import spot_async

    with pytest.raises(ConfigError, match=r"policy Impure\.revise gave other terms"):
        spot_async.run("configs/quickstart.yaml", [*keys("Impure"), f"run.directory={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


CONFIGS = [*(f"configs/running_sum/{kind}.yaml" for kind in ("opd", "eopd", "grpo", "kd", "spot"))]


@pytest.mark.parametrize("max_staleness", [pytest.param(0, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("path", [*CONFIGS, *(f"examples/recipes/{name}.yaml" for name in NAMES)])
def test_no_policy_or_recipe_is_refused(path: str, max_staleness: int, few_problems: Path) -> None:
    """Nor where the teacher's softmax is wider than what both models know."""
    key = "data.train.path" if "fields:" in Path(path).read_text() else "data.train"
    given = [f"{key}={few_problems}", f"max_staleness={max_staleness}", "training.batch_size=16"]
    config = load_config(Path(path), [*given, "training.mini_batch_size=16"])
    plan = plan_training(config)
    said = rehearse(config, plan, shipped=True)
    wider = {role: dataclasses.replace(each, vocab_size=64) for role, each in plan.teachers.items()}
    plan = dataclasses.replace(plan, teachers=wider, frozen={**plan.frozen, **wider})
    said += rehearse(config, plan, shipped=True)
    assert not [line for line in said if "was not rehearsed" in line]
