"""The statistics of `spot-async forecast`: against exact expectations, and by how often its intervals are right."""

from __future__ import annotations

import itertools
import math
import statistics

import msgspec
import numpy as np
import pytest

from spot_async.policies.targets import calibrated_target
from spot_async.telemetry.outcome_slope import MOST_RATIO, RatioSums
from spot_async.tools.forecast import values
from spot_async.tools.forecast.estimates import (
    Positions,
    decision_sums,
    estimate,
    limit,
    method_sums,
    place_sums,
    ratio,
    t_quantile,
)
from spot_async.tools.forecast.forecast import place_figures, reach, settled_gain
from spot_async.tools.forecast.measurement import (
    MeasuredPrompt,
    PolicyKeys,
    ProbedCandidate,
    ProbedPosition,
)

KEYS = PolicyKeys(gamma=1.0, beta=0.1, positions=2, probe_top_k=4, probes=1, gate=True)
PRIOR = np.array([0.5, 0.3, 0.2])
VALUES = np.array([0.2, 0.9, 0.0])


def scored_prompt(rewards, excesses):
    """Return a prompt whose rollouts ended so, and whose tokens the teacher scored so."""
    return MeasuredPrompt(
        problem_id="p",
        prompt_tokens=1,
        rollout_tokens=[1] * len(rewards),
        outcomes=[float(reward) for reward in rewards],
        scored=[RatioSums(1, 0.0, float(excess), 0, 0) for excess in excesses],
        positions=[],
        probe_requests=0,
        probe_tokens=0,
    )


def test_gains_of_opd_and_of_a_reward_are_those_of_sums_over_all_responses():
    """All responses of three tokens of a vocabulary of three, under two models with random tables, in float64."""
    random, length, tokens = np.random.default_rng(3), 3, range(3)
    rewards = {response: float(random.random() < 0.4) for response in itertools.product(tokens, repeat=length)}
    prefixes = [prefix for t in range(length) for prefix in itertools.product(tokens, repeat=t)]
    student, teacher = ({prefix: random.dirichlet([2.0] * 3) for prefix in prefixes} for _ in range(2))

    def chance(response, begun=0):
        return math.prod(student[response[:t]][response[t]] for t in range(begun, length))

    def value(prefix):
        return sum(rewards[each] * chance(each, len(prefix)) for each in rewards if each[: len(prefix)] == prefix)

    opd = reward = 0.0
    for prefix in prefixes:
        reached = math.prod(student[prefix[:t]][prefix[t]] for t in range(len(prefix)))
        of_tokens = np.array([value((*prefix, token)) for token in tokens])
        opd += reached * (teacher[prefix] - student[prefix]) @ of_tokens
        reward += reached * student[prefix] @ (of_tokens - student[prefix] @ of_tokens) ** 2

    excess = {
        each: sum(teacher[each[:t]][each[t]] / student[each[:t]][each[t]] - 1 for t in range(length))
        for each in rewards
    }
    found = {"opd": 0.0, "reward": 0.0}
    for pair in itertools.product(rewards, repeat=2):
        sums = method_sums([scored_prompt([rewards[each] for each in pair], [excess[each] for each in pair])])
        for name in found:
            found[name] += chance(pair[0]) * chance(pair[1]) * sums[name][0]
    assert found == pytest.approx({"opd": opd, "reward": reward}, abs=1e-12)
    assert abs(opd) > 0.01  # of random models it is some number


@pytest.mark.parametrize("knows_more", [True, False])
def test_intervals_of_opds_gain_cover_the_truth_in_95_of_100_forecasts(knows_more):
    """200 forecasts of 50 problems with 8 rollouts. A response is right if each of its 6 decisions is."""
    random, forecasts, rollouts = np.random.default_rng(17), 200, 8

    def population(prompts):
        student = random.beta(4, 1.5, (prompts, 6))
        better = random.beta(2, 2, (prompts, 1)) * (1 - student) if knows_more else random.normal(0, 0.03, (prompts, 6))
        return student, np.clip(student + better, 0.02, 0.999)

    student, teacher = population(20_000)
    others = student.prod(axis=1, keepdims=True) / student
    truth = ((teacher - student) * others).sum(axis=1).mean()
    covered = 0
    for _ in range(forecasts):
        student, teacher = (each[:, None] for each in population(50))
        is_right = random.random((50, rollouts, 6)) < student
        ratios = np.where(is_right, teacher / student, (1 - teacher) / (1 - student))
        rewards, excesses = is_right.all(axis=-1), (np.minimum(ratios, MOST_RATIO) - 1).sum(axis=-1)
        sums = method_sums([scored_prompt(*each) for each in zip(rewards, excesses, strict=True)])
        found = estimate(sums, ratio("opd", "contrasted"))
        covered += found.low <= truth <= found.high
    assert covered >= 180  # a true share of 95 % gives fewer than this once in 300 times


