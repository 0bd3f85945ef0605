"""`spot-async check --slope`: what it asks of servers, its figures against known truths, what it says and refuses."""

from __future__ import annotations

import io
import itertools
import json
import math
import statistics
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from command import PAPERS
from rich.console import Console
from small_runs import NAMED
from typer.testing import CliRunner

from spot_async.cli import app
from spot_async.config.loading import config_from
from spot_async.errors import BudgetSpentError, ConfigError, PermanentError
from spot_async.policies.opd import OpdPolicy
from spot_async.policies.spot import SpotPolicy
from spot_async.stages.stages import stages_for
from spot_async.testing.services import SimulatedStudent
from spot_async.testing.simulation import make_policy, simulated_prompts, simulated_services
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.tools.check.slope import PROBES, Slope, check_slope, in_epochs, show_slope, supervise, what_is_unknown
from spot_async.tools.check.slope_figures import Place, Supervised, held_by_rule, slope_figures
from spot_async.types import PolicyNeeds

ROOT = Path(__file__).parents[2]
RUN = {**NAMED, "policy": "spot", "training": {"iterations": 1, "batch_size": 64}}


def supervised_by(student, *, policy=SpotPolicy, at_once=3, problems=8, **keys):
    """Supervise simulated problems in two epochs on virtual time; return what came of it, the stages, the progress."""
    made, told = make_policy(policy, **keys), []
    stages = stages_for(made, simulated_services(made.needs, student=student))
    prompts = in_epochs(list(simulated_prompts(problems)), 2)
    measuring = supervise(made, stages, prompts, at_once=at_once, tell=told.append)
    return run_on_virtual_time(measuring), stages, told


def test_each_problem_is_supervised_as_in_several_epochs_of_the_run_by_its_own_policy():
    (found, notes), stages, told = supervised_by(SimulatedStudent(), probes=PROBES)
    policy = make_policy(SpotPolicy)
    alone = stages_for(policy, simulated_services(policy.needs))

    async def as_in_a_run(prompt):
        (sample,) = await policy.supervise(prompt, alone.for_prompt(prompt))
        return sample

    prompts = in_epochs(list(simulated_prompts(8)), 2)
    assert [each.problem_id for each in found] == [f"p{n // 2}" for n in range(16)]
    assert [prompt.ordinal for prompt in prompts] == list(range(16))
    for prompt, each in zip(prompts, found, strict=True):
        sample = run_on_virtual_time(as_in_a_run(prompt))
        assert [place.position for place in each.places] == sample.record["selected_positions"]
        for place, branch in zip(each.places, sample.record["branches"], strict=True):
            assert place.score_parts == branch["score_parts"]
        ((area, opinion),) = each.opinions
        assert (area, opinion.problem, opinion.reward) == ("teacher", prompt.problem.id, each.outcomes[0])
        assert opinion.sums.tokens == len(sample.record["response_ids"])
    assert found[0].opinions != found[1].opinions  # other responses to the same problem
    assert stages.rollout.counters.completed == stages.teacher().score.counters.completed == 16
    assert told == [f"{done} of 16 prompts" for done in range(1, 17)]
    assert notes == []


def test_a_policy_that_probes_nothing_is_measured_by_its_responses_alone():
    (found, _), stages, _ = supervised_by(SimulatedStudent(), policy=OpdPolicy, problems=32)
    assert [(each.probed, each.places) for each in found] == [(0, [])] * 64
    assert stages.probe.counters.completed == 0
    figures = slope_figures(found, gamma=0.0, is_random=False)
    assert {"teacher/outcome_slope_standard_error", "teacher/opd_gain", "reward_variance"} <= figures.keys()
    assert not {"tilt", "value_variance"} & figures.keys()
    (unguided, _), _, _ = supervised_by(SimulatedStudent(), verifier_guidance=False)
    assert [each.probed for each in unguided] == [0] * 16


def test_a_budget_ends_it_and_what_was_supervised_is_kept():
    class Broke(SimulatedStudent):
        asked = itertools.count()

        async def generate(self, *request, **more):
            if next(self.asked) > 200:
                raise BudgetSpentError("student.backend.budget is spent")
            return await super().generate(*request, **more)

    (found, notes), _, _ = supervised_by(Broke(), probes=PROBES)
    assert 0 < len(found) < 16
    assert notes[0].startswith(
        f"{len(found)} of 16 prompts were supervised: student.backend.budget is spent. Those with"
    )


