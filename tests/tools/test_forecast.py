"""`spot-async forecast`: what it asks of servers, what it says in words, and what it writes."""

from __future__ import annotations

import dataclasses
import io
import itertools
from pathlib import Path

import msgspec
import numpy as np
import pytest
from command import QUICKSTART
from rich.console import Console
from run_files import Tags
from typer.testing import CliRunner

from spot_async.cli import app
from spot_async.config.loading import config_from
from spot_async.errors import BudgetSpentError, ConfigError, DataError, PermanentError
from spot_async.policies.spot import SpotPolicy
from spot_async.running.library import stages_for
from spot_async.spending.prices import Prices
from spot_async.telemetry.outcome_slope import RatioSums, ratio_sums
from spot_async.testing.services import SimulatedStudent
from spot_async.testing.simulation import make_policy, simulated_prompts, simulated_services, simulated_vocabulary
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.tools.forecast.command import ForecastFile, check_output, read_forecast, show
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
from spot_async.tools.forecast.verdict import default_worth, judge
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


def measured_over(student, *, options=OPTIONS, at_once=3, prompts=8, vocabulary=None, **keys):
    """Measure simulated prompts on virtual time; return what came of it, the stages, and the progress."""
    policy = make_policy(SpotPolicy, probes=options.probes, **keys)
    needs = msgspec.structs.replace(
        policy.needs,
        rollouts_per_prompt=options.rollouts,
        scores_per_prompt=options.rollouts,
        teacher_responses=1,
    )
    probing, progress = ProbingPolicy(policy, needs), []
    vocabulary = vocabulary or simulated_vocabulary()
    stages = stages_for(probing, simulated_services(needs, student=student, vocabulary=vocabulary))
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
        assert [each.tokens for each in measured.scored] == measured.rollout_tokens
        differences = sample.record["teacher_logprobs"].astype(float) - sample.record["behavior_logprobs"]
        assert measured.scored[0].excess == pytest.approx(
            np.minimum(np.exp(differences), 10.0).sum() - len(differences)
        )
        assert measured.prompt_ids == prompt.token_ids.tolist()
        assert measured.response_ids == sample.record["response_ids"].tolist()
        assert measured.teacher_outcome in (0.0, 1.0)
    assert stages.teacher().response.counters.completed == 8
    assert stages.teacher().score.counters.completed == 8 * OPTIONS.rollouts
    assert progress == [(done, 8) for done in range(1, 9)]
    assert notes == []


def test_random_positions_are_compared_by_what_other_rules_would_see_and_told_apart_where_the_answer_is():
    boxes = simulated_vocabulary(text=lambda token_id: rf"\boxed{{{token_id}}}" if token_id % 8 == 5 else str(token_id))
    (prompts, _), _, _ = measured_over(SimulatedStudent(), vocabulary=boxes, selection="random", positions=8)
    for prompt in prompts:
        last = max((at for at, token_id in enumerate(prompt.response_ids) if token_id % 8 == 5), default=64)
        assert [each.in_answer for each in prompt.positions] == [each.position >= last for each in prompt.positions]
    assert {each.in_answer for prompt in prompts for each in prompt.positions} == {True, False}
    keys = msgspec.structs.replace(KEYS, selection="random", positions=8)
    forecast = make_forecast(prompts, keys, rollouts=OPTIONS.rollouts, probes=OPTIONS.probes)
    found = forecast.figures
    assert "of random positions, which may be chance." in " ".join(judge(forecast, 0.01).reasons)  # of 8 prompts
    assert None not in (found["over_random"], found["over_JS"], found["over_entropy"], found["over_earliest"])
    assert None not in (found["at_oracle"], found["agreed_share"], found["answer_share"])


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


def prompts_of(
    of_candidates,
    *,
    prompts=50,
    tokens=60,
    prior=(0.4, 0.3, 0.2, 0.1),
    probes=16,
    sampled="then",
    advice=lambda n: 0.0,
    seed=0,
):
    """Return prompts as measured where candidates have these values (k,).

    `advice(n)` is how much more the teacher likes the one right rollout of problem n than the others.
    """
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
            scored=[RatioSums(tokens, 0.0, advice(n) * (n % 8 == i), agreed=0, capped=3) for i in range(8)],
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
    ],
)
def test_the_verdict_says_whether_it_helps_why_and_what_would_change_it(of_candidates, keys, outcome, said):
    worth = 0.01 if max(of_candidates) != 0.1 else 0.003
    found = judge(forecast_of(of_candidates, msgspec.structs.replace(KEYS, **keys)), worth)
    assert found.outcome == outcome, found
    assert said in " ".join([found.sentence, *found.reasons, *found.changes])


