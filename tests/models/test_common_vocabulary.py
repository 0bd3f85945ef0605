"""Candidates are tokens that all models of a run have rows for, even if the teacher's softmax is padded further.

References are whole distributions in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from truncated_rows import assert_held, top

from spot_async.backends.shared.replies import bounded_scores
from spot_async.models.common_vocabulary import CommonVocabulary, common_candidates
from spot_async.policies.truncated.certainty import Evidence
from spot_async.policies.truncated.score_bounds import ScoreRule, TeacherRows, asked_student, score_bounds
from spot_async.testing.services import whole_scores
from spot_async.types import ScoredPositions, TokenScores, WeightVersion

V0 = WeightVersion(0, 0)


def scorer(dense: np.ndarray, *, most: int, asked: list[int]) -> Callable[[int], Any]:
    """A server that gives the top-k of whole distributions (T, V) and bounds their entropies from it."""

    async def ask(top_k: int) -> TokenScores:
        asked.append(top_k)
        best, logprobs = top(dense, min(top_k, most))
        return bounded_scores(
            dense[:, 0].astype(np.float32),
            best.astype(np.int32),
            logprobs,
            top_k=best.shape[1],
            vocab_size=dense.shape[1],
            version=V0,
        )

    return ask


async def known_to_all(ask: Callable[[int], Any], common: CommonVocabulary, top_k: int, widest: int) -> TokenScores:
    """Ask as a stage does: again where the first reply has too few candidates."""
    scores = await ask(max(1, top_k))
    if (wider := common.wider(scores, top_k, widest)) is not None:
        scores = await ask(wider)
    return common.known_to_all(scores, top_k)


def hot(heavy_tailed: Any, rows: int, width: int, padding: int, where: slice) -> tuple[np.ndarray, np.ndarray]:
    """Teacher (T, width + padding) and student (T, width); in the rows `where` the padding is likeliest."""
    teacher, student = heavy_tailed(5, rows, width)
    more = np.full((rows, padding), teacher.min() - 5.0)
    more[where] = teacher[where].max(axis=1, keepdims=True) + 1.0 - 0.01 * np.arange(padding)
    whole = np.concatenate([teacher, more], axis=1)
    return whole - np.log(np.exp(whole).sum(axis=1, keepdims=True)), student


async def test_candidates_are_the_likeliest_common_tokens_and_more_are_asked_for_only_where_padding_is_among_them(
    heavy_tailed: Any,
) -> None:
    common = CommonVocabulary({"student": 200, "teacher": 210})
    for where, expected in ((slice(0), [16]), (slice(3), [16, 26])):
        dense, _ = hot(heavy_tailed, 12, 200, 10, where)
        asked: list[int] = []
        scores = await known_to_all(scorer(dense, most=64, asked=asked), common, 16, 64)
        best = np.argsort(-dense[:, :200], axis=1, kind="stable")[:, :16]
        assert asked == expected
        assert scores.valid is None
        np.testing.assert_array_equal(scores.topk_ids, best)
        np.testing.assert_allclose(scores.topk_logprobs, np.take_along_axis(dense, best, 1), atol=1e-5)
        entropy = -(np.exp(dense) * dense).sum(axis=1)  # of the whole softmax
        assert ((scores.entropy_lower <= entropy + 1e-4) & (entropy - 1e-4 <= scores.entropy_upper)).all()


async def test_a_position_that_shows_too_few_common_candidates_is_masked_and_names_no_foreign_id(
    heavy_tailed: Any,
) -> None:
    common = CommonVocabulary({"student": 200, "teacher": 210})
    dense, _ = hot(heavy_tailed, 6, 200, 10, slice(2))
    scores = await known_to_all(scorer(dense, most=20, asked=[]), common, 16, 20)
    assert scores.valid is not None
    assert scores.valid.tolist() == [False, False, True, True, True, True]
    assert scores.topk_ids.shape == (6, 16)
    assert scores.topk_ids.max() < 200
    asked: list[int] = []
    await known_to_all(scorer(dense, most=20, asked=asked), common, 0, 20)
    assert asked == [1]  # who wants no candidates misses none


async def test_the_tail_has_all_tokens_but_the_candidates_also_those_that_are_left_out(heavy_tailed: Any) -> None:
    common = CommonVocabulary({"student": 200, "teacher": 210})
    dense, _ = hot(heavy_tailed, 12, 200, 10, slice(3))

    async def ask(top_k: int) -> TokenScores:
        return whole_scores(dense, np.zeros(12, np.int32), top_k)

    scores = await known_to_all(ask, common, 16, 64)
    outside = np.exp(dense)
    np.put_along_axis(outside, scores.topk_ids.astype(np.int64), 0.0, axis=1)
    np.testing.assert_allclose(scores.tail_logprobs, np.log(outside.sum(axis=1)), atol=1e-5)
    ordinary = msgspec.structs.replace(await ask(16), tail_logprobs=None)
    assert common.known_to_all(ordinary, 4).tail_logprobs is None  # nobody said it, and it is not made up


@pytest.mark.parametrize("where", [slice(0), slice(None)])
async def test_bounds_of_the_acquisition_score_hold_its_value_over_whole_softmaxes(
    where: slice, heavy_tailed: Any, dense_scores: Any
) -> None:
    dense, student = hot(heavy_tailed, 40, 200, 10, where)
    k, rule = 16, ScoreRule(candidates=16, vocab_size=210)
    scores = await known_to_all(
        scorer(dense, most=64, asked=[]), CommonVocabulary({"student": 200, "teacher": 210}), k, 64
    )
    ids = scores.topk_ids.astype(np.int64)
    teacher = TeacherRows(
        ids, scores.topk_logprobs.astype(np.float64), scores.entropy_lower.astype(np.float64),
        scores.entropy_upper.astype(np.float64), np.zeros(40, np.bool_), np.zeros(40), np.zeros(40),
    )  # fmt: skip
    bounds = score_bounds(teacher, asked_student(ids, np.take_along_axis(student, ids, 1)), rule)
    # The definitions, straight: candidates are common, everything else is of whole softmaxes.
    p, q = np.exp(np.take_along_axis(dense, ids, 1)), np.exp(np.take_along_axis(student, ids, 1))
    entropy = -(np.exp(dense) * dense).sum(axis=1) / np.log(210)
    mass, coverage = p.sum(axis=1), q.sum(axis=1)
    p, q = p / mass[:, None], q / coverage[:, None]
    shape = (p * np.log2(2 * p / (p + q)) + q * np.log2(2 * q / (p + q))).sum(axis=1) / 2
    exact = {"entropy": entropy, "mass": mass, "coverage": coverage, "divergence": shape}
    exact |= {"gap": (1 - coverage + shape) / 2, "Full": entropy * mass * (1 - coverage + shape) / 2}
    assert_held(bounds, exact, "Full", off=1e-5)


def test_a_wider_row_that_shows_too_few_common_tokens_decides_nothing() -> None:
    draw = np.random.default_rng(0)
    dense = np.log(draw.dirichlet(np.ones(20), 3))
    ids = np.argsort(-dense[:, :12], axis=1)[:, :6]
    values = np.take_along_axis(dense, ids, 1)
    entropy = -(np.exp(dense) * dense).sum(axis=1)
    rows = TeacherRows(ids, values, entropy - 0.3, entropy + 0.3, np.zeros(3, np.bool_), np.full(3, 0.01), np.zeros(3))
    student = asked_student(ids, values - 0.1)
    evidence = Evidence(rows, student, ScoreRule(candidates=4, vocab_size=20), 1, teacher_top_k=20)
    wide = np.argsort(-dense, axis=1).astype(np.int32)
    logprobs = np.take_along_axis(dense, wide, 1).astype(np.float32)
    common, values = common_candidates(wide, logprobs, 12)
    known = ScoredPositions(topk_ids=common, topk_logprobs=values, entropy_lower=entropy, entropy_upper=entropy)
    assert known.topk_ids.shape == (3, 12)
    few = msgspec.structs.replace(known, topk_ids=known.topk_ids[:, :3], topk_logprobs=known.topk_logprobs[:, :3])
    before = evidence.bounds.score.upper.copy()
    evidence.take_teacher(np.array([0]), few, 20)
    np.testing.assert_array_equal(evidence.bounds.score.upper, before)
    assert 0 not in np.concatenate(
        [*evidence.questions(np.ones(3, np.bool_), 3).teacher.values(), [2]]
    )  # asked for all
    evidence.take_teacher(np.arange(3), known, 20)
    np.testing.assert_allclose(evidence.bounds.entropy.lower, entropy / np.log(20), atol=1e-6)  # of the whole softmax
    assert evidence.teacher.ids.max() < 12
