"""The outcome-calibrated target has the properties that the paper's appendix proves."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spot_async.policies.targets import Branch, calibrated_target
from spot_async.types import Judgement, Verdict

EXAMPLES = settings(max_examples=80)


@st.composite
def probes(draw, *, binary=False):
    """Teacher log-probabilities as served (not renormalised) and candidate values of one position."""
    k = draw(st.integers(2, 6))
    logprobs = np.array(draw(st.lists(st.floats(-12, 0), min_size=k, max_size=k))) - draw(st.floats(0, 5))
    value = st.sampled_from([0.0, 1.0]) if binary else st.floats(0, 1)
    values = np.array(draw(st.lists(value, min_size=k, max_size=k)))
    return logprobs, values


gammas = st.floats(0.01, 20)


def prior(logprobs):
    weights = np.array([math.exp(x - max(logprobs)) for x in logprobs])
    return weights / math.fsum(weights)


def kl(rho, p):
    return math.fsum(a * math.log(a / b) for a, b in zip(rho, p, strict=True) if a > 0)


def mean(rho, values):
    return math.fsum(rho * values)


def variance(rho, values):
    return mean(rho, (values - mean(rho, values)) ** 2)


@EXAMPLES
@given(probe=probes(), gamma=gammas)
def test_target_is_the_tilted_prior_of_a_dense_reference(probe, gamma):
    logprobs, values = probe
    unnormalized = [math.exp(x) * math.exp(gamma * v) for x, v in zip(logprobs, values, strict=True)]
    expected = [u / math.fsum(unnormalized) for u in unnormalized]
    np.testing.assert_allclose(calibrated_target(logprobs, values, gamma), expected, atol=1e-12)


@EXAMPLES
@given(probe=probes(), gamma=gammas, seed=st.integers(0, 2**32))
def test_no_competitor_beats_the_closed_form(probe, gamma, seed):
    logprobs, values = probe
    p, rho = prior(logprobs), calibrated_target(logprobs, values, gamma)
    best = mean(rho, values) - kl(rho, p) / gamma
    rng = np.random.default_rng(seed)
    competitors = [rng.dirichlet(np.full(len(p), alpha)) for alpha in (0.1, 1.0, 10.0)]
    competitors += [p, np.eye(len(p))[np.argmax(values)]]
    competitors += [0.99 * rho + 0.01 * other for other in competitors]  # neighbours, where a slip would show
    for other in competitors:
        assert mean(other, values) - kl(other, p) / gamma <= best + 1e-9


@EXAMPLES
@given(probe=probes(), gamma=gammas, seed=st.integers(0, 2**32))
def test_gibbs_identity(probe, gamma, seed):
    logprobs, values = probe
    p, target = prior(logprobs), calibrated_target(logprobs, values, gamma)
    other = np.random.default_rng(seed).dirichlet(np.ones(len(p)))
    log_partition = math.log(math.fsum(p * np.exp(gamma * values)))
    left = mean(other, values) - kl(other, p) / gamma
    assert left == pytest.approx((log_partition - kl(other, target)) / gamma, abs=1e-8)


@EXAMPLES
@given(probe=probes(), gamma=gammas, seed=st.integers(0, 2**32))
def test_no_competitor_in_the_same_trust_region_has_a_higher_value(probe, gamma, seed):
    logprobs, values = probe
    p, target = prior(logprobs), calibrated_target(logprobs, values, gamma)
    radius = kl(target, p)
    for other in np.random.default_rng(seed).dirichlet(np.ones(len(p)), size=5):
        # Pull the competitor towards the prior until it lies in the region.
        share = next(s for s in np.linspace(1, 0, 101) if kl(s * other + (1 - s) * p, p) <= radius + 1e-15)
        assert mean(share * other + (1 - share) * p, values) <= mean(target, values) + 1e-7


@EXAMPLES
@given(probe=probes(), gamma=st.floats(0.05, 10))
def test_value_and_divergence_rise_with_gamma_at_the_stated_rates(probe, gamma):
    logprobs, values = probe
    p = prior(logprobs)
    step = 1e-4
    before, at, after = (calibrated_target(logprobs, values, gamma + d) for d in (-step, 0.0, step))
    assert mean(after, values) >= mean(before, values) - 1e-12
    assert kl(after, p) >= kl(before, p) - 1e-12
    spread = variance(at, values)
    assert (mean(after, values) - mean(before, values)) / (2 * step) == pytest.approx(spread, abs=1e-6)
    assert (kl(after, p) - kl(before, p)) / (2 * step) == pytest.approx(gamma * spread, abs=1e-6)


def test_kl_budget_has_diminishing_returns():
    logprobs, values = np.log([0.5, 0.3, 0.15, 0.05]), np.array([0.0, 1.0, 0.5, 1.0])
    p = prior(logprobs)
    path = [calibrated_target(logprobs, values, gamma) for gamma in np.linspace(0.1, 8, 80)]
    gains = np.diff([mean(rho, values) for rho in path]) / np.diff([kl(rho, p) for rho in path])
    assert (np.diff(gains) < 0).all()


@EXAMPLES
@given(probe=probes(), gamma=gammas)
def test_density_ratio_stays_within_the_teacher_anchor(probe, gamma):
    logprobs, values = probe
    log_ratio = np.log(calibrated_target(logprobs, values, gamma)) - np.log(prior(logprobs))
    assert np.abs(log_ratio).max() <= gamma * np.ptp(values) + 1e-9


@EXAMPLES
@given(probe=probes(), gamma=gammas)
def test_value_gain_lies_between_kl_over_gamma_and_pinskers_bound(probe, gamma):
    logprobs, values = probe
    p, target = prior(logprobs), calibrated_target(logprobs, values, gamma)
    gain, divergence = mean(target, values) - mean(p, values), max(kl(target, p), 0.0)
    assert gain >= divergence / gamma - 1e-9
    # Rounding of 1e-16 in the divergence is 1e-8 under its root.
    assert gain <= np.ptp(values) * math.sqrt(divergence / 2) + 1e-7


@EXAMPLES
@given(probe=probes(binary=True), gamma=gammas)
def test_binary_outcomes_move_the_odds_by_e_gamma_and_nothing_inside_a_group(probe, gamma):
    logprobs, values = probe
    p, target = prior(logprobs), calibrated_target(logprobs, values, gamma)
    right = values == 1.0
    if right.all() or not right.any():
        np.testing.assert_allclose(target, p, atol=1e-12)
        return
    before, after = p[right].sum() / p[~right].sum(), target[right].sum() / target[~right].sum()
    assert after / before == pytest.approx(math.exp(gamma), rel=1e-9)
    for group in (right, ~right):
        np.testing.assert_allclose(target[group] / target[group].sum(), p[group] / p[group].sum(), rtol=1e-9)
    bernoulli = [np.array([q[right].sum(), q[~right].sum()]) for q in (target, p)]
    assert kl(target, p) == pytest.approx(kl(*bernoulli), abs=1e-9)


@EXAMPLES
@given(probe=probes(), gamma=gammas)
def test_a_ranking_is_reversed_only_past_the_evidence_threshold(probe, gamma):
    logprobs, values = probe
    log_target = np.log(calibrated_target(logprobs, values, gamma))
    for v in range(len(values)):
        for u in range(len(values)):
            margin = gamma * (values[v] - values[u]) - (logprobs[u] - logprobs[v])
            assert log_target[v] - log_target[u] == pytest.approx(margin, abs=1e-9)


@EXAMPLES
@given(probe=probes(), gamma=gammas, shift=st.floats(-50, 50))
def test_a_uniform_shift_of_the_rewards_changes_nothing(probe, gamma, shift):
    logprobs, values = probe
    np.testing.assert_allclose(
        calibrated_target(logprobs, values + shift, gamma), calibrated_target(logprobs, values, gamma), atol=1e-11
    )


@EXAMPLES
@given(probe=probes(), gamma=gammas)
def test_a_common_factor_of_the_teacher_cancels_even_where_it_underflows(probe, gamma):
    logprobs, values = probe
    np.testing.assert_allclose(
        calibrated_target(logprobs - 5000.0, values, gamma), calibrated_target(logprobs, values, gamma), atol=1e-11
    )


@EXAMPLES
@given(probe=probes())
def test_gamma_zero_is_the_renormalised_teacher_exactly_and_its_limit(probe):
    logprobs, values = probe
    at_zero = calibrated_target(logprobs, values, 0.0)
    np.testing.assert_allclose(at_zero, prior(logprobs), atol=1e-15)
    assert (at_zero == calibrated_target(logprobs, np.zeros_like(values), 0.0)).all()
    np.testing.assert_allclose(calibrated_target(logprobs, values, 1e-9), at_zero, atol=1e-8)


@EXAMPLES
@given(probe=probes(binary=True), gamma=st.sampled_from([1e3, 1e6, 1e300]))
def test_huge_gamma_is_the_teacher_restricted_to_the_best_candidates(probe, gamma):
    logprobs, values = probe
    limit = np.where(values == values.max(), prior(logprobs), 0.0)
    np.testing.assert_allclose(calibrated_target(logprobs, values, gamma), limit / limit.sum(), atol=1e-12)


def test_rows_are_calibrated_independently_and_sum_to_one():
    rng = np.random.default_rng(0)
    logprobs, values = rng.normal(size=(3, 2, 4)) * 5, rng.uniform(size=(3, 2, 4))
    targets = calibrated_target(logprobs, values, 1.0)
    np.testing.assert_allclose(targets.sum(axis=-1), 1.0, atol=1e-15)
    np.testing.assert_array_equal(targets[2, 1], calibrated_target(logprobs[2, 1], values[2, 1], 1.0))


def test_a_candidate_the_teacher_rules_out_stays_ruled_out():
    np.testing.assert_allclose(
        calibrated_target([math.log(0.6), math.log(0.2), -math.inf], [0.0, 0.0, 1.0], 2.0), [0.75, 0.25, 0.0]
    )


@pytest.mark.parametrize("gamma", [-1.0, math.inf, math.nan])
def test_a_gamma_without_meaning_is_refused(gamma):
    with pytest.raises(ValueError, match="gamma must be finite"):
        calibrated_target([0.0, -1.0], [0.0, 1.0], gamma)


def branch_of(logprobs, rewards):
    """A position whose candidates' probes got these rewards; None: no verdict."""
    judged = [
        [Judgement(Verdict.ERROR) if r is None else Judgement(Verdict.UNJUDGED, r) for r in each] for each in rewards
    ]
    return Branch(
        position=0,
        candidate_ids=np.arange(len(logprobs), dtype=np.int32),
        teacher_logprobs=np.array(logprobs, dtype=np.float32),
        judgements=judged,
        continuations=[],
        gamma=1.0,
    )


@pytest.mark.parametrize("probes", [2, 3])
def test_the_variance_of_values_is_on_average_that_of_the_true_ones(probes):
    chances, prizes = np.array([0.9, 0.2, 0.5]), (2.0, 0.0)  # of the first of two rewards, by candidate
    logprobs, expected = np.log([0.5, 0.3, 0.2]), 0.0
    for won in itertools.product((0, 1), repeat=3 * probes):
        table = np.array(won).reshape(3, probes)
        chance = np.where(table == 0, chances[:, None], 1 - chances[:, None]).prod()
        expected += chance * branch_of(logprobs, [[prizes[i] for i in row] for row in table]).value_variance
    assert expected == pytest.approx(variance(prior(logprobs), 2 * chances), abs=1e-6)


def test_one_probe_with_evidence_of_a_candidate_shows_no_variance():
    logprobs = [-1.0, -2.0]
    assert branch_of(logprobs, [[1.0], [0.0]]).value_variance is None
    assert branch_of(logprobs, [[1.0, 1.0], [0.0, None]]).value_variance is None
    assert branch_of(logprobs, [[1.0, 1.0], [0.0, 0.0]]).value_variance == pytest.approx(
        variance(prior(logprobs), np.array([1, 0]))
    )
