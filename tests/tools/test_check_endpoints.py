"""Estimates of what a run asks of an endpoint, against what an endpoint counted."""

from __future__ import annotations

import dataclasses
import json
import re
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
from problem_files import FEW, write
from typer.testing import CliRunner

from spot_async.checks.plan import plan_training
from spot_async.cli import app
from spot_async.config.loading import load_config
from spot_async.tools.check.requirements import requirements, tokens
from spot_async.types import PolicyNeeds

ROOT = Path(__file__).parents[2]
SMALL = [
    FEW,
    "training.batch_size=8",
    "training.mini_batch_size=4",
    "training.warmup_iterations=0",
    "training.iterations=3",
    "evaluation=null",
]
PAID = {
    "kind": "openai",
    "url": "http://127.0.0.1:9",
    "requests_per_minute": 12,
    "tokens_per_minute": 6000,
    "prices": {"prompt": 2.0, "completion": 10.0, "request": 0.001, "currency": "EUR"},
}


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def configured(*overrides, **backend):
    backend = f"teacher.backend={json.dumps(PAID | backend)}"
    config = load_config(ROOT / "configs" / "quickstart.yaml", [backend, *SMALL, *overrides])
    return config, plan_training(config)


def endpoints(config, plan, earlier=None):
    return requirements(config, plan, Path("runs"), earlier).endpoints


def test_prompts_are_counted_exactly_and_responses_up_to_their_limit():
    config, plan = configured("policy=opd")
    (teacher,) = endpoints(config, plan)
    prompts = sum(len(prompt.token_ids) for prompt in islice(plan.schedule, 24))
    assert teacher.at_most.requests == 24
    assert teacher.at_most.used.prompt_tokens == prompts + 24 * 160
    assert teacher.expected.used.prompt_tokens == prompts + 24 * 80
    assert teacher.at_most.money == pytest.approx(24 * 0.001 + (2 * (prompts + 24 * 160) + 10 * 24) / 1e6)
    assert teacher.expected.minutes == pytest.approx(2.0)  # 24 requests at 12 a minute


def test_kd_pays_for_each_problem_once_and_for_writing():
    config, plan = configured("policy=kd", "training.iterations=50", "policy.forward_kl_weight=0")
    (teacher,) = endpoints(config, plan)
    assert teacher.at_most.requests == len(plan.problems)
    assert teacher.at_most.used.completion_tokens == len(plan.problems) * 160


def test_a_policy_that_trains_on_rollouts_and_on_what_the_teacher_writes_pays_for_both():
    """Such as GKD's, or speculative KD, which scores what both wrote in several rounds."""
    config, plan = configured("policy=kd", "training.iterations=50")
    needs = PolicyNeeds(teacher_top_k=4, teacher_responses=2, scores_per_prompt=3, rounds=2)
    plan = dataclasses.replace(plan, policy=SimpleNamespace(needs=needs))
    asked = plan.schedule.iterations * 8  # of each prompt, not of each problem
    (teacher,) = endpoints(config, plan)
    assert teacher.at_most.requests == asked * (2 + 2 * 3)
    found = tokens(config, plan, 100.0, 1.0)
    assert (found.rollouts, found.teacher_written) == (asked * 100, asked * 2 * 100)
    prompts = sum(len(prompt.token_ids) for prompt in islice(plan.schedule, asked))
    assert found.scored == pytest.approx(6 * (prompts + asked * 100))


@pytest.mark.parametrize(("policy", "questions"), [("opd", 24), ("spot", 24 * (1 + 2 * 4)), ("kd", 24)])
def test_a_verifier_behind_a_url_is_asked_about_each_response_and_probe(policy, questions):
    limits = {"requests_per_minute": 12, "prices": {"request": 0.5}}
    judge = json.dumps({"kind": "http", "url": "http://127.0.0.1:9/judge"} | limits)
    (_, verifier) = endpoints(*configured(f"policy={policy}", f"verifier={judge}"))
    assert verifier.at_most.requests == questions
    assert verifier.at_most.money == questions * 0.5
    assert verifier.at_most.minutes == pytest.approx(questions / 12)


def test_an_earlier_runs_responses_are_assumed(tmp_path):
    (tmp_path / "run.json").write_text('{"format": 1, "command": "train"}')
    rows = [{"iteration": n, "rollout/tokens": tokens} for n, tokens in ((1, 30.0), (2, 50.0))]
    write(tmp_path, rows, "metrics.jsonl")
    config, plan = configured("policy=opd")
    (teacher,) = endpoints(config, plan, tmp_path)
    prompts = sum(len(prompt.token_ids) for prompt in islice(plan.schedule, 24))
    assert teacher.expected.used.prompt_tokens == prompts + 24 * 40


