"""Bounds hold however small the student's probabilities are: down to -70 nats, and where float64 ends."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from truncated_rows import PARTS, teacher_rows, top

from spot_async.policies.acquisition import score_positions, select_positions
from spot_async.policies.truncated.certainty import Evidence
from spot_async.policies.truncated.intervals import Interval, gap_bounds
from spot_async.policies.truncated.score_bounds import (
    ScoreRule,
    asked_student,
    score_bounds,
    served_student,
)


def test_a_candidate_far_smaller_than_the_others_is_not_lost_beside_them():
    """The teacher's noise leaves open whether its second candidate is token 1 or 2, which the student tells apart."""
    served = np.log([[0.5, 0.249, 0.25, 0.0006, 0.0004]])
    student = np.log([[1e-28, 1e-10, 1e-28, 1.0, 1e-30]])
    everything = np.arange(5)[None]
    bounds = score_bounds(
        teacher_rows(served, 4, 0.02), asked_student(everything, student.astype(np.float32)), ScoreRule(2, 5)
    )
    for candidates in ([0, 2], [0, 1]):  # of the rows that may count, the served one and one with 1 and 2 exchanged
        teacher = np.log([[0.5, 0.25]])
        entropy = -(np.exp(served) * served).sum(-1)
        truth = score_positions(teacher, student[:, candidates], entropy, 5)
        for name, values in truth._asdict().items():
            interval = getattr(bounds, name)
            assert interval.lower <= values <= interval.upper, (name, candidates)


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    candidates=st.integers(1, 16),
    unknown_nats=st.sampled_from([0.0, 1e-3, 0.1, 2.0]),
    depth_nats=st.sampled_from([0.1, 5.0, 60.0]),
)
def test_js_and_the_gap_lie_in_their_bounds_wherever_the_policies_lie_in_theirs(
    seed, candidates, unknown_nats, depth_nats
):
    draw = np.random.default_rng(seed)
    p = np.exp(-depth_nats * draw.random((40, candidates)))
    p /= p.sum(axis=-1, keepdims=True)
    q = np.exp(-depth_nats * draw.random((40, candidates)))
    q *= (draw.random(40) / q.sum(axis=-1))[:, None]
    coverage = q.sum(axis=-1)
    (p_box, q_box, coverage_box) = (
        (each * np.exp(-unknown_nats * draw.random(each.shape)), each * np.exp(unknown_nats * draw.random(each.shape)))
        for each in (p, q, coverage)
    )
    divergence, gap = gap_bounds(p_box, q_box, Interval(coverage_box[0], np.minimum(coverage_box[1], 1.0)), 0.3, 0.7)
    for t in range(len(p)):
        share = q[t] / math.fsum(q[t])
        entropies = [-math.fsum(x * math.log2(x) for x in row) for row in ((p[t] + share) / 2.0, p[t], share)]
        truth = entropies[0] - (entropies[1] + entropies[2]) / 2.0
        assert divergence.lower[t] <= truth + 1e-14
        assert truth - 1e-14 <= divergence.upper[t]
        assert gap.lower[t] <= 0.3 * (1.0 - math.fsum(q[t])) + 0.7 * truth <= gap.upper[t]


def test_a_share_that_is_rounded_away_beside_another_has_its_part():
    """A share of 2^-57 beside one of .1: their sum is rounded up or down."""
    teacher, student = np.array([[0.9, 0.1]]), np.array([[1.0, 2.0**-57 * (1.0 - 8e-12)]])
    divergence, _ = gap_bounds((teacher, teacher), (student, student), Interval(np.ones(1), np.ones(1)), 0.0, 1.0)
    truth = score_positions(np.log(teacher), np.log(student), np.ones(1), 2).divergence
    assert divergence.lower <= truth <= divergence.upper


def test_probabilities_too_small_for_a_float_have_any_shape():
    teacher, student = np.log([[0.89, 0.1, 0.01]]), np.array([[-740.0, -700.0, 0.0]])
    bounds = score_bounds(teacher_rows(teacher, 3, 0.0), asked_student(np.arange(3)[None], student), ScoreRule(2, 3))
    truth = score_positions(teacher[:, :2], student[:, :2], np.ones(1), 3)
    assert bounds.divergence.lower <= truth.divergence <= bounds.divergence.upper
    assert bounds.gap.lower <= truth.gap <= bounds.gap.upper