def every_outcome(of_values, probes):
    """Yield counts of correct probes of each candidate (k,), and their chance."""
    for counts in itertools.product(range(probes + 1), repeat=len(of_values)):
        chances = [
            math.comb(probes, c) * v**c * (1 - v) ** (probes - c) for c, v in zip(counts, of_values, strict=True)
        ]
        yield np.array(counts), math.prod(chances)


def expectation(figure, probes):
    """Return what `figure` (of prior, correct and judged) is on average over all outcomes of so many probes."""
    return sum(
        chance * figure(PRIOR[None], counts[None], np.full((1, 3), probes))[0]
        for counts, chance in every_outcome(VALUES, probes)
    )


@pytest.mark.parametrize("probes", [2, 5])
def test_variance_is_that_of_the_true_values(probes):
    true = PRIOR @ (VALUES - PRIOR @ VALUES) ** 2
    assert expectation(values.value_variance, probes) == pytest.approx(true, abs=1e-12)


@pytest.mark.parametrize("of_run", [1, 2])
@pytest.mark.parametrize("gamma", [0.5, 4.0])
def test_gain_and_kept_share_are_those_of_a_run_that_tilts_by_few_probes(gamma, of_run):
    gain = kept = 0.0
    for counts, chance in every_outcome(VALUES, of_run):
        target = calibrated_target(np.log(PRIOR), counts / of_run, gamma)
        gain += chance * ((target - PRIOR) @ VALUES)
        kept += chance * bool(counts.any())
    for probes in (of_run + 1, 4):
        found = expectation(lambda *table: values.gain(*table, gamma=gamma, probes=of_run), probes)
        assert found == pytest.approx(gain, abs=1e-12)
        assert expectation(lambda _, *table: values.kept(*table, of_run), probes) == pytest.approx(kept, abs=1e-12)


@pytest.mark.parametrize("probes", [2, 6])
def test_the_largest_gain_is_never_too_small_on_average_and_right_with_many_probes(probes):
    best = VALUES.max() - PRIOR @ VALUES
    assert expectation(values.most_gain, probes) >= best
    exact = np.round(VALUES * 10**9).astype(np.int64)
    assert values.most_gain(PRIOR[None], exact[None], np.full((1, 3), 10**9)) == pytest.approx(best)


def equal(random, prompts):
    """No candidate is better than another: all that seems so is the noise of the probes."""
    return np.broadcast_to(random.beta(1, 2, (prompts, 1, 1)), (prompts, 2, 4))


def different(random, prompts):
    return np.clip(random.beta(1, 2, (prompts, 1, 1)) * random.uniform(0.2, 2.0, (prompts, 2, 4)), 0, 1)


def rarely_better(random, prompts):
    """At one prompt in twenty one candidate always succeeds, and none does elsewhere: probes have no noise."""
    return np.where(np.arange(4) == 0, random.random((prompts, 1, 1)) < 0.05, 0.0) * np.ones((prompts, 2, 4))


def rarely_worse(random, prompts):
    """The same where all others always succeed: a forecast may well see no difference at all."""
    return 1.0 - rarely_better(random, prompts)[..., [1, 0, 2, 3]]


@pytest.mark.parametrize("prompts", [8, 50])
@pytest.mark.parametrize("population", [equal, different, rarely_better, rarely_worse])
def test_no_gain_is_above_the_limit_in_95_of_100_forecasts(population, prompts):
    """The truth is that of 20,000 prompts whose values are known."""
    random, forecasts, probes = np.random.default_rng(11), 200, 16

    def drawn(prompts):
        prior = random.dirichlet([1.0] * 4, (prompts, 2)).reshape(-1, 4)
        return prior, population(random, prompts).reshape(-1, 4)

    prior, true = drawn(20_000)
    truth = (true.max(axis=-1) - (prior * true).sum(axis=-1)).mean()
    held = 0
    for _ in range(forecasts):
        prior, true = drawn(prompts)
        gains = values.most_gain(prior, random.binomial(probes, true), np.full(true.shape, probes))
        held += limit(gains.reshape(-1, 2).sum(axis=-1), np.full(prompts, 2.0)) >= truth
    assert held >= 180  # a true share of 95 % gives fewer than this once in 300 times


def test_the_limit_is_the_textbooks_where_gains_are_all_or_nothing_and_near_the_mean_of_many():
    none, one = np.zeros(50), np.ones(50)
    assert limit(none, one) == pytest.approx(1 - 0.05 ** (1 / 50), abs=0.003)  # the rule of three, exactly
    three = np.concatenate([np.ones(3), np.zeros(47)])
    assert limit(three, one) == pytest.approx(0.1478, abs=0.005)  # Clopper and Pearson's for 3 of 50
    assert limit(np.full(5000, 0.1), np.ones(5000)) == pytest.approx(0.1, abs=0.003)
    assert limit(np.array([]), np.array([])) is None


