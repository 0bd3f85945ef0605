"""The plan of experiments/mechanism as `make reproduction` runs it."""

import importlib
import json
import re
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from spot_async.config.loading import load_config

ROOT = Path(__file__).parents[1]
EXPERIMENT = ROOT / "experiments" / "mechanism"


@pytest.fixture(scope="module")
def plan():
    sys.path.insert(0, str(EXPERIMENT))
    yield importlib.import_module("tables")
    sys.path.remove(str(EXPERIMENT))


@pytest.mark.parametrize(
    "setting",
    [
        *("choice", "knowledge", "running-sum", "where-choice", "where-knowledge", "where-running-sum", "where-self"),
        *("pilot-choice", "pilot-knowledge", "pilot-running-sum", "pilot-self"),
    ],
)
def test_every_row_is_a_configuration_that_train_takes(plan, setting):
    rows, run = importlib.import_module("rows"), importlib.import_module("run")
    for row in rows.SETTINGS[setting].rows:
        config = load_config(ROOT / rows.SETTINGS[setting].config, run.overrides(row.keys))
        assert config.training.batch_size == row.prompts


@pytest.mark.parametrize("row", ["one", "routed", "average"])
def test_every_row_of_the_teachers_is_a_configuration_that_train_takes(row):
    config = load_config(ROOT / "experiments" / "teachers" / f"{row}.yaml")
    assert (config.route is not None) == (row == "routed")
    assert sorted(config.teachers) == ([] if row == "one" else ["long", "short"])


def test_the_pilot_chooses_by_the_rule_that_was_written_before_it(plan, tmp_path, capsys):
    pilot, rows = importlib.import_module("pilot"), importlib.import_module("rows")
    assert sum(len(setting.rows) * len(rows.PILOT_SEEDS) for setting in rows.PILOT) == 96

    def write(setting, row, right):
        """Two problems with two responses each, of which so many are right."""
        of = {"samples": 8, "correct": dict(zip(("a", "b"), right, strict=True)), "mean_tokens": 1.0}
        for seed in rows.PILOT_SEEDS:
            path = tmp_path / "records" / setting / f"{row}-seed-{seed}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"row": row, "seed": seed, "evaluation": of}))

    for setting in rows.PILOT:
        for row in setting.rows:
            write(setting.name, row.name, (4, 1))
    for setting, (first, second) in zip(rows.PILOT, [(5, 6), (5, 6), (5, 6), (8, 5)], strict=True):
        write(setting.name, "alpha 0.8, gamma 4", (first, 2))
        write(setting.name, "alpha 0.5, gamma 1", (second, 2))  # better in three settings of four
    write("pilot-choice", "alpha 1, gamma 4", (8, 0))  # best there, and solves one problem of two
    write("pilot-self", "alpha 0, gamma 4, beta x 4", (8, 8))
    pilot.write_pilot(tmp_path, rows.PILOT)
    said = capsys.readouterr().out
    assert "Chosen: **alpha 0.5, gamma 1**" in said
    assert "| alpha 1, gamma 4 | out | 50.0 |" in said
    assert "| alpha 0.5, gamma 1 | 1.25 | 0.0 |" in said
    assert said.rstrip().endswith("Chosen: **alpha 0, gamma 4, beta x 4**")
    for setting in rows.PILOT:  # each loses something somewhere: the least loss stays
        for loss in rows.WITH_BASELINE:
            write(setting.name, loss.row, (8, 0))
    write("pilot-self", "alpha 0, gamma 1", (4, 0))
    (tmp_path / "records" / "pilot-self" / "alpha 0, gamma 1-seed-0.json").unlink()
    pilot.write_pilot(tmp_path, rows.PILOT)
    assert "1 runs are missing: nothing is chosen yet." in capsys.readouterr().out
    write("pilot-self", "alpha 0, gamma 1", (4, 1))
    pilot.write_pilot(tmp_path, rows.PILOT)
    assert "Chosen: **alpha 0.5, gamma 1**" in capsys.readouterr().out  # all are equal: nearest to the paper


def test_every_hypothesis_names_rows_that_have_all_seeds(plan):
    rows = importlib.import_module("rows")
    seeds = {(setting.name, row.name): row.seeds for setting in rows.SETTINGS.values() for row in setting.rows}
    for each in plan.HYPOTHESES:
        assert {seeds.get((each.setting, row), 0) for row in {each.more, each.less} - {"base"}} == {8}


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
    rows, forecasts = importlib.import_module("rows"), importlib.import_module("forecasts")
    candidates = [
        forecasts.ProbedCandidate(token=token, token_id=0, correct=correct, judged=8)
        for token, correct in zip((*tokens, "a"), (1, 2, 6, 8), strict=True)
    ]
    position = forecasts.ProbedPosition(position=7, sampled=tokens[1], candidates=candidates)
    prompt = forecasts.MeasuredPrompt(
        problem_id="p", tier="easy", prompt_tokens=4, prompt_ids=[], response_ids=[], positions=[position]
    )
    measured = plan.decisions(rows.SETTINGS[setting], prompt, problem)
    worst, best = tokens[0].strip(), tokens[2].strip()
    opd, row = ({"choices": {"10": {place: shares}}} for shares in ({worst: 4}, {worst: 2, best: 2}))
    assert plan.observed_gain(measured, row, opd) == pytest.approx((6 - 1) / 8 / 2)


