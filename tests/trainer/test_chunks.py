"""Pulls of a teacher that knows chunks of tokens alone: against sums in plain float64, and where they lead."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spot_async.terms import difference, pull, weighted
from spot_async.testing.services import token_scores
from spot_async.trainer.batching import MicroBatch, Pulls, advantages_of, collate
from spot_async.trainer.metrics import Tally
from spot_async.types import Live, Pull, Supervision, TokenScores, WeightVersion

LIVE = WeightVersion(0, 3)
CUTS = st.lists(st.sampled_from([-1, 1, 1, 2, 3, 5]), min_size=1, max_size=6)  # -1: a token in no chunk


def chunks_of(cuts: list[int]) -> np.ndarray[Any, Any]:
    parts = [[-1] if cut == -1 else [number] * cut for number, cut in enumerate(cuts)]
    return np.concatenate(parts).astype(np.int32)


def drawn(tokens: int, seed: int) -> np.ndarray[Any, Any]:
    return -np.random.default_rng(seed).exponential(size=tokens).astype(np.float32)


def sample_of(*pulls: Pull, mask: np.ndarray[Any, Any] | None = None, seed: int = 0) -> Supervision:
    tokens = len(pulls[0].logprobs)
    return Supervision(
        prompt_ordinal=seed,
        problem_id="p",
        prompt_ids=np.zeros(2, np.int32),
        response_ids=np.zeros(tokens, np.int32),
        behavior_logprobs=drawn(tokens, seed),
        version=LIVE,
        policy_mask=mask,
        pulls=pulls,
    )


def by_hand(term: Pull, behavior: np.ndarray[Any, Any], mask: np.ndarray[Any, Any]) -> list[float]:
    """The equations, chunk by chunk: d = L_T - S within its limits, a token's part of it is log pi / S."""
    assert term.chunks is not None
    found = [0.0] * len(behavior)
    weights = np.ones(len(behavior)) if term.weights is None else term.weights
    numbers = [[place] for place in np.flatnonzero(term.chunks == -1)]
    numbers += [list(np.flatnonzero(term.chunks == chunk)) for chunk in sorted({*term.chunks.tolist()} - {-1})]
    for places in numbers:
        if not mask[places].all():
            continue
        student = [float(behavior[place]) for place in places]
        teacher = math.fsum(float(term.logprobs[place]) for place in places)
        least, most = term.clip or (-math.inf, math.inf)
        gap = min(max(teacher - math.fsum(student), least), most)
        for place, own in zip(places, student, strict=True):
            found[place] = float(weights[place]) * gap * own / math.fsum(student)
    return found


@given(CUTS, CUTS, st.integers(0, 99), st.booleans())
def test_advantages_are_the_equations_for_several_pulls_with_chunks_of_their_own(one, other, seed, is_masked):
    tokens = min(len(chunks_of(one)), len(chunks_of(other)))
    draw = np.random.default_rng(seed)
    clip = (-1.0, 0.5) if seed % 2 else None
    terms = (
        pull(scores_of(drawn(tokens, seed + 1), chunks_of(one)[:tokens]), draw.normal(size=tokens), clip=clip),
        Pull(logprobs=drawn(tokens, seed + 2), chunks=chunks_of(other)[:tokens]),
        Pull(logprobs=drawn(tokens, seed + 3)),
    )
    mask = draw.uniform(size=tokens) < 0.7 if is_masked else np.ones(tokens, np.bool_)
    longer = sample_of(Pull(logprobs=drawn(tokens + 3, seed + 4)), seed=1)
    sample = sample_of(*terms, mask=mask if is_masked else None, seed=seed)
    batch = collate([longer, sample], is_packed=True)
    recomputed = drawn(2 * (tokens + 3), seed + 5).reshape(2, -1)
    for found, behavior in (
        (batch.advantages, sample.behavior_logprobs),
        (batch.with_behavior(torch.from_numpy(recomputed)).advantages, recomputed[1, :tokens]),
    ):
        expected = [by_hand(each, behavior, mask) for each in terms[:2]]
        plain = np.where(mask, terms[2].logprobs - behavior, 0.0)
        assert found[1, :tokens].numpy() == pytest.approx(np.sum([*expected, plain], axis=0), rel=2e-4, abs=2e-5)
        assert found[1, tokens:].tolist() == [0.0] * 3


def scores_of(logprobs: np.ndarray[Any, Any], chunks: np.ndarray[Any, Any]) -> TokenScores:
    return token_scores(logprobs, chunks=chunks, valid=chunks >= 0)


@given(st.integers(1, 9), st.integers(0, 99))
def test_chunks_of_one_token_train_as_no_chunks_bit_for_bit(tokens, seed):
    term = Pull(logprobs=drawn(tokens, seed), weights=drawn(tokens, seed + 1), clip=(-0.5, math.inf))
    singly = msgspec.structs.replace(term, chunks=np.arange(tokens, dtype=np.int32))
    plain, chunked = (collate([sample_of(each, seed=seed)], is_packed=True) for each in (term, singly))
    assert torch.equal(plain.advantages, chunked.advantages)
    assert metrics_of(plain) == metrics_of(chunked)


def metrics_of(batch: MicroBatch) -> dict[str, float]:
    tally = Tally(torch.device("cpu"), 3)
    tally.count_distance(batch, ())
    return tally.report(grad_norms=[], learning_rate=1.0)


