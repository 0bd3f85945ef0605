"""SPOT's decisions for one prompt, against stages that follow a script."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import numpy as np
import pytest

from spot_async.config.loading import load_config
from spot_async.errors import ConfigError, PluginError
from spot_async.policies.spot import SpotPolicy
from spot_async.testing.services import generation, token_scores
from spot_async.testing.simulation import ScriptedStages, SimulatedTokenizer, make_policy, policy_context
from spot_async.types import Judgement, Problem, Prompt, Verdict, VersionSpan, WeightVersion
from spot_async.verification.normalization import answer_start

VOCAB = 12
RESPONSE = np.array([5, 2, 6, 7, 1], dtype=np.int32)  # 2 is punctuation, 1 ends
PROMPT = Prompt(ordinal=7, problem=Problem(id="p", text="?", answer="1"), token_ids=np.array([3, 4], np.int32))
# Every position has candidates and probabilities of its own, so that reading a neighbour's row shows.
CANDIDATES = np.array([np.roll([8, 9, 10, 11], t) for t in range(5)], dtype=np.int32)  # (T, k)
TEACHER = np.log(np.array([[0.4, 0.3, 0.2, 0.1]]) + 0.001 * np.arange(5)[:, None])  # (T, k)
TEACHER_SAMPLED = np.array([-0.5, -0.6, -0.7, -0.8, -0.9], np.float32)
BEHAVIOR = np.array([-1.0, -1.1, -1.2, -1.3, -1.4], np.float32)
ENTROPY = np.array([1.0, 9.9, 2.0, 3.0, 9.9], dtype=np.float32)


def scripted(**verdicts):
    """The response and its scores; `verdicts` of branches, all others are wrong."""
    return ScriptedStages(
        generation(RESPONSE, BEHAVIOR, version=WeightVersion(0, 3)),
        token_scores(TEACHER_SAMPLED, entropy=ENTROPY, topk_ids=CANDIDATES, topk_logprobs=TEACHER),
        **verdicts,
    )


def branch(position, candidate, n=0):
    """Token ids of a whole branch: x_<t, v, y."""
    return (*RESPONSE[:position].tolist(), candidate, 20 + n, 1)


async def supervise(stages, ordinal=PROMPT.ordinal, **settings):
    tokenizer = SimulatedTokenizer(VOCAB, lambda token_id: ";" if token_id == 2 else str(token_id))
    context = policy_context(vocab_size=VOCAB, tokenizer=tokenizer, answer_start=answer_start)
    prompt = msgspec.structs.replace(PROMPT, ordinal=ordinal)
    (sample,) = await make_policy(SpotPolicy, context, score_top_k=4, **settings).supervise(prompt, stages)
    return sample


async def test_only_unmasked_positions_are_scored_and_the_best_are_probed_with_the_teachers_candidates():
    stages = scripted()
    await supervise(stages)
    # the punctuation and the end token are masked
    assert stages.candidates == [([0, 2, 3], CANDIDATES[[0, 2, 3]].tolist())]
    assert sorted(stages.probed) == [(p, c, 0) for p in (2, 3) for c in sorted(CANDIDATES[p].tolist())]
    assert tuple(RESPONSE.tolist()) in stages.verified
    assert branch(3, 9) in stages.verified


async def test_positions_without_a_correct_branch_are_left_out_and_the_weight_is_beta_over_the_rest():
    stages = scripted(verdicts={branch(2, 9): Verdict.CORRECT})
    (targets,) = (await supervise(stages, beta=0.3)).supervision.soft_targets
    assert targets.positions.tolist() == [2]
    assert targets.token_ids.tolist() == [CANDIDATES[2].tolist()]
    assert targets.weights == pytest.approx([0.3])
    tilted = np.exp(TEACHER[2]) * np.where(CANDIDATES[2] == 9, np.e, 1.0)
    assert targets.probabilities[0] == pytest.approx(tilted / tilted.sum(), abs=1e-6)

    stages = scripted(verdicts={branch(2, 9): Verdict.CORRECT, branch(3, 8): Verdict.CORRECT})
    (targets,) = (await supervise(stages, beta=0.3)).supervision.soft_targets
    assert targets.weights == pytest.approx([0.15, 0.15])


async def test_gamma_zero_distils_the_teachers_prior():
    stages = scripted(verdicts={branch(2, 11): Verdict.CORRECT})
    (targets,) = (await supervise(stages, gamma=0.0)).supervision.soft_targets
    assert targets.probabilities[0] == pytest.approx(np.exp(TEACHER[2]) / np.exp(TEACHER[2]).sum(), abs=1e-6)


async def test_without_the_gate_positions_without_a_correct_branch_keep_the_prior_and_those_without_evidence_go():
    stages = scripted(verdicts={branch(2, 9): Verdict.CORRECT})
    sample = await supervise(stages, beta=0.3, gate=False)
    (targets,), prior = sample.supervision.soft_targets, np.exp(TEACHER) / np.exp(TEACHER).sum(-1, keepdims=True)
    assert targets.positions.tolist() == [2, 3]
    assert targets.weights == pytest.approx([0.15, 0.15])
    tilted = np.exp(TEACHER[2]) * np.where(CANDIDATES[2] == 9, np.e, 1.0)
    assert targets.probabilities[0] == pytest.approx(tilted / tilted.sum(), abs=1e-6)
    assert targets.probabilities[1] == pytest.approx(prior[3], abs=1e-6)

    without_evidence = scripted(verdicts={branch(2, 9): Verdict.ERROR})
    assert (await supervise(without_evidence, gate=False)).supervision.soft_targets[0].positions.tolist() == [3]


async def test_shuffled_outcomes_tilt_as_far_but_by_the_seed_and_keep_the_same_positions():
    verdicts = {branch(2, 9): Verdict.CORRECT, branch(3, 8): Verdict.CORRECT}
    own, first, again, other = [
        (await supervise(scripted(verdicts=verdicts), gamma=4.0, ordinal=ordinal, **settings)).supervision.soft_targets[
            0
        ]
        for ordinal, settings in ((7, {}), *((n, {"shuffle_outcomes": True}) for n in (7, 7, 8)))
    ]
    for shuffled in (first, again, other):
        assert shuffled.positions.tolist() == own.positions.tolist()
        for target, logprobs in zip(shuffled.probabilities, TEACHER[2:4], strict=True):
            odds = np.log(target) - logprobs  # gamma V(v), and a constant
            assert np.sort(odds - odds.min()) == pytest.approx([0.0, 0.0, 0.0, 4.0], abs=1e-4)
    assert first.probabilities.tolist() == again.probabilities.tolist()
    assert len({each.probabilities.tobytes() for each in (own, first, other)}) == 3


async def test_a_baseline_is_a_share_of_the_prior_beside_the_same_targets_and_0_is_none():
    verdicts = {branch(2, 9): Verdict.CORRECT, branch(3, 8): Verdict.CORRECT}
    (paper, plain), (less, metrics) = [
        (sample.supervision.soft_targets[0], sample.metrics)
        for sample in [await supervise(scripted(verdicts=verdicts), gamma=4.0, baseline=alpha) for alpha in (0.0, 0.8)]
    ]
    assert paper.baselines is None
    priors = np.exp(TEACHER[2:4]) / np.exp(TEACHER[2:4]).sum(axis=1, keepdims=True)
    assert less.baselines == pytest.approx(0.8 * priors, abs=1e-6)
    assert less.probabilities.tolist() == paper.probabilities.tolist()
    assert less.weights.tolist() == paper.weights.tolist()
    pull = np.abs(less.probabilities - less.baselines).sum(axis=1).mean()
    assert metrics == {**plain, "spot/baseline_pull": pytest.approx(pull)}


async def test_metrics_say_what_the_tilt_has_to_work_with_what_the_gate_keeps_and_what_a_branch_weighs():
    verdicts = {branch(2, 9, 0): Verdict.CORRECT, branch(2, 9, 1): Verdict.CORRECT, branch(2, 8, 0): Verdict.CORRECT}
    metrics = (await supervise(scripted(verdicts=verdicts), probes=2, beta=0.3)).metrics
    prior = np.exp(TEACHER[2]) / np.exp(TEACHER[2]).sum()
    values = np.select([CANDIDATES[2] == 9, CANDIDATES[2] == 8], [1.0, 0.5])
    variance = (prior * values**2).sum() - (prior * values).sum() ** 2
    noise = (prior * (1 - prior))[CANDIDATES[2] == 8].sum() / 4  # of the candidate whose two probes differ
    assert metrics["spot/value_variance"] == pytest.approx((variance - noise) / 2)  # position 3 has none
    assert metrics["spot/kept_share"] == 0.5
    assert metrics["spot/branch_weight"] == pytest.approx(0.3 * 5 / 2)


async def test_nothing_correct_is_plain_opd():
    sample = await supervise(scripted())
    assert sample.supervision.soft_targets == ()
    assert sample.metrics["spot/retained"] == 0
    supervision = sample.supervision
    assert supervision.prompt_ids.tolist() == PROMPT.token_ids.tolist()
    assert supervision.response_ids.tolist() == RESPONSE.tolist()
    assert supervision.behavior_logprobs.tolist() == BEHAVIOR.tolist()
    assert supervision.pulls[0].logprobs.tolist() == TEACHER_SAMPLED.tolist()
    assert supervision.version == WeightVersion(0, 3)


async def test_missing_evidence_is_left_out_of_the_mean_and_a_candidate_without_any_drops_its_position():
    one_left = {branch(2, 9, 0): Verdict.TIMEOUT, branch(2, 9, 1): Verdict.CORRECT}
    sample = await supervise(scripted(verdicts=one_left), probes=2)
    tilted = np.exp(TEACHER[2]) * np.where(CANDIDATES[2] == 9, np.e, 1.0)  # the mean of one reward, not of two
    assert sample.supervision.soft_targets[0].probabilities[0] == pytest.approx(tilted / tilted.sum(), abs=1e-6)

    none_left = {branch(2, 9): Verdict.ERROR, branch(2, 8): Verdict.CORRECT}
    sample = await supervise(scripted(verdicts=none_left))
    assert sample.supervision.soft_targets == ()
    assert sample.metrics["spot/no_evidence"] == 1
    shown = {each["token_id"]: each["value"] for each in sample.record["branches"][0]["candidates"]}
    assert (shown[9], shown[8]) == (None, 1.0)  # what is known is shown, of a position that is dropped too


async def test_values_are_a_verifiers_own_numbers_and_accuracy_counts_verdicts():
    judged = {branch(2, 9): Judgement(Verdict.WRONG, 0.5), branch(2, 8): Judgement(Verdict.CORRECT, -2.0)}
    sample = await supervise(scripted(verdicts=judged, verdict=Judgement(Verdict.WRONG, 0.25, "nearly")))
    values = np.select([CANDIDATES[2] == 9, CANDIDATES[2] == 8], [0.5, -2.0], 0.25)
    tilted = np.exp(TEACHER[2]) * np.exp(values)
    assert sample.supervision.soft_targets[0].probabilities[0] == pytest.approx(tilted / tilted.sum(), abs=1e-6)
    assert (sample.metrics["rollout/accuracy"], sample.metrics["rollout/reward"]) == (0.0, 0.25)
    assert sample.metrics["probe/accuracy"] == 1 / 8
    assert (sample.record["reward"], sample.record["feedback"]) == (0.25, "nearly")


async def test_the_gate_keeps_positions_with_a_right_branch_whatever_numbers_the_verifier_gives():
    right, wrong = Judgement(Verdict.CORRECT, -1.0), Judgement(Verdict.WRONG, 0.5)
    sample = await supervise(scripted(verdicts={branch(2, 9): right}, verdict=wrong))
    assert sample.supervision.soft_targets[0].positions.tolist() == [2]
    fined = await supervise(scripted(verdicts={branch(3, 8): Verdict.CORRECT}, verdict=Judgement(Verdict.WRONG, -1.0)))
    assert fined.supervision.soft_targets[0].positions.tolist() == [3]
    # Numbers alone say nothing of right and wrong: above 0 counts.
    alone = {branch(2, 9): Judgement(Verdict.UNJUDGED, 0.5)}
    sample = await supervise(scripted(verdicts=alone, verdict=Judgement(Verdict.UNJUDGED, -1.0)))
    assert sample.supervision.soft_targets[0].positions.tolist() == [2]


async def test_one_right_probe_of_two_passes_the_gate_although_the_numbers_add_up_to_nothing():
    judged = {branch(2, 9, 0): Judgement(Verdict.CORRECT, 1.0), branch(2, 9, 1): Judgement(Verdict.WRONG, -1.0)}
    sample = await supervise(scripted(verdicts=judged, verdict=Judgement(Verdict.WRONG, -1.0)), probes=2)
    assert sample.supervision.soft_targets[0].positions.tolist() == [2]


async def test_the_record_holds_what_spot_saw():
    stages = scripted(verdicts={branch(2, 9): Verdict.CORRECT})
    record = (await supervise(stages)).record
    assert np.isnan(record["acquisition_score"]).tolist() == [False, True, False, False, True]
    assert record["selected_positions"] == [2, 3]
    (nine,) = [c for c in record["branches"][0]["candidates"] if c["token_id"] == 9]
    assert (nine["value"], nine["verdicts"]) == (1.0, ["correct"])
    prior = np.exp(TEACHER[2]) / np.exp(TEACHER[2]).sum()
    assert nine["target"] > nine["prior"] == pytest.approx(prior[CANDIDATES[2].tolist().index(9)], abs=1e-6)
    assert nine["teacher"] == pytest.approx(np.exp(TEACHER[2][CANDIDATES[2].tolist().index(9)]), abs=1e-6)
    assert nine["student"] == pytest.approx(0.05)
    assert record["branches"][0]["score_parts"]["coverage"] == pytest.approx(0.2)  # four candidates of 0.05
    assert [(b["sampled"], b["retained"]) for b in record["branches"]] == [("6", True), ("7", False)]
    assert record["version"] == str(WeightVersion(0, 3))
    assert np.isnan(record["gap"]).tolist() == [False, True, False, False, True]
    assert record["gap"][2] == pytest.approx(record["branches"][0]["score_parts"]["gap"], abs=1e-6)


@pytest.mark.parametrize("selection", ["random", "entropy", "earliest"])
async def test_a_control_records_at_what_it_probes_all_that_the_score_has_there(selection):
    score = (await supervise(scripted(), positions=3)).record
    stages = scripted()
    record = (await supervise(stages, selection=selection)).record
    assert stages.candidates == [(at := record["selected_positions"], CANDIDATES[at].tolist())]
    by_position = {branch["position"]: branch for branch in score["branches"]}
    for branch in record["branches"]:
        same = by_position[branch["position"]]
        assert branch["score_parts"] == pytest.approx(same["score_parts"], abs=1e-6)
        assert branch["score_parts"]["score"] == pytest.approx(score["acquisition_score"][branch["position"]], abs=1e-6)
        assert [c["student"] for c in branch["candidates"]] == [c["student"] for c in same["candidates"]]
    # What it went by is recorded where it says something about the position.
    assert ("acquisition_score" in record) == (selection == "entropy")


TEXTS = {5: "So", 6: "five", 7: r"\boxed{", 2: ";", 1: "}"}


def texts_of(stages):
    """The same stages, whose tokens have texts."""
    stages.decode = lambda token_ids: "".join(TEXTS.get(int(token_id), "?") for token_id in token_ids)
    return stages


@pytest.mark.parametrize("selection", ["score", "entropy", "earliest", "random"])
async def test_nothing_is_selected_from_the_box_on_where_the_answer_is_skipped(selection):
    async def chosen(**settings):
        sample = await supervise(texts_of(scripted()), selection=selection, positions=3, **settings)
        return sample.record["selected_positions"]

    assert await chosen() == [0, 2, 3]
    assert await chosen(skip_answer=True) == [0, 2]


@pytest.mark.parametrize(("last", "expected"), [(r"\boxed{", [0, 2]), ("seven", [0, 2, 3])])
async def test_beside_an_environment_the_answer_is_that_of_the_last_turn(last, expected, monkeypatch):
    monkeypatch.setitem(TEXTS, 5, r"\boxed{5}")  # of the first turn
    monkeypatch.setitem(TEXTS, 7, last)
    stages, version = texts_of(scripted()), WeightVersion(0, 3)
    spans = (VersionSpan(0, 1, version), VersionSpan(1, 2, None, is_read=True), VersionSpan(2, 5, version))
    stages.response = msgspec.structs.replace(stages.response, version_spans=spans)
    assert (await supervise(stages, skip_answer=True, positions=3)).record["selected_positions"] == expected


async def test_a_response_without_a_box_has_no_answer_to_skip():
    assert (await supervise(scripted(), skip_answer=True, positions=3)).record["selected_positions"] == [0, 2, 3]


def test_an_answer_that_no_verifier_reads_from_a_box_cannot_be_skipped():
    with pytest.raises(ConfigError, match=r"^policy\.skip_answer=true: the verifier reads no box, .*: set it to false"):
        make_policy(SpotPolicy, policy_context(answer_start=None), skip_answer=True)


@pytest.fixture
def rule(monkeypatch):
    """Returns the name of a module's function that returns what it is given, or what that returns of predictors."""

    def named(returns):
        module = ModuleType("rules_of_mine")
        module.by = returns if callable(returns) else lambda predictors: returns
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return "rules_of_mine:by"

    return named


