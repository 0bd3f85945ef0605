"""Selections under the noise of 16 bits are wrong no more often than is said, against whole rows in float64."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from truncated_rows import assert_held, teacher_rows, top

from spot_async.models.precision import NORMAL_QUANTILE, SURE_NATS
from spot_async.policies.acquisition import select_positions
from spot_async.policies.truncated.certainty import Evidence
from spot_async.policies.truncated.noise import ERROR_PROBABILITY, split
from spot_async.policies.truncated.score_bounds import ScoreRule, score_bounds, served_student

VOCAB, POSITIONS, CANDIDATES, BUDGET, SERVED, RESPONSES = 600, 60, 16, 2, 250, 12
NATS = (0.02, 0.05, 0.12)
KINDS = ("rounded", "normal", "hidden")
NOISE = pytest.mark.parametrize(  # each size and each kind once, and their other pairs in the long tests
    ("nats", "kind"),
    [
        pytest.param(nats, kind, marks=[pytest.mark.long] * (size != number))
        for size, nats in enumerate(NATS)
        for number, kind in enumerate(KINDS)
    ],
)


def noisy(logprobs, nats, kind, draw):
    """Rows as another computation gives them. 99.9 % of log-probabilities of likely tokens are within `nats`."""
    deviation = nats / NORMAL_QUANTILE
    if kind == "rounded":  # logits to a grid, of which they lie anywhere
        moves = draw.uniform(-1.0, 1.0, logprobs.shape) * deviation * np.sqrt(3.0)
    elif kind == "normal":
        moves = deviation * draw.normal(size=logprobs.shape)
    else:  # an error of the last hidden state, which all logits share through their rows of the output layer
        moves = deviation * draw.normal(size=(len(logprobs), 64)) @ draw.normal(size=(64, VOCAB)) / 8.0
    moved = logprobs + moves
    return moved - np.logaddexp.reduce(moved, axis=-1, keepdims=True)


def told(teacher, student, sampled, noises, k=SERVED):
    own = student[np.arange(len(student)), sampled].astype(np.float32)
    return teacher_rows(teacher, k, *noises), served_student(*top(student, k), sampled, own, *noises)


@pytest.fixture(scope="module")
def responses(heavy_tailed, dense_scores):
    """Whole rows of responses, with the parts of their exact scores, and the exact selection."""
    found = []
    for seed in range(RESPONSES):
        teacher, student = heavy_tailed(seed, POSITIONS, VOCAB)
        scores = dense_scores(teacher, student, CANDIDATES)
        exact = select_positions(scores["Full"], np.ones(POSITIONS, bool), BUDGET)
        found.append((teacher, student, scores, exact.tolist()))
    return found


@pytest.fixture(scope="module")
def computed_again(responses):
    """Return a function that gives rows of the teacher and the student of each response as servers compute them."""

    @functools.cache
    def again(nats, kind):
        draw = np.random.default_rng((round(1e3 * nats), KINDS.index(kind)))
        return [tuple(noisy(rows, nats, kind, draw) for rows in each[:2]) for each in responses]

    return again


def certified(responses, served, noises):
    """How many selections are certain from what was served, and how many of those are not the exact ones."""
    certain = wrong = 0
    for (_, student, _, exact), again in zip(responses, served, strict=True):
        evidence = Evidence(*told(*again, student.argmax(-1), noises), ScoreRule(CANDIDATES, VOCAB), BUDGET)
        certain += evidence.certain
        wrong += evidence.certain and evidence.selected.tolist() != exact
    return certain, wrong


@NOISE
def test_certain_selections_are_wrong_no_more_often_than_is_said(nats, kind, responses, computed_again):
    certain, wrong = certified(responses, computed_again(nats, kind), split(nats, POSITIONS))
    assert certain > 0
    assert wrong <= ERROR_PROBABILITY * RESPONSES


def test_more_is_certain_than_if_all_errors_conspired(responses, computed_again):
    served = computed_again(0.12, "rounded")
    certain, _ = certified(responses, served, split(0.12, POSITIONS))
    at_worst, _ = certified(responses, served, (0.12, 0.0))
    assert certain > at_worst


@pytest.mark.parametrize("nats", [pytest.param(each, marks=() if each == 0.05 else pytest.mark.long) for each in NATS])
def test_near_ties_are_left_open_that_would_be_decided_wrongly_otherwise(nats, responses, dense_scores):
    """The best position of each response has a rival that is nearly the same row. Servers show everything."""
    decided_wrongly = dict.fromkeys(("widened", "as served"), 0)
    noises = {"widened": split(nats, POSITIONS + 1), "as served": (0.0, 0.0)}
    for seed, (teacher, student, scores, _) in enumerate(responses):
        best = scores["Full"].argmax()
        rows = [np.vstack([each, each[best] + each[best] * (-1) ** seed * 1e-3]) for each in (teacher, student)]
        rows = [each - np.logaddexp.reduce(each, axis=-1, keepdims=True) for each in rows]
        exact = [dense_scores(*rows, CANDIDATES)["Full"].argmax()]
        draw = np.random.default_rng(seed)
        again = [noisy(each, nats, KINDS[seed % len(KINDS)], draw) for each in rows]
        for name, noise in noises.items():
            known = told(*again, rows[1].argmax(-1), noise, VOCAB)
            evidence = Evidence(*known, ScoreRule(CANDIDATES, VOCAB), 1)
            decided_wrongly[name] += evidence.certain and evidence.selected.tolist() != exact
    assert decided_wrongly["widened"] <= ERROR_PROBABILITY * RESPONSES
    assert decided_wrongly["as served"] > 0.1 * RESPONSES


@NOISE
def test_every_part_of_every_score_lies_in_its_interval(nats, kind, responses, computed_again):
    """The probability is that of any miss in a response, all positions and parts together."""
    for (_, student, scores, _), again in zip(responses, computed_again(nats, kind), strict=True):
        for k in (SERVED, 20):
            rows = told(*again, student.argmax(-1), split(nats, POSITIONS), k)
            assert_held(score_bounds(*rows, ScoreRule(CANDIDATES, VOCAB)), scores, "Full")


def test_the_noise_of_float32_is_a_sure_bound():
    assert split(1e-4, 100) == (1e-4, 0.0)
    assert split(SURE_NATS, 10_000) == (SURE_NATS, 0.0)
    assert split(0.0, 1) == (0.0, 0.0)
    sure, spread = split(0.05, 100)
    assert sure == 0.0
    assert spread > split(0.05, 10)[1] > 0.05  # more positions, more chances
