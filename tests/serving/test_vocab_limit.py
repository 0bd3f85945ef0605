"""An engine whose model has more softmax rows than a request may use samples below the limit, and scores as always.

The rows beyond are likelier than the tokens (`padded_models.py`), so code that forgets the limit fails its test.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_requests import dense_logprobs, generate_request, run_all
from padded_models import padded_model

from spot_async.serving.engine.logits import draw_uniforms, sample

EXAMPLE = Path(__file__).parents[2] / "examples" / "running_sum"
COMMON, PADDED = 48, 64


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return padded_model(EXAMPLE / "student", tmp_path_factory.mktemp("padded") / "student", rows=PADDED - COMMON)


def test_the_engine_samples_below_the_limit_with_log_probabilities_of_the_whole_softmax(
    student: Path, engine_for: Callable[..., Any]
) -> None:
    prompt = np.array([5, 9, 12, 30], np.int32)
    asked = [
        generate_request(prompt, seed=seed, top_k=PADDED, vocab_limit=COMMON, temperature=temperature)
        for seed, temperature in enumerate([1.0, 1.0, 0.7, 0.0])
    ]
    free = generate_request(prompt, seed=9, max_tokens=20)
    engine = engine_for(student)
    *limited, beside = run_all(engine, [*asked, free])
    for request, reply in zip(asked, limited, strict=True):
        dense = dense_logprobs(student, prompt, reply.token_ids, request.sampling.temperature or 1.0)
        rows = np.arange(len(reply.token_ids))
        assert reply.token_ids.max() < COMMON
        np.testing.assert_allclose(reply.logprobs, dense[rows, reply.token_ids], atol=1e-4)
        assert np.exp(dense)[:, COMMON:].sum(axis=1).max() > 0.9  # a missing mask would be noticed
    assert (limited[-1].token_ids == dense[:, :COMMON].argmax(axis=1)).all()
    (alone,) = run_all(engine_for(student), [free])  # a limit is its own request's affair
    assert alone.token_ids.max() >= COMMON
    np.testing.assert_array_equal(alone.token_ids, beside.token_ids)
    np.testing.assert_array_equal(alone.logprobs, beside.logprobs)


@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_a_limit_leaves_the_other_tokens_their_odds_and_comes_before_top_p(top_p: float) -> None:
    rows, limit = 4096, 6
    logits = torch.tensor([0.3, 2.0, -1.0, 0.5, 1.5, -2.0, 200.0, 3.0]).expand(
        rows, -1
    )  # one that leaves floats no rest
    uniforms = torch.linspace(0, 1 - 1e-9, rows, dtype=torch.float64)[:, None]
    limits = torch.full((rows, 1), limit)
    drawn = sample(logits, torch.ones(rows, 1), torch.full((rows, 1), top_p), uniforms, vocab_limit=limits)
    odds = np.exp(logits[0, :limit].double().numpy())
    odds /= odds.sum()
    order = np.argsort(-odds)
    kept = np.zeros(limit)
    kept[order] = np.where(np.cumsum(odds[order]) - odds[order] < top_p, odds[order], 0.0)
    shares = np.bincount(drawn.token_ids.numpy(), minlength=8) / rows
    np.testing.assert_allclose(shares, [*kept / kept.sum(), 0, 0], atol=2 / rows)
    whole = logits[0].double().log_softmax(-1)
    np.testing.assert_allclose(drawn.logprobs, whole[drawn.token_ids], atol=1e-4)


def test_a_limit_that_leaves_nothing_out_changes_no_bit() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 50, generator=draw)
    uniforms = torch.from_numpy(draw_uniforms(3, 8))[:, None]
    plain, limited = (
        sample(logits, torch.ones(8, 1), None, uniforms, vocab_limit=limit) for limit in (None, torch.full((8, 1), 50))
    )
    assert torch.equal(plain.token_ids, limited.token_ids)
    assert torch.equal(plain.logprobs, limited.logprobs)