def test_a_dry_run_shows_it_and_what_it_assumes(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    backend = f"teacher.backend={json.dumps(PAID | {'budget': 0.01})}"
    shown = CliRunner().invoke(app, ["train", "configs/quickstart.yaml", backend, *SMALL, "--dry-run"])
    assert shown.exit_code == 0, shown.output
    assert "minutes, at its limits" in shown.output
    assert "EUR" in shown.output
    assert "responses of 80 tokens, half of sampling.max_response_tokens=160" in shown.output
    assert "The budget of 0.01 EUR ends the run early" in shown.output
    config = load_config(ROOT / "configs" / "quickstart.yaml", [backend, *SMALL])
    (teacher,) = endpoints(config, plan_training(config), None)
    between = sum(each.money for each in (*teacher.start, teacher.expected, teacher.at_most)) / 2
    backend = f"teacher.backend={json.dumps(PAID | {'budget': between})}"
    shown = CliRunner().invoke(app, ["train", "configs/quickstart.yaml", backend, *SMALL, "--dry-run"])
    assert f"warning: The budget of {between:.10g} EUR may end the run early" in shown.output
    start = " ".join(f"{each.money:,.4g}" for each in teacher.start)
    assert f"EUR, the start before it {start}" in " ".join(shown.output.split())


def test_a_dry_run_of_batches_that_refill_says_at_least(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    backend = f"teacher.backend={json.dumps(PAID)}"
    command = ["train", "configs/quickstart.yaml", backend, *SMALL, "--dry-run"]
    plain, refills = (
        CliRunner().invoke(app, [*command, f"training.refill={flag}"]).output for flag in ("false", "true")
    )
    assert "3 iterations of 8 prompts" in plain
    assert "3 iterations of at least 8 prompts" in refills
    assert "at least" not in plain
    assert refills.count("training.refill has others besides, so it is at least so much") == 2  # tokens, and money


def test_a_budget_of_tokens_that_start_and_run_may_spend_is_named():
    config, plan = configured("policy=opd")
    (found,) = endpoints(config, plan)
    expected, most = (
        sum(each.used.tokens for each in pair)
        for pair in zip(found.start, (found.expected, found.at_most), strict=True)
    )
    for budget, ends in ((expected - 1, "ends"), (most - 1, "may end")):
        found.account.token_budget = budget
        assert found.early_ends == [f"The budget of {budget} tokens {ends} the run early"]
    found.account.token_budget = most
    assert found.early_ends == []


def test_an_evaluation_says_what_it_asks_for_at_most_and_what_that_costs(tmp_path):
    few = write(tmp_path, [{"id": str(n), "problem": f"a{n}b+2", "answer": n + 2} for n in range(5)])
    given = [f"evaluation.problems={few}", "evaluation.samples=3"]
    for backend in ({"kind": "local"}, PAID):
        words = ["eval", "configs/quickstart.yaml", *given, f"student.backend={json.dumps(backend)}", "--dry-run"]
        shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, words).output
        prompts = 3 * 5 * int(re.search(r"first prompt \((\d+) tokens\)", shown)[1])  # the others are as long
        line = f"15 responses: {prompts} prompt tokens, at most {15 * 160:,} generated"
        assert line in shown
    assert f"{line}, at most {2e-6 * prompts + 10e-6 * 15 * 160 + 15 * 0.001:.4g} EUR" in shown


def test_nothing_is_estimated_of_what_costs_nothing():
    config = load_config(ROOT / "configs" / "quickstart.yaml", SMALL)
    assert endpoints(config, plan_training(config)) == []


@pytest.mark.parametrize(
    ("policy", "rollouts", "probes", "written"),
    [("opd", 1, 0, 0), ("spot", 1, 2, 0), ("{kind: grpo, samples: 4}", 4, 0, 0), ("kd", 0, 0, 1)],
)
def test_tokens_of_a_run_are_counted_by_what_each_method_does(policy, rollouts, probes, written):
    config = load_config(ROOT / "configs" / "quickstart.yaml", [*SMALL, f"policy={policy}", "training.iterations=4"])
    plan = plan_training(config)
    found = tokens(config, plan, 100.0, 1.0)
    prompts = [len(prompt.token_ids) for prompt in islice(plan.schedule, 32)]
    needs, samples = plan.policy.needs, max(rollouts, 1)
    trained = samples * (sum(prompts) + 32 * 100)
    assert (found.rollouts, found.trained, found.evaluations) == (rollouts * 32 * 100, trained, 0)
    assert found.probes == 32 * needs.probes_per_prompt * 50
    assert (needs.probes_per_prompt > 0) == (probes > 0)
    problems = 32 if written else 0  # each of them once, and 32 of 180 in this order
    assert found.teacher_written == problems * 100
    scored = needs.teacher_top_k > 0 or needs.reference
    assert found.scored == scored * trained


def test_a_prompt_of_the_teachers_own_is_paid_for_and_trained_on_by_nobody():
    own = "prompt.teacher={text: '{problem} so {problem}', max_tokens: 100}"
    config, plan = configured("policy=opd", own)
    prompts = list(islice(plan.schedule, 24))
    read = sum(len(prompt.teacher_ids) for prompt in prompts)
    students = sum(len(prompt.token_ids) for prompt in prompts)
    assert read > 1.5 * students
    (teacher,) = endpoints(config, plan)
    assert teacher.at_most.used.prompt_tokens == read + 24 * 160
    found = tokens(config, plan, 100.0, 1.0)
    assert (found.scored, found.trained) == pytest.approx((read + 24 * 100, students + 24 * 100))