@pytest.mark.parametrize(
    ("advice", "gamma", "said"),
    [
        (
            lambda n: 2.0 + n % 2,
            1.0,
            "OPD alone gains 31 ± 2.4 points a response to first order, and SPOT's tilt adds 42",
        ),
        (lambda n: 2.0, 0.1, "The tilt is the smaller part: compare with policy.kind=opd, which needs no probes."),
        (lambda n: -2.0, 1.0, "this teacher's advice does not point to right answers"),
        (lambda n: (2.0, -1.0)[n % 2], 1.0, "which could be none. With about 58 --prompts it would be clear."),
        (lambda n: 0.0, 1.0, "which could be none. The two lie too close together"),
    ],
)
def test_the_verdict_says_what_opd_alone_gains_and_which_of_the_two_to_take(advice, gamma, said):
    prompts = prompts_of((0.0, 1.0, 0.0, 0.0), prompts=8, advice=advice)
    found = make_forecast(prompts, msgspec.structs.replace(KEYS, gamma=gamma), rollouts=8, probes=16)
    assert said in judge(found, 0.01).reasons[0]


@pytest.mark.parametrize(
    ("of_score", "of_entropy", "said"),
    [
        ([9, 8, 1, 1], [1, 9, 1, 8], ["Best scores hold 2.0 times the Var_p(V) of random positions."]),
        ([1, 1, 8, 9], [1, 8, 9, 1], ["Those by entropy or earliest hold more than those by score"]),
        ([0.002, 0.001, 0, 0], [1, 9, 1, 8], ["100% of it lies where teacher and student agree"]),
    ],
)
def test_the_verdict_says_where_to_probe_after_random_positions_were(of_score, of_entropy, said):
    differ, equal = prompts_of((0.0, 1.0, 0.0, 0.0)), prompts_of((0.5,) * 4)

    def at(position, place):
        parts = {"score": of_score[place], "entropy": of_entropy[place], "divergence": of_score[place]}
        return msgspec.structs.replace(position, position=place, score_parts=parts)

    prompts = [
        msgspec.structs.replace(
            a, positions=[at(each, place) for place, each in enumerate([*a.positions, *b.positions])]
        )
        for a, b in zip(differ, equal, strict=True)
    ]
    keys = msgspec.structs.replace(KEYS, selection="random")
    found = make_forecast(prompts, keys, rollouts=8, probes=16)
    reasons = " ".join(judge(found, 0.01).reasons)
    for words in said:
        assert words in reasons
    assert "Where to probe" in Tags(forecast_page(file_of(found))).text
    assert "may be chance" not in reasons
    chosen_by_score = make_forecast(prompts, KEYS, rollouts=8, probes=16)
    assert "Where to probe" not in Tags(forecast_page(file_of(chosen_by_score))).text


def test_without_scores_or_a_second_rollout_opds_gain_is_unknown_and_it_says_what_it_takes():
    unscored = [msgspec.structs.replace(each, scored=[]) for each in prompts_of((0.5,) * 4)]  # of an earlier version
    single = [
        msgspec.structs.replace(each, outcomes=each.outcomes[:1], scored=each.scored[:1])
        for each in prompts_of((0.5,) * 4)
    ]
    nothing_known = [RatioSums(0, 0.0, 0.0, 0, 0)] * 8
    masked = [msgspec.structs.replace(each, scored=nothing_known) for each in prompts_of((0.5,) * 4)]
    for prompts, rollouts in ((unscored, 8), (single, 1), (masked, 8)):
        found = make_forecast(prompts, KEYS, rollouts=rollouts, probes=16)
        assert found.figures["opd_gain"] is None
        said = judge(found, 0.01).reasons[0]
        assert "two problems with two rollouts each that have a verdict and the teacher's log-probabilities" in said


@pytest.mark.parametrize(("top_p", "is_known"), [(1.0, True), (0.8, False)])
def test_what_opd_gains_is_not_known_of_rollouts_that_were_sampled_from_a_nucleus(tmp_path, top_p, is_known):
    options = dataclasses.replace(OPTIONS, output=tmp_path / "forecast.json")
    config = config_from({**RUN, "sampling": {"top_p": top_p}})
    show(Console(file=io.StringIO()), config, measurement_of(prompts_of((0.5,) * 4)), options, [])
    found = read_forecast(options.output)
    for name in ("opd_gain", "opd_reward_gain"):
        assert (found.forecast.figures[name] is not None) == is_known
    assert found.forecast.figures["reward_gain"] is not None
    assert ("What OPD alone gains is not known" in found.verdict.reasons[0]) != is_known
    assert ("log-probabilities, and sampling.top_p=1. " in found.verdict.reasons[0]) != is_known


def test_ratios_are_summed_over_tokens_that_both_models_know_and_capped_ones_are_counted():
    teacher = np.array([np.log(0.5), np.log(0.9), np.nan, -np.inf, np.log(0.2)], np.float32)
    student = np.log(np.array([0.25, 0.01, 0.5, 0.5, 0.2], np.float32))
    found = ratio_sums(teacher, student)
    assert (found.tokens, found.agreed, found.capped) == (3, 1, 1)
    assert found.excess == pytest.approx(2.0 + 10.0 + 1.0 - 3)
    assert found.log_ratio == pytest.approx(np.log(2.0 * 90.0))