@pytest.mark.parametrize(("archive", "settings"), [("records", 3), ("part-three", 4)])
def test_stored_forecasts_are_read(plan, tmp_path, archive, settings):
    rows, forecasts = importlib.import_module("rows"), importlib.import_module("forecasts")
    with tarfile.open(EXPERIMENT / "results" / f"{archive}.tar.gz") as file:
        names = [each for each in file.getmembers() if re.fullmatch(r"forecasts/.*\.json", each.name)]
        file.extractall(tmp_path, names, filter="data")
    part = rows.PART_TWO if archive == "records" else rows.PART_THREE
    of_settings = [forecasts.read_forecast(tmp_path, each.name) for each in part]
    assert all(each.prompts for each in of_settings)
    of_rows = [forecasts.read_forecast(tmp_path, each.name, row.name) for each in part for row in each.rows]
    assert sum(each is not None for each in of_rows) == len(names) - settings
    assert forecasts.read_forecast(tmp_path, "nothing") is None


def test_accuracy_is_gained_a_decision(plan):
    rows = importlib.import_module("rows")
    opd, row = (
        {"choices": {"10": {"a": {"W": 96, "X": 32}}}, "evaluation": {"samples": 8, "correct": {"p": right}}}
        for right in (2, 6)
    )
    assert plan.accuracy_gain(rows.SETTINGS["choice"], row, opd) == pytest.approx((6 - 2) / 8 / 2)  # 128 of 64 prompts


def test_choices_are_worth_what_the_model_makes_of_them_in_their_contexts(plan):
    values, forecasts = importlib.import_module("values"), importlib.import_module("forecasts")
    student = EXPERIMENT / "relay" / "student"
    prompt_ids, response_ids = [3, 9, 8], [30, 18, 5, 10]
    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float64).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt_ids + response_ids])).logits[0]
    expected = 0.0
    positions = []
    for position in (1, 3):
        correct = {18: 4, 21: 0, 19: 2}
        chances = logits[len(prompt_ids) + position - 1].exp()
        expected += sum(float(chances[token]) * right / 8 for token, right in correct.items()) / float(
            chances[list(correct)].sum()
        )
        candidates = [
            forecasts.ProbedCandidate(token="", token_id=token, correct=right, judged=8)
            for token, right in correct.items()
        ]
        positions.append(forecasts.ProbedPosition(position=position, sampled="W", candidates=candidates))
    prompt = forecasts.MeasuredPrompt(
        problem_id="p", prompt_tokens=3, prompt_ids=prompt_ids, response_ids=response_ids, positions=positions
    )
    assert values.decision_value(student, [prompt]) == pytest.approx(expected / 2, abs=1e-6)


def test_a_relay_students_facts_and_methods_are_those_measured_when_it_was_made(plan):
    learned = importlib.import_module("learned")
    student, peer = (learned.knowledge_of(EXPERIMENT / "relay" / name) for name in ("student", "peer"))
    # experiments/mechanism/relay/README.md
    np.testing.assert_allclose(student.facts, [0.777, 0.589, 0.391, 0.243], atol=0.03)
    np.testing.assert_allclose(student.methods, [0.25] * 4, atol=0.02)
    half = learned.Knowledge(np.array([1.0, 0.5, 0.0, 0.0]), np.array([0.5, 0.25, 0.25, 0.0]))
    assert half.step_value == pytest.approx(0.5 + 0.25 * 0.5**3)
    assert peer.facts[0] == pytest.approx(student.facts[0], abs=0.02)


def test_pictures_name_rows_once_and_mark_where_they_were_expected_to_end(plan, tmp_path):
    pytest.importorskip("matplotlib")
    pictures = importlib.import_module("pictures")
    curves = {"OPD": [(10, 4.0), (20, 4.1)], "SPOT": [(10, 4.0), (20, 4.6)], "EOPD": [(10, 3.9)], "KD": [(10, 3.8)]}
    panel = plan.Panel("choice", curves, {"OPD", "SPOT"}, {"SPOT": (4.5, 0.1)})
    for name in ("first.svg", "again.svg"):
        pictures.write_panels(tmp_path / name, [panel], x_name="iteration", y_name="percent")
    drawn = (tmp_path / "first.svg").read_text()
    assert (tmp_path / "again.svg").read_text() == drawn
    for label in ("OPD", "SPOT", "SPOT, forecast", "other rows"):
        assert drawn.count(f">{label}<") == 1
    assert ">KD<" not in drawn
