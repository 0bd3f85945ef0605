"""Intervals from truncated distributions hold the exact values, and what they decide is right."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from truncated_rows import PARTS, assert_held, teacher_rows, top

from spot_async.models.entropy import entropy_bounds
from spot_async.policies.acquisition import score_positions, select_positions
from spot_async.policies.truncated.certainty import Evidence, decide
from spot_async.policies.truncated.intervals import Interval, normalized_entropy
from spot_async.policies.truncated.score_bounds import (
    ScoreRule,
    TeacherRows,
    score_bounds,
    served_student,
)
from spot_async.types import ScoredPositions

VARIANTS = ("H", "HC", "HG", "HC-Mass", "Full")
PATTERNS = ("even", "signs", "apart")


def served(teacher, student, sampled, *, teacher_k, student_k, teacher_noise=0.0, student_noise=0.0):
    """What servers would tell of these rows."""
    own = student[np.arange(len(student)), sampled].astype(np.float32)
    return teacher_rows(teacher, teacher_k, teacher_noise), served_student(
        *top(student, student_k), sampled, own, student_noise
    )


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.integers(2, 150),
    k=st.integers(1, 16),
    extra=st.integers(0, 60),
    student_k=st.integers(0, 60),
    noises=st.tuples(*[st.sampled_from([0.0, 1e-3, 0.02, 0.2])] * 2),
    pattern=st.sampled_from(PATTERNS),
    variant=st.sampled_from(VARIANTS),
    lambda_mass=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
)
@example(1081, 2, 1, 0, 0, (0.0, 0.0), "even", "HG", 0.0)  # the bound of a sum was rounded down by one bit
def test_every_interval_holds_what_the_whole_distributions_give(
    dense_scores, recomputed, seed, vocab_size, k, extra, student_k, noises, pattern, variant, lambda_mass
):
    draw = np.random.default_rng(seed)
    k, student_k = min(k, vocab_size), min(student_k, vocab_size)
    scale = draw.uniform(0.1, 9.0, (12, 1))
    teacher = recomputed(scale * draw.standard_t(3, (12, vocab_size)), 0.0, 0)
    student = recomputed(0.9 * teacher + draw.uniform(0, 4, (12, 1)) * draw.normal(size=teacher.shape), 0.0, 0)
    again = [recomputed(rows, noise, seed, pattern) for rows, noise in zip((teacher, student), noises, strict=True)]
    told = served(
        *again,
        draw.integers(0, vocab_size, 12),
        teacher_k=min(k + extra, vocab_size),
        student_k=student_k,
        teacher_noise=noises[0],
        student_noise=noises[1],
    )
    bounds = score_bounds(*told, ScoreRule(k, vocab_size, lambda_mass, 1 - lambda_mass, variant))
    truth = dense_scores(teacher, student, k, lambda_mass)
    assert_held(bounds, truth, variant, *PARTS[: 2 if variant in ("H", "HC") else 5])  # two ask no student


def test_intervals_are_tight_where_little_is_missing(heavy_tailed, dense_scores):
    teacher, student = heavy_tailed(1, 300, 3000)
    told = served(teacher, student, teacher.argmax(-1), teacher_k=64, student_k=64)
    bounds = score_bounds(*told, ScoreRule(16, 3000))
    assert np.median(bounds.gap.upper - bounds.gap.lower) < 1e-4
    broad = dense_scores(teacher, student, 16)["entropy"] > 0.05
    assert np.median(bounds.score.upper[broad] / bounds.score.lower[broad]) < 1.3


def test_noise_moves_an_entropy_by_a_factor_however_broad_the_row(recomputed):
    draw = np.random.default_rng(0)
    rows = recomputed(draw.uniform(0.05, 6, (400, 1)) * draw.normal(size=(400, 500)), 0.0, 0)
    entropy = -(np.exp(rows) * rows).sum(-1)
    for pattern, noise in itertools.product(PATTERNS, (0.01, 0.1, 1.0)):
        other = recomputed(rows, noise, 1, pattern)
        others = -(np.exp(other) * other).sum(-1)
        interval = normalized_entropy(others, others, True, noise, 500)
        assert ((interval.lower <= entropy / math.log(500)) & (entropy / math.log(500) <= interval.upper)).all()


def test_what_is_known_exactly_has_the_very_score_of_select_positions_so_that_ties_are_ties(heavy_tailed):
    teacher, student = (rows[[0, 1, 1, 2]] for rows in heavy_tailed(2, 3, 200))
    ids, logprobs = top(teacher, 16)
    entropy = -(np.exp(teacher) * teacher).sum(-1).astype(np.float32)
    rows = TeacherRows(ids, logprobs.astype(float), entropy.astype(float), entropy.astype(float), *exactly(4))
    evidence = Evidence(rows, served_student(*top(student, 4), ids[:, 0], logprobs[:, 0], 0.01), ScoreRule(16, 200), 4)
    values = np.take_along_axis(student, ids, -1).astype(np.float32)
    evidence.take_student(np.arange(4), values)
    score = score_positions(logprobs, values, entropy, 200).score
    assert evidence.bounds.score.lower.tolist() == evidence.bounds.score.upper.tolist() == score.tolist()
    assert evidence.certain
    assert decide(Interval(score, score), 1).chosen.sum() == 1


def exactly(count):
    return np.ones(count, bool), np.zeros(count), np.zeros(count)


LEVELS = st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.4])


@settings(max_examples=300)
@given(ends=st.lists(st.tuples(LEVELS, LEVELS), max_size=5), budget=st.integers(0, 3))
def test_decided_is_what_all_scores_within_the_intervals_agree_on_and_nothing_else_is_left_open(ends, budget):
    lower, upper = (np.array([f(pair) for pair in ends]) for f in (min, max))
    decision = decide(Interval(lower, upper), budget)
    every = [
        set(select_positions(np.array(scores), np.ones(len(ends), bool), budget).tolist())
        for scores in itertools.product(*[sorted({low, high}) for low, high in zip(lower, upper, strict=True)])
    ]
    always = set.intersection(*every) if every else set()
    assert set(np.flatnonzero(decision.chosen).tolist()) == always
    assert set(np.flatnonzero(~decision.ruled_out).tolist()) == set.union(*every)


@pytest.mark.parametrize(
    ("top_k", "noise"), [(20, 0.02), *(pytest.param(*each, marks=pytest.mark.long) for each in ((64, 0.02), (20, 0.0)))]
)
def test_certain_choices_are_the_exact_ones_and_asking_makes_all_of_them_certain(
    heavy_tailed, dense_scores, recomputed, top_k, noise
):
    """Exact: from whole rows. Asked for on purpose, servers give those; what they serve in bulk is off by the noise."""
    vocab_size, k, budget = 1500, 16, 2
    certain_at_once, all_positions = 0, 0
    for seed in range(12):
        teacher, student = heavy_tailed(100 + seed, 200, vocab_size)
        exact = select_positions(dense_scores(teacher, student, k)["Full"], np.ones(200, bool), budget)
        told = served(
            recomputed(teacher, noise, seed),
            recomputed(student, noise, seed + 50),
            student.argmax(-1),
            teacher_k=top_k,
            student_k=top_k,
            teacher_noise=noise,
            student_noise=noise,
        )
        evidence = Evidence(*told, ScoreRule(k, vocab_size), budget, teacher_top_k=vocab_size, ask_student=True)
        if evidence.certain:
            certain_at_once += 1
            assert evidence.selected.tolist() == exact.tolist()
        asked = set()
        while questions := evidence.questions(np.ones(200, bool), 4):
            assert set(questions.student.tolist()) <= set(evidence.undecided.tolist())
            for width, rows in questions.teacher.items():
                ids, logprobs = top(teacher[rows], width)
                entropy = -(np.exp(teacher[rows]) * teacher[rows]).sum(-1)
                lower, upper = entropy_bounds(logprobs, vocab_size) if width < vocab_size else (entropy, entropy)
                reply = ScoredPositions(topk_ids=ids, topk_logprobs=logprobs, entropy_lower=lower, entropy_upper=upper)
                evidence.take_teacher(rows, reply, width)
                asked |= set(rows.tolist())
            if len(rows := questions.student):
                ids = evidence.teacher.ids[rows, :k]
                evidence.take_student(rows, np.take_along_axis(student[rows], ids, -1).astype(np.float32))
                asked |= set(rows.tolist())
        assert evidence.certain
        assert evidence.selected.tolist() == exact.tolist()
        all_positions += len(asked)
    assert certain_at_once >= 1
    assert all_positions <= 12 * 8  # of 12 x 200


def test_what_the_teacher_only_bounds_stays_open_when_only_the_student_can_be_asked(heavy_tailed, recomputed):
    open_ends = 0
    for seed in range(8):
        teacher, student = heavy_tailed(seed, 200, 1500)
        told = served(teacher, student, student.argmax(-1), teacher_k=20, student_k=20)
        evidence = Evidence(*told, ScoreRule(16, 1500), 2, ask_student=True)
        while questions := evidence.questions(np.ones(200, bool), 4):
            assert not questions.teacher
            rows = questions.student
            ids = evidence.teacher.ids[rows, :16]
            evidence.take_student(rows, np.take_along_axis(student[rows], ids, -1).astype(np.float32))
        open_ends += not evidence.certain
        assert len(evidence.selected) == 2  # midpoints
    assert open_ends > 0


def test_impossible_tokens_and_places_a_server_left_empty_are_ordinary(dense_scores):
    with np.errstate(divide="ignore"):
        teacher = np.log(np.array([[0.7, 0.3, 0.0, 0.0, 0.0], [0.5, 0.2, 0.2, 0.1, 0.0]]))
        student = np.log(np.array([[0.0, 0.6, 0.4, 0.0, 0.0], [0.25, 0.25, 0.2, 0.2, 0.1]]))
    truth = dense_scores(np.maximum(teacher, -800.0), np.maximum(student, -800.0), 3)
    for noise in (0.0, 0.02):
        told = served(
            teacher, student, np.array([1, 0]), teacher_k=4, student_k=3, teacher_noise=noise, student_noise=noise
        )
        assert_held(score_bounds(*told, ScoreRule(3, 5)), truth, "Full", off=1e-12)
    ids, logprobs = np.array([[3, 0]]), np.array([[math.log(0.2), -math.inf]])
    padded = served_student(ids, logprobs, np.array([4]), np.array([math.log(0.1)]), 0.0)
    assert padded.cap[0] == padded.missing[0] == pytest.approx(0.7, abs=1e-5)


def test_a_student_without_mass_on_the_candidates_has_the_largest_divergence(dense_scores):
    with np.errstate(divide="ignore"):
        teacher, student = np.log([[0.5, 0.3, 0.1, 0.1]]), np.log([[0.0, 0.0, 0.5, 0.5]])
    told = served(np.log([[0.5, 0.3, 0.1, 0.1]]), student, np.array([2]), teacher_k=4, student_k=4)
    bounds = score_bounds(*told, ScoreRule(2, 4))
    assert dense_scores(teacher, np.maximum(student, -800.0), 2)["divergence"][0] == 1.0
    assert bounds.divergence.upper[0] == 1.0
    assert bounds.gap.upper[0] == pytest.approx(1.0, abs=1e-5)


def test_candidates_that_the_teacher_renames_are_asked_of_the_student_again(dense_scores):
    """Two tokens at the end of the teacher's best stand closer than its noise, and the student tells them apart."""
    teacher = np.log([[0.5, 0.2, 0.101, 0.099, 0.1 / 2, 0.1 / 2]])
    student = np.log([[0.3, 0.1, 0.1, 0.4, 0.05, 0.05]])
    first = np.log([[0.5, 0.2, 0.099, 0.101, 0.1 / 2, 0.1 / 2]])
    truth = dense_scores(teacher, student, 3)
    told = served(first, student, np.array([0]), teacher_k=4, student_k=5, teacher_noise=0.05, student_noise=0.01)
    evidence = Evidence(*told, ScoreRule(3, 6), 1, teacher_top_k=6, ask_student=True)

    assert_held(evidence.bounds, truth, "Full", off=1e-7)
    assert evidence.teacher.ids[0, :3].tolist() == [0, 1, 3]
    evidence.take_student(np.array([0]), student[:, [0, 1, 3]])
    assert_held(evidence.bounds, truth, "Full", off=1e-7)
    ids, logprobs = top(teacher, 6)
    entropy = -(np.exp(teacher) * teacher).sum(-1)
    reply = ScoredPositions(topk_ids=ids, topk_logprobs=logprobs, entropy_lower=entropy, entropy_upper=entropy)
    evidence.take_teacher(np.array([0]), reply, 6)
    assert_held(evidence.bounds, truth, "Full", off=1e-7)
    assert not evidence.student.is_exact_at(evidence.teacher.ids[:, :3]).any()
    evidence.take_student(np.array([0]), student[:, [0, 1, 2]])
    assert evidence.bounds.score.lower[0] == evidence.bounds.score.upper[0] == pytest.approx(truth["Full"][0], abs=1e-6)