def test_a_gain_is_worth_it_relative_to_the_accuracy_at_hand():
    of_an_eighth = forecast_of((0.5,) * 4)
    assert default_worth(of_an_eighth) == 0.01
    rarely = [
        msgspec.structs.replace(each, outcomes=[float(n == 0)] * 8) for n, each in enumerate(prompts_of((0.5,) * 4))
    ]
    assert default_worth(make_forecast(rarely, KEYS, rollouts=8, probes=16)) == pytest.approx(0.1 / 50)


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
    prompts = prompts_of((0.0, 1.0, 0.0, 0.0), tokens=60, advice=lambda n: 2.0)
    found = make_forecast(prompts, KEYS, rollouts=8, probes=16, prices=Prices(prompt=2.0, completion=4.0, request=0.5))
    shown = {name: round(each.value, 6) for name, each in found.figures.items() if each is not None}
    tilted = 0.3 * np.e / (0.7 + 0.3 * np.e)
    expected = {
        "opd_gain": 2 / 8, "reward_gain": 1 / 8, "opd_reward_gain": 3 / 8, "tilt_gain": 2 * 0.21, "capped_share": 0.05,
        "value": 0.3, "value_of_student": 0.25, "value_variance": 0.21,
        "kept_share": 1.0, "gain": tilted - 0.3,
        "branch_weight": 30.0, "reach": 30 / 31, "settled_gain": 30 / 31 * (tilted - 0.3), "response_tokens": 60.0,
        "student_accuracy": 1 / 8, "student_pass": 1.0, "teacher_accuracy": 1.0, "headroom": 7 / 8,
        "mixed_groups": 1.0, "selected": 2.0, "probe_requests": 8.0, "probe_tokens": 160.0, "probe_share": 160 / 60,
        "probe_money": 8 * 0.5 + 1e-6 * (2.0 * 4 * (14 + 20) + 4.0 * 160),
    }  # fmt: skip
    assert shown == pytest.approx(expected, abs=2e-6)
    assert [row.value.value for row in found.by_teacher_rank] == pytest.approx([0.0, 1.0, 0.0, 0.0])
    assert (found.never_correct, found.always_correct) == (0, 0)
    assert [(row.token, row.positions) for row in found.tokens] == [("then", 100)]
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


def test_a_baseline_changes_nothing_that_is_measured():
    plain, less = (
        measured_settings(config_from({**RUN, "policy": {"kind": "spot", **more}})) for more in ({}, {"baseline": 0.5})
    )
    assert plain == less
    assert forecast_config(config_from({**RUN, "policy": {"kind": "spot", "baseline": 0.5}})).policy.baseline == 0


def test_what_is_written_is_read_back_and_no_file_of_someone_else_is_written_over(tmp_path):
    prompts = prompts_of((0.1, 0.9, 0.1, 0.9))
    found = file_of(make_forecast(prompts, KEYS, rollouts=8, probes=16), prompts)
    path = tmp_path / "run.forecast.json"
    check_output(path)
    path.write_bytes(msgspec.json.encode(found))
    assert read_forecast(path) == found
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
    done = CliRunner().invoke(app, ["forecast", *QUICKSTART, *options])
    assert done.exit_code == 0, done.output
    found = read_forecast(output)
    assert (len(found.measurement.prompts), found.forecast.positions) == (6, 12)
    assert found.verdict.sentence in " ".join(done.output.split())
    assert "Gain a decision by gamma" in output.with_suffix(".html").read_text()

    other = ["forecast", *QUICKSTART, "policy.gamma=4", "--from", str(output), "-o"]
    done = CliRunner().invoke(app, [*other, str(tmp_path / "other.json")])
    assert done.exit_code == 0, done.output
    again = read_forecast(tmp_path / "other.json")
    assert again.measurement == found.measurement
    (same,) = (row for row in found.forecast.by_keys if row.changes == {"gamma": 4.0})
    assert again.forecast.figures["settled_gain"] == same.settled_gain


@pytest.mark.long
def test_a_teacher_that_is_the_student_and_reads_the_same_gains_nothing_and_it_says_why(
    tmp_path, monkeypatch, servers_on_threads
):
    monkeypatch.chdir(ROOT)
    output = tmp_path / "self.forecast.json"
    itself = ["configs/quickstart.yaml", "teacher.model=examples/running_sum/student"]
    options = ["--prompts", "3", "--rollouts", "2", "--probes", "2", "-o", str(output)]
    done = CliRunner().invoke(app, ["forecast", *itself, *options])
    assert done.exit_code == 0, done.output
    assert "has the student's own weights and reads the same prompt" in " ".join(done.output.split())
    assert read_forecast(output).forecast.figures["opd_gain"].value == pytest.approx(0.0, abs=1e-4)