def test_where_outcomes_are_too_many_to_list_many_are_drawn(monkeypatch):
    table = PRIOR[None], np.array([[3, 7, 1]]), np.array([[8, 8, 8]])
    listed = values.gain(*table, gamma=2.0, probes=3)
    monkeypatch.setattr(values, "MAX_OUTCOMES", 0)
    assert values.gain(*table, gamma=2.0, probes=3) == pytest.approx(listed, abs=0.02)
    assert values.gain(*table, gamma=2.0, probes=3) != listed


def places(random, prompts, probes=4):
    """Return prompts with 8 random positions each, and the true Var_p(V) (prompts, 8) there.

    The score goes where candidates differ, entropy and JS go anywhere, and the last two positions are in the answer.
    """
    prior = random.dirichlet([2.0] * 4, (prompts, 8))
    spread = random.beta(1, 3, (prompts, 8, 1))
    true = np.clip(0.5 + spread * random.normal(0, 0.5, (prompts, 8, 4)), 0, 1)
    variance = (prior * (true - (prior * true).sum(axis=-1, keepdims=True)) ** 2).sum(axis=-1)
    correct = random.binomial(probes, true)
    parts = {"score": spread[..., 0], "entropy": random.random((prompts, 8)), "divergence": random.random((prompts, 8))}
    measured = [
        MeasuredPrompt(
            problem_id=f"p{n}",
            prompt_tokens=1,
            rollout_tokens=[50],
            outcomes=[0.0],
            positions=[
                ProbedPosition(
                    position=5 * at,
                    sampled="x",
                    score_parts={name: float(part[n, at]) for name, part in parts.items()},
                    in_answer=at >= 6,
                    candidates=[
                        ProbedCandidate(
                            token="x", teacher=0.2, prior=prior[n, at, c], correct=int(correct[n, at, c]), judged=probes
                        )
                        for c in range(4)
                    ],
                )
                for at in range(8)
            ],
            probe_requests=32 * probes,
            probe_tokens=0,
        )
        for n in range(prompts)
    ]
    return measured, variance, parts


def test_each_rule_holds_what_is_there_and_an_oracle_no_more_than_the_best():
    measured, variance, parts = places(np.random.default_rng(29), 1500)
    sums = place_sums(measured, msgspec.structs.replace(KEYS, selection="random", positions=8))
    found = {name: estimate(sums, figure) for name, figure in place_figures().items()}

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
        assert abs(found[f"at_{rule}"].value - true) < 4 * found[f"at_{rule}"].standard_error
        difference = found[f"over_{rule}"]
        assert abs(difference.value - (true - truth["score"])) <= 4 * difference.standard_error
    assert truth["random"] < found["at_oracle"].value < best_two(variance)
    assert found["answer_share"].value == pytest.approx(0.25, abs=0.03)
    # On the same responses the error of a difference is smaller than that of two figures apart.
    apart = math.hypot(found["at_entropy"].standard_error, found["at_score"].standard_error)
    assert found["over_entropy"].standard_error < apart


@pytest.mark.long
def test_intervals_of_what_rules_hold_less_than_the_score_cover_the_truth():
    random = np.random.default_rng(31)
    keys = msgspec.structs.replace(KEYS, selection="random", positions=8)
    _, variance, parts = places(random, 20_000, probes=0)
    chosen = np.argsort(-parts["score"], axis=1)[:, :2]
    truth = variance.mean() - np.take_along_axis(variance, chosen, axis=1).mean()
    covered = 0
    for _ in range(100):
        measured, _, _ = places(random, 30)
        found = estimate(place_sums(measured, keys), place_figures()["over_random"])
        covered += found.low <= truth <= found.high
    assert covered >= 88  # a true share of 95 % gives fewer than this once in 250 times


def test_rules_are_compared_at_random_positions_with_scores_alone():
    measured, _, _ = places(np.random.default_rng(1), 3)
    keys = msgspec.structs.replace(KEYS, selection="random", positions=8)
    fewer = msgspec.structs.replace(keys, positions=3)
    assert place_sums(measured, fewer)["score_positions"].tolist() == [3, 3, 3]
    assert place_sums(measured, keys)["score_positions"].tolist() == [2, 2, 2]
    nothing = {"agreed": [0.0] * 3, "score_positions": [0.0] * 3}
    unscored = [
        msgspec.structs.replace(
            prompt, positions=[msgspec.structs.replace(each, score_parts={}) for each in prompt.positions]
        )
        for prompt in measured
    ]
    for prompts, other in ((measured, msgspec.structs.replace(keys, selection="score")), (unscored, keys)):
        sums = place_sums(prompts, other)
        assert {name: sums[name].tolist() for name in nothing} == nothing
        assert estimate(sums, place_figures()["over_entropy"]) is None