def test_a_prompt_whose_requests_fail_is_left_out_and_told_and_if_all_do_that_is_the_error():
    class Refusing(SimulatedStudent):
        refused = 9  # tokens of the prompt

        async def generate(self, prompt_ids, *request, **more):
            if len(prompt_ids) == self.refused or not self.refused:
                raise PermanentError("no")
            return await super().generate(prompt_ids, *request, **more)

    (found, notes), _, _ = supervised_by(Refusing(), policy=OpdPolicy)
    assert [each.problem_id for each in found] == [f"p{n // 2}" for n in range(16) if n // 2 != 4]
    assert notes == ["2 prompts left out, whose requests failed: no"]
    nobody = Refusing()
    nobody.refused = 0
    with pytest.raises(PermanentError, match="no"):
        supervised_by(nobody, policy=OpdPolicy)


def judged(*outcomes, problem="p"):
    return Supervised(problem, [], outcomes, 0, [])


def probed(*variances, selected=None, problem="p"):
    places = [Place(at, {}, variance, None) for at, variance in enumerate(variances)]
    return Supervised(problem, [], [], len(places) if selected is None else selected, places)


def test_figures_and_errors_are_the_textbooks():
    drawn = np.random.default_rng(0).normal(0.03, 0.02, 30).tolist()
    found = slope_figures([probed(x, x, problem=str(n)) for n, x in enumerate(drawn)], gamma=4.0, is_random=False)
    assert found["value_variance"] == pytest.approx(statistics.mean(drawn))
    assert found["tilt"] == pytest.approx(4 * 2 * statistics.mean(drawn))
    assert found["tilt_standard_error"] == pytest.approx(8 * statistics.stdev(drawn) / 30**0.5)
    # A problem's responses are not independent of each other: twice the same one says no more.
    twice = [probed(x, x, problem=str(n)) for n, x in enumerate(drawn) for _ in range(2)]
    assert slope_figures(twice, gamma=4.0, is_random=False) == pytest.approx(found)
    some = slope_figures([probed(0.1, 0.3, selected=4), probed(selected=2), probed()], gamma=1.0, is_random=False)
    assert some["tilt"] == pytest.approx((4 * 0.2 + 0) / 2)  # of what is known of a response; of none there is no tilt
    assert some["value_variance"] == pytest.approx(0.2)
    assert "value_variance_standard_error" not in some  # of one problem
    assert slope_figures([probed(selected=2)], gamma=1.0, is_random=True) == {}


@pytest.mark.parametrize("responses", [2, 4])
def test_what_grpo_has_is_the_variance_of_rewards(responses):
    of_problem, expected = 0.3, 0.0
    for outcomes in itertools.product((0.0, 1.0), repeat=responses):
        chance = math.prod(of_problem if each else 1 - of_problem for each in outcomes)
        found = [judged(each) for each in outcomes]
        expected += chance * slope_figures(found, gamma=0.0, is_random=False)["reward_variance"]
    assert expected == pytest.approx(of_problem * (1 - of_problem))
    assert slope_figures([judged(1.0), judged(0.0, problem="q")], gamma=0.0, is_random=False) == {}


@pytest.mark.parametrize("hard", [0.0, 0.7])
def test_errors_of_the_tilt_are_those_of_redrawn_prompts(hard):
    """200 measurements of 50 prompts with two positions each; at `hard` of all prompts no candidate ever succeeds."""
    random, truth, tilts, errors, covered = np.random.default_rng(7), 0.0, [], [], 0

    def population(prompts):
        ease = np.where(random.random(prompts) < hard, 0.0, random.beta(1, 2, prompts))
        of_candidates = np.clip(ease[:, None, None] * random.uniform(0.2, 2.0, (prompts, 2, 4)), 0, 1)
        return random.dirichlet([1.0] * 4, (prompts, 2)), of_candidates

    def true_variance(prior, of_candidates):
        return (prior * (of_candidates - (prior * of_candidates).sum(-1, keepdims=True)) ** 2).sum(-1)

    truth = 2 * true_variance(*population(20_000)).mean()
    for _ in range(200):
        prior, of_candidates = population(50)
        exact = true_variance(prior, of_candidates)
        noisy = exact + random.normal(0, 0.01, exact.shape)
        measured = [probed(*row, problem=str(n)) for n, row in enumerate(noisy)]
        found = slope_figures(measured, gamma=1.0, is_random=False)
        tilts.append(found["tilt"])
        errors.append(found["tilt_standard_error"])
        covered += abs(found["tilt"] - truth) < 2 * found["tilt_standard_error"]
    assert np.mean(np.square(errors)) == pytest.approx(np.var(tilts), rel=0.25)
    assert covered >= 176  # a true share of 95 % gives fewer than this once in 7,000 times


def places(random, prompts):
    """Return prompts with 8 random positions each, and the true Var_p(V) (prompts, 8) there.

    The score goes where candidates differ, entropy and JS go anywhere.
    """
    variance = random.beta(1, 3, (prompts, 8)) * 0.2
    parts = {"score": variance + random.normal(0, 0.03, variance.shape)}
    parts |= {name: random.random((prompts, 8)) for name in ("entropy", "divergence")}
    one, other = (variance + random.normal(0, 0.1, variance.shape) for _ in range(2))
    measured = []
    for n in range(prompts):
        row = [
            Place(
                5 * at, {name: float(part[n, at]) for name, part in parts.items()},
                float((one[n, at] + other[n, at]) / 2), (float(one[n, at]), float(other[n, at])),
            )
            for at in range(8)
        ]  # fmt: skip
        measured.append(Supervised(str(n), [], [], 8, row))
    return measured, variance, parts


def test_each_rule_holds_what_is_there_and_an_oracle_no_more_than_the_best():
    measured, variance, parts = places(np.random.default_rng(29), 1500)
    found = slope_figures(measured, gamma=1.0, is_random=True)
    oracle = np.mean([best for _, _, best in held_by_rule(measured)["random"]]) / 2

    def best_two(by):
        return np.take_along_axis(variance, np.argsort(-by, axis=1)[:, :2], axis=1).mean()

    truth = {
        "score": best_two(parts["score"]),
        "entropy": best_two(parts["entropy"]),
        "JS": best_two(parts["divergence"]),
        "earliest": variance[:, :2].mean(),
        "random": variance.mean(),
    }
    for rule, true in truth.items():
        error = found[f"of_oracle_by_{rule}_standard_error"]
        assert abs(found[f"of_oracle_by_{rule}"] - true / oracle) < 4 * error
    assert truth["random"] < oracle < best_two(variance)
    assert truth["score"] > 1.5 * truth["random"]


@pytest.mark.long
def test_errors_of_what_a_rule_holds_cover_the_truth():
    random = np.random.default_rng(31)
    truth = slope_figures(places(random, 20_000)[0], gamma=1.0, is_random=True)["of_oracle_by_random"]
    covered = 0
    for _ in range(100):
        found = slope_figures(places(random, 30)[0], gamma=1.0, is_random=True)
        covered += abs(found["of_oracle_by_random"] - truth) < 2 * found["of_oracle_by_random_standard_error"]
    assert covered >= 88  # a true share of 95 % gives fewer than this once in 250 times


def test_rules_are_compared_at_random_positions_with_scores_alone():
    measured, _, _ = places(np.random.default_rng(1), 3)
    assert "of_oracle_by_JS" in slope_figures(measured, gamma=1.0, is_random=True)
    unscored = [each._replace(places=[place._replace(score_parts={}) for place in each.places]) for each in measured]
    few = [each._replace(places=each.places[:3]) for each in measured]  # of which no rule could take a quarter
    halfless = [each._replace(places=[place._replace(halves=None) for place in each.places]) for each in measured]
    for prompts, is_random in ((measured, False), (unscored, True), (few, True), (halfless, True)):
        found = slope_figures(prompts, gamma=1.0, is_random=is_random)
        assert not any(name.startswith("of_oracle") for name in found)
        assert "tilt" in found


def test_random_positions_of_the_policy_are_compared_by_what_other_rules_would_see():
    (found, _), _, _ = supervised_by(SimulatedStudent(), probes=PROBES, selection="random", positions=8, problems=32)
    held = held_by_rule(found)
    assert held.keys() == {"score", "entropy", "JS", "earliest", "random"}
    assert {len(each) for each in held.values()} == {64}


def plan_of(config, answer="1", **needs):
    schedule = SimpleNamespace(sources=[SimpleNamespace(problem=SimpleNamespace(answer=answer))])
    return SimpleNamespace(policy=SimpleNamespace(needs=PolicyNeeds(**needs)), schedule=schedule)


@pytest.mark.parametrize(
    ("changes", "needs", "said"),
    [
        ({"policy": "grpo"}, {}, r"policy\.kind=grpo: no teacher scores what .* add policy\.kind=opd"),
        (
            {"policy": "kd"},
            {"teacher_top_k": 16, "rollouts_per_prompt": 0},
            r"policy\.kind=kd: no teacher scores what the student writes",
        ),
        (
            {"teacher": {"model": "t", "cache": "c.sqlite", "replay": True}},
            {"teacher_top_k": 16},
            r"set teacher\.replay=false",
        ),
        (
            {"policy": "opd"},
            {"teacher_top_k": 16, "answer": ""},
            r"data\.train: no problem has an answer, .* name their column in fields\.answer",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(changes, needs, said):
    config = config_from({**RUN, **changes})
    with pytest.raises(ConfigError, match=said):
        check_slope(config, plan_of(config, **needs))


def test_what_is_not_known_is_said_and_what_would_say_it():
    nucleus = config_from({**RUN, "sampling": {"top_p": 0.8}})
    said = list(what_is_unknown(nucleus, [probed(0.1, selected=3)], {"tilt": 0.1}))
    assert said == [
        "no response has both a verdict and the teacher's log-probabilities, so nothing is known of the teacher",
        "what OPD gains is not known with sampling.top_p=0.8: it takes sampling.top_p=1",
        "2 of 3 probed positions left out: a candidate has less than two verdicts",
        "rules are compared where positions are random: policy.selection=random policy.positions=8",
    ]
    known = {"teacher/right_responses": 9.0, "of_oracle_by_score": 0.5}
    at_random = config_from({**RUN, "policy": {"kind": "spot", "selection": "random", "baseline": 0.5}})
    of_baseline = "SPOT's tilt is without policy.baseline=0.5, which changes what a branch teaches"
    assert list(what_is_unknown(at_random, [probed(0.1)], known)) == [of_baseline]
    few = list(what_is_unknown(at_random, [probed(0.1)], {"teacher/right_responses": 9.0}))
    assert few[0].startswith("rules are compared where 4 scored positions of a response are probed: raise policy.pos")


def test_what_is_shown_is_harmless_whatever_servers_said_and_fits_a_screen_of_80_columns():
    (measured, _), _, _ = supervised_by(SimulatedStudent(), probes=PROBES, problems=32)
    figures = slope_figures(measured, gamma=4.0, is_random=False)
    figures |= {"of_oracle_by_score": 0.61, "of_oracle_by_score_standard_error": 0.1}
    notes = ["1 prompt left out, whose requests failed: \x1b]0;owned\x07"]
    found = Slope(problems=32, rollouts_per_problem=2, probes_per_rollout=32, figures=figures, notes=notes)
    out = io.StringIO()
    show_slope(Console(file=out, width=80), found)
    shown = out.getvalue()
    assert "\x1b" not in shown
    assert "…" not in shown
    for title in (
        "32 problems, 2 rollouts each, up to 32 probes a rollout",
        "outcome slope",
        "SPOT's tilt",
        "by score",
        "61.0 ±10.0",
    ):
        assert title in shown
    assert "point to right answers: " in shown


def test_a_problem_file_and_a_check_without_servers_have_no_slope():
    for given in (["problems.jsonl", "--slope", "5"], ["configs/quickstart.yaml", "--no-servers", "--slope", "5"]):
        done = CliRunner().invoke(app, ["check", *given])
        assert done.exit_code == 2
        assert "--slope" in done.output


@pytest.mark.parametrize("for_programs", [True, pytest.param(False, marks=pytest.mark.long)])
def test_unsafe_servers_are_shown_and_nothing_is_measured_of_them(for_programs, monkeypatch, servers_on_threads):
    monkeypatch.chdir(ROOT)
    unsafe = ["check", *PAPERS, "student.backend.max_context_tokens=64", "--slope", "6"]
    done = CliRunner().invoke(app, [*unsafe, "--json"] if for_programs else unsafe)
    assert done.exit_code == 1
    said = "student.backend serves a context of 64 tokens"
    if for_programs:
        found = json.loads(done.stdout)
        assert found["refusals"][0].startswith(said)
        assert "slope" not in found
    else:
        shown = " ".join(done.output.split())
        assert f"unsafe: {said}" in shown
        assert "rollouts each" not in shown


@pytest.mark.long
def test_it_measures_real_servers_for_people_and_for_programs(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    asked = ["check", *PAPERS, "--slope", "6"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "safe to train with" in done.output
    assert "6 problems, 4 rollouts each, up to 32 probes a rollout" in done.output
    for_programs = CliRunner().invoke(app, [*asked, "--json"])
    found = json.loads(for_programs.stdout)["slope"]
    assert (found["problems"], found["rollouts_per_problem"], found["probes_per_rollout"]) == (6, 4, 32)
    assert {"teacher/outcome_slope", "teacher/opd_gain", "reward_variance", "tilt"} <= found["figures"].keys()


@pytest.mark.long
def test_a_teacher_that_is_the_student_and_reads_the_same_gains_nothing_and_it_says_why(
    monkeypatch, servers_on_threads
):
    monkeypatch.chdir(ROOT)
    itself = ["configs/quickstart.yaml", "teacher.model=examples/running_sum/student"]
    done = CliRunner().invoke(app, ["check", *itself, "--slope", "3", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert any("has the student's own weights and reads the same prompt" in line for line in found["warnings"])
    assert found["slope"]["figures"]["teacher/opd_gain"] == pytest.approx(0.0, abs=1e-4)