async def test_a_rule_of_ones_own_sees_what_is_recorded_and_its_best_positions_are_probed(rule):
    seen = {}

    def by(predictors):
        seen.update(predictors)
        return np.where(predictors["token"] == "five", 0.0, predictors["gap"] + 1 / (1 + predictors["position"]))

    record = (await supervise(texts_of(scripted()), selection=rule(by), positions=3)).record
    by_score = (await supervise(texts_of(scripted()), positions=3)).record
    assert record["selected_positions"] == [0, 3]  # a position of score 0 is never chosen
    assert seen["position"].tolist() == [0, 2, 3]
    assert seen["token"].tolist() == ["So", "five", r"\boxed{"]
    assert seen["behavior_logprobs"].tolist() == BEHAVIOR[[0, 2, 3]].tolist()
    assert seen["teacher_logprobs"].tolist() == TEACHER_SAMPLED[[0, 2, 3]].tolist()
    for name, part in by_score["branches"][1]["score_parts"].items():
        assert seen[name][1] == pytest.approx(part, abs=1e-6)
    assert record["acquisition_score"][[0, 3]] == pytest.approx(seen["gap"][[0, 2]] + [1, 0.25], abs=1e-6)
    assert [b["score_parts"] for b in record["branches"]] == [by_score["branches"][i]["score_parts"] for i in (0, 2)]