def test_a_mass_that_float64_rounds_away_is_no_certain_score():
    """The student covers all but 6e-17: computed exactly the score is 0, and such a position is never chosen."""
    teacher, student = np.log([[0.5, 0.5 - 1e-9, 1e-9]]), np.array([[-50.0, 0.0, -37.4]])
    nothing = np.zeros((1, 0))
    told = served_student(nothing, nothing, np.array([2]), student[:, 2], 0.0)
    rule = ScoreRule(1, 3, 1.0, 0.0, "HC-Mass")
    evidence = Evidence(teacher_rows(teacher, 3, 0.02), told, rule, 1)
    assert not evidence.decision.chosen.any()


def test_exact_replies_are_float32_and_may_sum_to_more_than_what_other_tokens_leave():
    others = 7e-9
    student = np.log([[0.6003, 1.0 - 0.6003 - others, others]])
    replies = student[:, :2].astype(np.float32).astype(np.float64)
    nothing, teacher = np.zeros((1, 0)), np.log([[0.6, 0.3, 0.1]])
    told = served_student(nothing, nothing, np.array([2]), student[:, 2], 0.0)
    coverage = score_bounds(teacher_rows(teacher, 3, 0.0), told, ScoreRule(2, 3)).coverage
    assert coverage.lower <= score_positions(teacher[:, :2], replies, np.ones(1), 3).coverage <= coverage.upper


DEPTH_NATS = 70.0


def deep_logits(draw, rows, vocab_size):
    """Teachers with near ties, and students that spread their log-probabilities evenly over `DEPTH_NATS`."""
    level = draw.integers(0, 4, (rows, vocab_size)) * draw.uniform(0.0, 6.0, (rows, 1))
    teacher = -level + draw.choice([0.0, 1e-3, 1e-2], (rows, 1)) * draw.normal(size=level.shape)
    student = -DEPTH_NATS * draw.choice([draw.random(level.shape), draw.integers(0, 4, level.shape) / 3])
    return teacher, student


@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.02, 0.2])
def test_no_bound_is_false_and_no_choice_wrong_down_to_seventy_nats(noise, dense_scores, recomputed):
    positions, certain = 200, 0
    for seed in range(12):
        draw = np.random.default_rng(seed)
        vocab_size, lambda_mass = int(draw.integers(3, 12)), float(draw.choice([0.0, 0.5, 1.0]))
        k, variant = int(draw.integers(1, min(vocab_size, 6))), str(draw.choice(["HG", "HC-Mass", "Full"]))
        teacher, student = (recomputed(each, 0.0, 0) for each in deep_logits(draw, positions, vocab_size))
        again = [recomputed(each, noise, seed, pattern) for each, pattern in ((teacher, "signs"), (student, "even"))]
        rows = teacher_rows(again[0], min(k + int(draw.integers(0, 3)), vocab_size), noise)
        sampled = draw.integers(0, vocab_size, positions)
        known = np.take_along_axis(again[1], sampled[:, None], -1)[:, 0].astype(np.float32)
        of_student = [
            served_student(*top(again[1], min(shown, vocab_size)), sampled, known, noise) for shown in (0, 2, 60)
        ]
        exact = np.take_along_axis(student, rows.ids, -1).astype(np.float32)
        truth = dense_scores(teacher, student, k, lambda_mass)
        for told in (*of_student, asked_student(rows.ids, exact)):
            rule = ScoreRule(k, vocab_size, lambda_mass, 1.0 - lambda_mass, variant)
            bounds = score_bounds(rows, told, rule)
            for name, values in [*((part, truth[part]) for part in PARTS), ("score", truth[variant])]:
                interval = getattr(bounds, name)
                false = (interval.lower > values) | (values > interval.upper)
                assert not false.any(), (seed, name, np.flatnonzero(false))
            decision = Evidence(rows, told, rule, 3).decision
            best = np.isin(np.arange(positions), select_positions(truth[variant], np.ones(positions, bool), 3))
            assert not (decision.chosen & ~best).any(), seed
            assert not (decision.ruled_out & best).any(), seed
            certain += int(decision.ruled_out.sum())
    assert certain > 0
