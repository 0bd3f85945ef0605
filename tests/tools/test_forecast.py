"""`spot-async forecast`: what it asks of servers, what it says in words, and what it writes."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console
from run_files import Tags
from typer.testing import CliRunner

from spot_async.cli import app
from spot_async.config.loading import config_from
from spot_async.errors import BudgetSpentError, ConfigError, DataError, PermanentError
from spot_async.policies.spot import SpotPolicy
from spot_async.running.library import stages_for
from spot_async.spending.prices import Prices
from spot_async.testing.services import SimulatedStudent
from spot_async.testing.simulation import make_policy, simulated_prompts, simulated_services
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.tools.forecast.command import ForecastFile, check_output, read_forecast, write
from spot_async.tools.forecast.forecast import make_forecast
from spot_async.tools.forecast.measurement import (
    MeasuredPrompt,
    Measurement,
    PolicyKeys,
    ProbedCandidate,
    ProbedPosition,
)
from spot_async.tools.forecast.running import (
    ForecastOptions,
    ProbingPolicy,
    check_measurement,
    check_options,
    forecast_config,
    forecast_notes,
    measure_all,
    measured_settings,
)
from spot_async.tools.forecast.verdict import judge
from spot_async.tools.forecast.view import forecast_page, terminal_tables

ROOT = Path(__file__).parents[2]
KEYS = PolicyKeys(gamma=1.0, beta=1.0, positions=2, probe_top_k=4, probes=1, gate=True)
OPTIONS = ForecastOptions(prompts=8, rollouts=3, probes=5, limit_tokens=None, worth=0.01)
RUN = {
    "student": {"model": "s"},
    "teacher": {"model": "t"},
    "data": {"train": "d"},
    "policy": "spot",
    "training": {"iterations": 1, "batch_size": 64},
}


def measured_over(student, *, options=OPTIONS, at_once=3, prompts=8):
    """Measure simulated prompts on virtual time; return what came of it, the stages, and the progress."""
    policy = make_policy(SpotPolicy, probes=options.probes)
    needs = msgspec.structs.replace(policy.needs, rollouts_per_prompt=options.rollouts, teacher_responses=1)
    probing, progress = ProbingPolicy(policy, needs), []
    stages = stages_for(probing, simulated_services(needs, student=student))
    measuring = measure_all(
        probing, stages, list(simulated_prompts(prompts)), options,
        at_once=at_once, teacher_writes=True, on_prompt=lambda *done: progress.append(done),
    )  # fmt: skip
    return run_on_virtual_time(measuring), stages, progress


def test_positions_and_candidates_are_those_that_the_policy_itself_selects_and_probes():
    (measured_prompts, notes), stages, progress = measured_over(SimulatedStudent())
    alone = stages_for(make_policy(SpotPolicy), simulated_services(make_policy(SpotPolicy).needs))

    async def supervise(prompt):
        (sample,) = await make_policy(SpotPolicy).supervise(prompt, alone.for_prompt(prompt))
        return sample

    for prompt, measured in zip(simulated_prompts(8), measured_prompts, strict=True):
        sample = run_on_virtual_time(supervise(prompt))
        branches = sample.record["branches"]
        assert [each.position for each in measured.positions] == sample.record["selected_positions"]
        for position, branch in zip(measured.positions, branches, strict=True):
            tokens = [candidate["token"] for candidate in branch["candidates"]]
            assert [each.token for each in position.candidates] == tokens
            ids = [candidate["token_id"] for candidate in branch["candidates"]]
            assert [each.token_id for each in position.candidates] == ids
            assert [each.judged for each in position.candidates] == [OPTIONS.probes] * 4
            for each, candidate in zip(position.candidates, branch["candidates"], strict=True):
                first = candidate["verdicts"][0] == "correct"  # the run's own probe is one of the forecast's
                assert first <= each.correct <= first + OPTIONS.probes - 1
        assert len(measured.outcomes) == len(measured.rollout_tokens) == OPTIONS.rollouts
        assert measured.rollout_tokens[0] == len(sample.record["response_ids"])
        assert measured.prompt_ids == prompt.token_ids.tolist()
        assert measured.response_ids == sample.record["response_ids"].tolist()
        assert measured.teacher_outcome in (0.0, 1.0)
    assert stages.teacher_response.counters.completed == 8
    assert progress == [(done, 8) for done in range(1, 9)]
    assert notes == []


def test_a_budget_ends_the_measurement_and_what_was_measured_is_kept():
    options = ForecastOptions(prompts=8, rollouts=3, probes=5, limit_tokens=1, worth=0.01)
    (limited, notes), _, _ = measured_over(SimulatedStudent(), options=options, at_once=2)
    assert [each.problem_id for each in limited] == ["p0", "p1"]
    assert notes == ["2 of 8 prompts were measured within --limit-tokens 1"]

    class Broke(SimulatedStudent):
        asked = itertools.count()

        async def generate(self, *request, **more):
            if next(self.asked) > 200:
                raise BudgetSpentError("student.backend.budget is spent")
            return await super().generate(*request, **more)

    (spent, notes), _, _ = measured_over(Broke())
    assert 0 < len(spent) < 8
    assert "student.backend.budget is spent. Those with short responses finish first" in notes[0]


def test_a_prompt_whose_requests_fail_is_left_out_and_told_and_if_all_do_that_is_the_error():
    class Refusing(SimulatedStudent):
        refused = 9  # tokens of the prompt

        async def generate(self, prompt_ids, *request, **more):
            if len(prompt_ids) == self.refused or not self.refused:
                raise PermanentError("no")
            return await super().generate(prompt_ids, *request, **more)

    (found, notes), _, _ = measured_over(Refusing())
    assert [each.problem_id for each in found] == [f"p{n}" for n in range(8) if n != 4]
    assert notes == ["1 prompt left out, whose requests failed: no"]
    nobody = Refusing()
    nobody.refused = 0
    with pytest.raises(PermanentError, match="no"):
        measured_over(nobody)


def prompts_of(of_candidates, *, prompts=50, tokens=60, prior=(0.4, 0.3, 0.2, 0.1), probes=16, sampled="then", seed=0):
    """Return prompts as measured where candidates have these values (k,)."""
    random = np.random.default_rng(seed)

    def position(at):
        return ProbedPosition(
            position=at,
            sampled=sampled,
            score_parts={"score": 0.5 - at / 100, "mass": 0.99},
            candidates=[
                ProbedCandidate(
                    token=f"{sampled}{c}", teacher=p, student=0.25, prior=p,
                    correct=int(random.binomial(probes, value)), judged=probes,
                )
                for c, (p, value) in enumerate(zip(prior, of_candidates, strict=True))
            ],
        )  # fmt: skip

    return [
        MeasuredPrompt(
            problem_id=f"p{n}",
            prompt_tokens=10,
            rollout_tokens=[tokens] * 8,
            outcomes=[float(n % 8 == i) for i in range(8)],
            teacher_outcome=1.0,
            positions=[position(3), position(9)],
            probe_requests=2 * 4 * probes,
            probe_tokens=2 * 4 * probes * 20,
        )
        for n in range(prompts)
    ]


def forecast_of(of_candidates, keys=KEYS, **given):
    return make_forecast(prompts_of(of_candidates, **given), keys, rollouts=8, probes=16)


@pytest.mark.parametrize(
    ("of_candidates", "keys", "outcome", "said"),
    [
        ((0.1, 0.9, 0.1, 0.9), {}, "helps", "The candidates differ"),
        ((0.5, 0.5, 0.5, 0.5), {}, "cannot help", "The candidates hardly differ"),
        ((0.5, 0.5, 0.5, 0.5), {}, "cannot help", "No change that was tried would help for certain"),
        ((0.0, 0.0, 0.0, 0.0), {}, "cannot help", "no probe at 100 selected positions was correct, so B+ is empty"),
        ((0.1, 0.9, 0.1, 0.9), {"gamma": 0.0}, "cannot help", "policy.gamma=1 would help"),
        ((0.1, 0.9, 0.1, 0.9), {"beta": 0.001}, "cannot help", "beta T / M is 0.03"),
        ((0.1, 0.9, 0.1, 0.9), {"beta": 0.001}, "cannot help", "policy.beta=1.2 would help"),
        ((0.0, 0.1, 0.0, 0.0), {}, "unclear", "B+ keeps"),
        ((0.0, 0.1, 0.0, 0.0), {}, "unclear", "the gate withholds it where the student fails"),
        ((0.05, 0.06, 0.05, 0.06), {}, "cannot help", "--worth 0.01 asks for much here"),
    ],
)
def test_the_verdict_says_whether_it_helps_why_and_what_would_change_it(of_candidates, keys, outcome, said):
    worth = 0.01 if max(of_candidates) != 0.1 else 0.003
    found = judge(forecast_of(of_candidates, msgspec.structs.replace(KEYS, **keys)), worth)
    assert found.outcome == outcome, found
    assert said in " ".join([found.sentence, *found.reasons, *found.changes])


def test_without_positions_or_verdicts_it_says_so_and_gives_no_figure():
    empty = [msgspec.structs.replace(each, positions=[]) for each in prompts_of((0.5,) * 4)]
    found = make_forecast(empty, KEYS, rollouts=8, probes=16)
    assert judge(found, 0.01).sentence == "Unclear: no position was selected."
    assert found.figures["student_accuracy"].value == pytest.approx(1 / 8)
    unjudged = make_forecast(prompts_of((0.5,) * 4, probes=1), KEYS, rollouts=8, probes=1)
    assert "judged too few probes" in judge(unjudged, 0.01).sentence
    for each in (found, unjudged):
        forecast_page(file_of(each))


def test_figures_are_those_of_what_was_measured():
    prompts = prompts_of((0.0, 1.0, 0.0, 0.0), tokens=60)
    found = make_forecast(prompts, KEYS, rollouts=8, probes=16, prices=Prices(prompt=2.0, completion=4.0, request=0.5))
    shown = {name: None if each is None else round(each.value, 6) for name, each in found.figures.items()}
    tilted = 0.3 * np.e / (0.7 + 0.3 * np.e)
    expected = {
        "value": 0.3, "value_of_student": 0.25, "prior_gain": 0.05, "value_variance": 0.21,
        "kept_share": 1.0, "first_order_gain": 0.21, "gain": tilted - 0.3,
        "branch_weight": 30.0, "reach": 30 / 31, "settled_gain": 30 / 31 * (tilted - 0.3), "response_tokens": 60.0,
        "student_accuracy": 1 / 8, "student_pass": 1.0, "teacher_accuracy": 1.0, "headroom": 7 / 8,
        "mixed_groups": 1.0, "selected": 2.0, "probe_requests": 8.0, "probe_tokens": 160.0, "probe_share": 160 / 60,
        "probe_money": 8 * 0.5 + 1e-6 * (2.0 * 4 * (14 + 20) + 4.0 * 160),
    }  # fmt: skip
    assert shown == pytest.approx(expected, abs=2e-6)
    assert [row.value.value for row in found.by_teacher_rank] == pytest.approx([0.0, 1.0, 0.0, 0.0])
    assert (found.never_correct, found.always_correct) == (0, 0)
    assert [(row.token, row.positions) for row in found.tokens] == [("then", 100)]
    assert found.places[1] == found.places[3] == 50
    fewer = next(row for row in found.by_keys if row.changes == {"probe_top_k": 2})
    odds = 3 * np.e / 4
    assert fewer.gain.value == pytest.approx(odds / (1 + odds) - 3 / 7)  # of the first two, renormalised


def test_of_fewer_positions_those_of_the_best_scores_count():
    def swapped(prompt):
        worse = msgspec.structs.replace(prompt.positions[0], score_parts={"score": 0.1})
        return msgspec.structs.replace(prompt, positions=[worse, prompt.positions[1]])

    good, bad = prompts_of((0.0, 1.0, 0.0, 0.0)), prompts_of((0.5,) * 4)
    mixed = [
        swapped(msgspec.structs.replace(a, positions=[b.positions[0], a.positions[1]]))
        for a, b in zip(good, bad, strict=True)
    ]
    found = make_forecast(mixed, KEYS, rollouts=8, probes=16)
    one = next(row for row in found.by_keys if row.changes == {"positions": 1})
    assert one.gain.value > 1.9 * found.figures["gain"].value


def measurement_of(prompts, **changes):
    settings = measured_settings(forecast_config(config_from(RUN)))
    fields = {"when": "2026-11-23T12:00+00:00", "settings": settings, "keys": KEYS, "rollouts": 8, "probes": 16,
              "notes": [], "prompts": prompts}  # fmt: skip
    return Measurement(**{**fields, **changes})


def file_of(forecast, prompts=(), **changes):
    fields = {"name": "run", "overrides": [], "worth": 0.01, "notes": [], "verdict": judge(forecast, 0.01),
              "forecast": forecast, "measurement": measurement_of(list(prompts))}  # fmt: skip
    return ForecastFile(**{**fields, **changes})


def test_what_is_written_is_read_back_and_no_file_of_someone_else_is_written_over(tmp_path):
    prompts = prompts_of((0.1, 0.9, 0.1, 0.9))
    found = file_of(make_forecast(prompts, KEYS, rollouts=8, probes=16), prompts)
    path = tmp_path / "run.forecast.json"
    check_output(path)
    write(found, path, "page")
    assert read_forecast(path) == found
    assert path.with_suffix(".html").read_text() == "page"
    check_output(path)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(found, format=2)))
    with pytest.raises(DataError, match="has format 2, newer than this spot-async can read"):
        read_forecast(path)
    path.write_text("{}")
    for output, said in {
        path: "did not write it",
        tmp_path / "a.html": "name a .json",
        tmp_path / "no/a.json": "no directory",
    }.items():
        with pytest.raises(ConfigError, match=said):
            check_output(output)


def test_the_page_is_harmless_whatever_models_wrote_and_tables_fit_a_screen_of_80_columns():
    hostile = "<script>alert(1)</script>\x1b]0;owned\x07"
    found = forecast_of((0.1, 0.9, 0.1, 0.9), sampled=hostile)
    page = forecast_page(file_of(found, notes=[hostile]))
    assert {tag for tag, _ in Tags(page).tags}.isdisjoint({"script", "img", "iframe", "link"})
    assert "\x1b" not in page
    for title in (
        "Value by teacher's rank",
        "Gain a decision by gamma",
        "Which tokens are selected",
        "With other keys",
    ):
        assert title in Tags(page).text
    out = io.StringIO()
    for table in terminal_tables(found):
        Console(file=out, width=80).print(table)
    assert "…" not in out.getvalue()
    assert "gamma=4 beta=1.2" in out.getvalue()


def test_another_policy_and_ablations_are_forecast_as_spot_and_told():
    grpo = config_from({**RUN, "policy": "grpo", "training": {**RUN["training"], "reference_kl": 1e-3}})
    settings = forecast_config(grpo)
    assert (settings.policy.kind, settings.training.reference_kl) == ("spot", 0.0)
    assert "policy.kind=grpo" in forecast_notes(grpo)[0]
    ablated = config_from({**RUN, "policy": {"kind": "spot", "verifier_guidance": False, "gamma": 3.0}})
    assert forecast_config(ablated).policy.verifier_guidance
    assert forecast_config(ablated).policy.gamma == 3.0
    assert "verifier_guidance=false" in forecast_notes(ablated)[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policy": {"kind": "spot", "positions": 0}}, r"policy\.positions=0: such a run probes nothing"),
        ({"policy": {"kind": "spot", "probes": 5}}, r"--probes 5: must be above policy\.probes=5"),
        ({"teacher": {"model": "t", "cache": "c.sqlite", "replay": True}}, r"set teacher\.replay=false"),
    ],
)
def test_what_cannot_be_forecast_is_refused_before_anything_starts(changes, said):
    with pytest.raises(ConfigError, match=said):
        check_options(forecast_config(config_from({**RUN, **changes})), OPTIONS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policy": {"kind": "spot", "gamma": 4.0, "beta": 2.0, "probes": 2, "gate": False}}, None),
        ({"policy": {"kind": "spot", "positions": 1, "probe_top_k": 2}}, None),
        ({"policy": {"kind": "spot", "positions": 3}}, r"policy\.positions=3: only 2 were measured"),
        ({"policy": {"kind": "spot", "score_variant": "HG"}}, r"--from: measured with policy\.score_variant=Full"),
        ({"student": {"model": "other"}}, r"--from: measured with student\.model=s, and here it is other"),
        ({"policy": {"kind": "spot", "probes": 16}}, r"--probes 16: must be above policy\.probes=16"),
    ],
)
def test_an_earlier_measurement_serves_other_keys_but_nothing_that_decides_what_is_measured(changes, said):
    config = forecast_config(config_from({**RUN, **changes}))
    if said is None:
        check_measurement(config, measurement_of([]))
    else:
        with pytest.raises(ConfigError, match=said):
            check_measurement(config, measurement_of([]))


def test_tiers_have_figures_of_their_own():
    easy, hard = prompts_of((0.0, 1.0, 0.0, 0.0), prompts=20), prompts_of((0.0,) * 4, prompts=30)
    both = [*(msgspec.structs.replace(each, tier="easy") for each in easy),
            *(msgspec.structs.replace(each, tier="hard") for each in hard)]  # fmt: skip
    found = make_forecast(both, KEYS, rollouts=8, probes=16)
    alone = make_forecast(easy, KEYS, rollouts=8, probes=16)
    assert [(row.tier, row.prompts) for row in found.by_tier] == [("easy", 20), ("hard", 30)]
    assert found.by_tier[0].settled_gain == alone.figures["settled_gain"]
    assert found.by_tier[1].settled_gain.value == 0.0
    assert "By tier" in Tags(forecast_page(file_of(found))).text
    assert alone.by_tier == []


@pytest.mark.long
def test_forecast_measures_real_servers(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    output = tmp_path / "quickstart.forecast.json"
    options = ["--prompts", "6", "--rollouts", "2", "--probes", "3", "-o", str(output)]
    done = CliRunner().invoke(app, ["forecast", "configs/quickstart.yaml", *options])
    assert done.exit_code == 0, done.output
    found = read_forecast(output)
    assert (len(found.measurement.prompts), found.forecast.positions) == (6, 12)
    assert found.verdict.sentence in " ".join(done.output.split())
    assert "Gain a decision by gamma" in output.with_suffix(".html").read_text()

    other = ["forecast", "configs/quickstart.yaml", "policy.gamma=4", "--from", str(output), "-o"]
    done = CliRunner().invoke(app, [*other, str(tmp_path / "other.json")])
    assert done.exit_code == 0, done.output
    again = read_forecast(tmp_path / "other.json")
    assert again.measurement == found.measurement
    (same,) = (row for row in found.forecast.by_keys if row.changes == {"gamma": 4.0})
    assert again.forecast.figures["settled_gain"] == same.settled_gain