@pytest.mark.parametrize(
    ("returns", "said"),
    [
        ([1.0, 2.0], r"returned the shape \(2,\): return 3 numbers >= 0, one a position"),
        (1.0, r"returned the shape \(\): return 3 numbers"),
        ([1.0, np.nan, 2.0], "returned nan: return 3 numbers"),
        ([1.0, np.inf, 2.0], "returned inf: return 3 numbers"),
        ([1.0, -0.5, 2.0], "returned -0.5: return 3 numbers"),
        (None, "returned nan: return 3 numbers"),
        (["so", "what", "?"], "raised ValueError: could not convert string"),
        (lambda predictors: predictors["no such"], "raised KeyError: 'no such'"),
    ],
)
async def test_a_rule_that_returns_no_scores_ends_the_run_in_one_line_that_names_it(rule, returns, said):
    with pytest.raises(PluginError, match=rf"^policy\.selection=rules_of_mine:by {said}"):
        await supervise(scripted(), selection=rule(returns))


@pytest.mark.parametrize(
    ("selection", "said"),
    [
        (
            "entropie",
            "'entropie' is none of score, entropy, earliest, random, and names no function",
        ),
        ("math:pi", "'math:pi' is none of"),
        ("no_such_module:by", "cannot load 'no_such_module:by': No module named"),
        ("math:no_such", "cannot load 'math:no_such': module 'math' has no attribute"),
    ],
)
def test_a_rule_that_is_none_is_refused_with_the_configuration(selection, said):
    with pytest.raises(ConfigError, match=rf"policy\.selection: .*{re.escape(said)}"):
        load_config(Path("configs/quickstart.yaml"), [f"policy.selection={selection}"])