@pytest.mark.parametrize("weight", [0.3, 2.5, 30.0])
def test_the_two_losses_settle_where_the_forecast_says(weight):
    """Newton's method on the dense objective KL(student || prior) + weight * cross-entropy, in float64."""
    gamma, logits = 0.05, np.log(PRIOR)
    target = calibrated_target(np.log(PRIOR), VALUES, gamma)
    for _ in range(200):
        student = np.exp(logits) / np.exp(logits).sum()
        advantage = np.log(student / PRIOR)
        gradient = student * (advantage - student @ advantage) + weight * (student - target)
        fisher = (1 + weight) * (np.diag(student) - np.outer(student, student))
        logits = logits - np.linalg.pinv(fisher) @ gradient
    assert np.abs(gradient).max() < 1e-12
    sums = {"rollout_tokens": np.float64(weight * 2), "rollouts": np.float64(1.0)}
    keys = msgspec.structs.replace(KEYS, beta=1.0, positions=2)  # beta T / M is the weight
    settled = (student - PRIOR) @ VALUES / ((target - PRIOR) @ VALUES)
    assert reach(keys, sums) == pytest.approx(settled, rel=0.02)


def test_errors_of_means_and_ratios_are_the_textbooks():
    drawn = np.random.default_rng(0).normal(3.0, 2.0, 30)
    found = estimate({"sum": drawn, "count": np.ones(30)}, ratio("sum", "count"))
    assert found.value == pytest.approx(drawn.mean())
    assert found.standard_error == pytest.approx(statistics.stdev(drawn) / 30**0.5)
    even = estimate({"sum": np.concatenate([drawn, -drawn]), "count": np.ones(60)}, ratio("sum", "count"))
    assert even.high == pytest.approx(2.00100 * even.standard_error, rel=1e-4)  # t of 59
    assert even.low == pytest.approx(-even.high)
    assert t_quantile(4) == pytest.approx(2.77645, rel=0.01)
    assert estimate({"sum": drawn[:1], "count": np.ones(1)}, ratio("sum", "count")) is None
    assert estimate({"sum": drawn[:2], "count": np.array([1.0, 0.0])}, ratio("sum", "count")) is None


@pytest.mark.parametrize("hard", [0.0, 0.7])
def test_intervals_cover_the_truth_in_95_of_100_forecasts(hard):
    """200 forecasts of 50 prompts with two positions each; at `hard` of all prompts no candidate ever succeeds."""
    random, forecasts, probes = np.random.default_rng(7), 200, 16
    keys = msgspec.structs.replace(KEYS, beta=1.0)
    figures = {
        "value_variance": ratio("variance", "positions"),
        "kept_share": ratio("kept", "positions"),
        "gain": ratio("gain", "positions"),
        "settled_gain": lambda sums: settled_gain(keys, sums),
    }

    def population(prompts):
        ease = np.where(random.random(prompts) < hard, 0.0, random.beta(1, 2, prompts))
        of_candidates = np.clip(ease[:, None, None] * random.uniform(0.2, 2.0, (prompts, 2, 4)), 0, 1)
        prior = random.dirichlet([1.0] * 4, (prompts, 2))
        return prior.reshape(-1, 4), of_candidates.reshape(-1, 4), random.integers(20, 80, prompts).astype(float)

    def sums(prior, correct, judged, tokens):
        owner = np.repeat(np.arange(len(tokens)), 2)
        positions = Positions(prior, np.full_like(prior, np.nan), correct, judged, owner, len(tokens))
        others = {
            "variance": positions.per_prompt(values.value_variance(prior, correct, judged)),
            "rollout_tokens": tokens,
            "rollouts": np.ones(len(tokens)),
        }
        return decision_sums(positions, keys) | others

    prior, true, tokens = population(20_000)
    exact = 1_000_000  # so many probes that shares are the values; what training would draw is listed all the same
    truth_sums = sums(prior, np.round(true * exact).astype(np.int64), np.full(true.shape, exact), tokens)
    truths = {name: figure({key: each.sum() for key, each in truth_sums.items()}) for name, figure in figures.items()}
    covered = dict.fromkeys(figures, 0)
    for _ in range(forecasts):
        prior, true, tokens = population(50)
        correct, judged = random.binomial(probes, true), np.full(true.shape, probes)
        measured = sums(prior, correct, judged, tokens)
        for name, figure in figures.items():
            found = estimate(measured, figure)
            covered[name] += found.low <= truths[name] <= found.high
    # The true share of 95 % gives fewer than 180 of 200 once in 300 times.
    assert min(covered.values()) >= 180, covered
