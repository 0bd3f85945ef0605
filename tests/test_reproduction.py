"""The plan of docs/reproduction.md as `make reproduction` runs it."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from spot_async.config.loading import load_config
from spot_async.tools.forecast.measurement import MeasuredPrompt, ProbedCandidate, ProbedPosition

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def plan():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("reproduction_tables")
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.parametrize("setting", ["choice", "knowledge", "running-sum"])
def test_every_row_is_a_configuration_that_train_takes(plan, setting):
    rows, reproduction = importlib.import_module("reproduction_rows"), importlib.import_module("reproduction")
    for row in rows.SETTINGS[setting].rows:
        config = load_config(ROOT / rows.SETTINGS[setting].config, reproduction.overrides(row.keys))
        assert config.training.batch_size == row.prompts


def test_every_hypothesis_names_rows_that_have_all_seeds(plan):
    rows = importlib.import_module("reproduction_rows")
    seeds = {(setting.name, row.name): row.seeds for setting in rows.SETTINGS.values() for row in setting.rows}
    for each in plan.HYPOTHESES:
        assert seeds[each.setting, each.more] == seeds[each.setting, each.less] == 8


def test_the_bootstrap_has_the_error_of_both_problems_and_seeds(plan):
    random = np.random.default_rng(0)
    problem_effect, seed_effect = random.normal(0, 1, 400), random.normal(0, 0.2, 8)
    strata = np.repeat([0, 1], 200)
    draws = plan.bootstrap(problem_effect[None] + seed_effect[:, None] + 5 * strata, strata)
    within = np.mean([problem_effect[strata == each].var() for each in (0, 1)]) / 400
    assert draws.std() == pytest.approx((within + seed_effect.var() / 8) ** 0.5, rel=0.05)
    assert draws.mean() == pytest.approx((problem_effect.mean() + seed_effect.mean() + 2.5), abs=0.01)


@pytest.mark.parametrize(
    ("setting", "problem", "tokens", "place"),
    [("running-sum", "a19b-2c-6d+8", ("one ", "two ", "three "), "easy"), ("choice", "7caf", ("W", "X", "Y"), "a")],
)
def test_the_gain_observed_is_that_of_choices_on_the_values_that_were_measured(plan, setting, problem, tokens, place):
    rows = importlib.import_module("reproduction_rows")
    candidates = [
        ProbedCandidate(token=token, teacher=0.3, prior=0.3, correct=correct, judged=8)
        for token, correct in zip((*tokens, "a"), (1, 2, 6, 8), strict=True)
    ]
    position = ProbedPosition(position=7, sampled=tokens[1], candidates=candidates)
    prompt = MeasuredPrompt(
        problem_id="p", tier="easy", prompt_tokens=4, rollout_tokens=[9], outcomes=[1.0], positions=[position],
        probe_requests=4, probe_tokens=9,
    )  # fmt: skip
    measured = plan.decisions(rows.SETTINGS[setting], prompt, problem)
    worst, best = tokens[0].strip(), tokens[2].strip()
    opd, row = ({"choices": {"10": {place: shares}}} for shares in ({worst: 4}, {worst: 2, best: 2}))
    assert plan.observed_gain(measured, row, opd) == pytest.approx((6 - 1) / 8 / 2)


def test_accuracy_is_gained_a_decision(plan):
    rows = importlib.import_module("reproduction_rows")
    opd, row = (
        {"choices": {"10": {"a": {"W": 96, "X": 32}}}, "evaluation": {"samples": 8, "correct": {"p": right}}}
        for right in (2, 6)
    )
    assert plan.accuracy_gain(rows.SETTINGS["choice"], row, opd) == pytest.approx((6 - 2) / 8 / 2)  # 128 of 64 prompts