@pytest.mark.parametrize("behavior", [[0.0, 0.0, 0.0], [1e-7, -3e-7, 1e-7]])
def test_tokens_that_the_student_is_sure_of_share_their_chunks_difference_evenly(behavior):
    """Rounding may put a log-probability above 0, and in proportion to it they would be pulled apart."""
    own = np.array(behavior, np.float32)
    term = Pull(logprobs=np.full(3, -1.0, np.float32), chunks=np.zeros(3, np.int32))
    advantages = collate([msgspec.structs.replace(sample_of(term), behavior_logprobs=own)], is_packed=True).advantages
    for found in (advantages[0], difference(term, Live(logprobs=own, entropy=own, where=own < 1, rows=()))):
        np.testing.assert_allclose(found, [-1.0] * 3, rtol=1e-4)


def test_the_distance_to_the_teacher_does_not_depend_on_how_a_text_is_cut():
    said, student = drawn(6, 1), drawn(6, 2)
    found = []
    for chunks in (np.arange(6), np.array([0, 0, 0, 1, 1, 1])):
        even = np.array([said[chunks == chunk].mean() for chunk in chunks], np.float32)
        term = Pull(logprobs=even, chunks=chunks.astype(np.int32), weights=np.full(6, 0.5, np.float32))
        sample = msgspec.structs.replace(sample_of(term), behavior_logprobs=student)
        found.append(metrics_of(collate([sample], is_packed=True)))
    assert found[0]["kl_to_teacher"] == pytest.approx(found[1]["kl_to_teacher"], abs=1e-6)
    assert found[0]["kl_to_teacher"] == pytest.approx(float((student - said).mean()), abs=1e-6)
    assert found[0]["pull_mean"] == pytest.approx(found[1]["pull_mean"], abs=1e-6)


@pytest.mark.parametrize(("has_chunks", "least", "most"), [(True, 0.0, 1e-3), (False, 0.1, 1.0)])
def test_a_student_of_two_digits_becomes_the_teacher_that_writes_them_in_one_token(has_chunks, least, most):
    """In even parts, which is what no chunks say here, it becomes a flatter one: so the test can tell."""
    teacher = torch.tensor(np.random.default_rng(7).dirichlet(np.full(16, 0.5)))
    first, second = torch.arange(16) // 4, torch.arange(16) % 4
    digits = [torch.zeros(4, requires_grad=True), torch.zeros(4, 4, requires_grad=True)]
    optimizer = torch.optim.Adam(digits, lr=0.05)
    said = (teacher.log().float() / 2)[None, :, None].expand(1, 16, 2)
    limits = torch.full((1, 16, 1), -math.inf), torch.full((1, 16, 1), math.inf)
    chunks = torch.zeros(1, 16, 2, dtype=torch.int64) if has_chunks else None
    pulls = Pulls(said, torch.ones(1, 16, 2), *limits, chunks=chunks)
    for _ in range(600):
        each = torch.stack([digits[0].log_softmax(0)[first], digits[1].log_softmax(1)[first, second]], dim=1)
        advantages = advantages_of(torch.zeros(16, 2), pulls, each.detach())
        expected = each.sum(1).exp().detach()[:, None] * advantages * each
        optimizer.zero_grad()
        (-expected.sum()).backward()
        optimizer.step()
    student = each.detach().double().sum(1)
    assert least <= float((student.exp() * (student - teacher.log())).sum()) < most


@given(CUTS, st.integers(0, 99))
def test_what_a_policy_is_told_of_a_pull_is_what_the_trainer_makes_of_it(cuts, seed):
    chunks = chunks_of(cuts)
    mask = np.random.default_rng(seed).uniform(size=len(chunks)) < 0.8
    scores = scores_of(drawn(len(chunks), seed), chunks)
    term = pull(scores) if seed % 2 else Pull(logprobs=scores.logprobs, chunks=chunks)
    sample = sample_of(term, mask=mask, seed=seed + 1)
    own = np.where(mask, sample.behavior_logprobs, np.nan)
    told = difference(term, Live(logprobs=own, entropy=own, where=mask, rows=()))
    for each in (sample, msgspec.structs.replace(sample, pulls=(), advantages=told)):
        found = collate([each], is_packed=True).advantages[0].numpy()
        assert told == pytest.approx(found, rel=2e-4, abs=2e-5)


def test_a_weight_that_differs_inside_a_chunk_is_its_mean_and_one_of_0_stays_0():
    scores, unknown = (scores_of(drawn(5, 0), chunks_of(cuts)) for cuts in ([2, 1, 2], [2, 1, -1, -1]))
    weights, in_none = np.array([1.0, 3.0, 5.0, 0.0, 1.0]), pull(drawn(5, 0), [0.5, 0.0, 1.0, 0.0, 1.0])
    for term, expected in (
        (pull(scores, weights), [2.0, 2.0, 5.0, 0.5, 0.5]),
        (weighted(pull(scores), weights), [2.0, 2.0, 5.0, 0.5, 0.5]),
        (weighted(pull(scores), weights > 1), [0.5, 0.5, 1.0, 0.0, 0.0]),
        (weighted(pull(scores), (weights > 1).astype(np.int64)), [0.5, 0.5, 1.0, 0.0, 0.0]),
        (weighted(pull(unknown), np.array([1.0, 3.0, 5.0, np.nan, 7.0])), [2.0, 2.0, 5.0, 0.0, 0.0]),
        (weighted(in_none, np.array([2.0, np.nan, 0.5, np.nan, 1.0])), [1.0, 0.0, 0.5, 0.0, 1.0]),
    ):
        assert term.weights is not None
        assert term.weights.tolist() == expected
