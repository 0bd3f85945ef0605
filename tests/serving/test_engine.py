"""The serving engine's numbers against plain transformers forwards in float64, which share no code with it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from engine_requests import (
    VOCAB,
    Engines,
    Models,
    candidate_request,
    dense_logprobs,
    finish,
    generate_request,
    prompts,
    run_all,
    score_request,
    submit,
)

from spot_async.errors import VersionMismatchError
from spot_async.serving.engine.fused import FusedModel, fused
from spot_async.serving.engine.logits import sample, score_rows
from spot_async.serving.engine.model import load_model
from spot_async.serving.settings import EngineSettings
from spot_async.types import WeightVersion

STOP = 7


@pytest.mark.parametrize(
    ("name", "deterministic"),
    [
        *((name, None) for name in ("qwen3", "mixtral")),
        ("qwen3", False),
        *(
            pytest.param(name, None, marks=pytest.mark.long)
            for name in ("llama", "gpt2", "qwen2", "gemma2", "granite", "mistral")
        ),
        pytest.param("gpt2", False, marks=pytest.mark.long),
    ],
)
def test_logprobs_of_sampled_tokens_are_those_of_a_plain_forward(
    name: str, deterministic: bool | None, random_architecture: Models, engine_for: Engines
) -> None:
    directory = random_architecture(name)
    engine = engine_for(directory, slots=5, prefill_tokens=64, deterministic=deterministic)
    requests = [
        generate_request(prompt, seed=i, max_tokens=[3, 40, 17][i % 3], temperature=[1.0, 0.7, 1.6][i % 3], top_k=i % 4)
        for i, prompt in enumerate(prompts([1, 30, 33, 5, 64, 9, 2, 31, 32, 90]))
    ]
    for request, reply in zip(requests, run_all(engine, requests, steps_between=2), strict=True):
        dense = dense_logprobs(directory, request.prompt_ids, reply.token_ids, request.sampling.temperature)
        assert len(reply.token_ids) == request.sampling.max_tokens
        np.testing.assert_allclose(reply.logprobs, dense[np.arange(len(dense)), reply.token_ids], atol=1e-4)
        if request.top_k:
            assert reply.topk_logprobs is not None
            expected = -np.sort(-dense, axis=-1)[:, : request.top_k]
            np.testing.assert_allclose(reply.topk_logprobs, expected, atol=1e-4)


def test_the_same_seed_gives_the_same_bits_whatever_runs_beside_it(
    random_architecture: Models, engine_for: Engines
) -> None:
    requests = [
        generate_request(prompt, seed=100 + i, max_tokens=10 + i, top_p=[1.0, 0.8][i % 2], stop_token_ids=(STOP,))
        for i, prompt in enumerate(prompts([4, 40, 12, 33, 7, 61, 1, 20, 35, 8, 90, 3]))
    ]
    reference = run_all(engine_for(random_architecture(), slots=64), requests)
    assert len({tuple(reply.token_ids) for reply in reference}) == len(reference)
    for slots, steps_between, order in ((1, 0, 1), (3, 5, -1), (12, 1, -1), (7, 3, 1)):
        engine = engine_for(random_architecture(), slots=slots, prefill_tokens=96)
        replies = run_all(engine, requests[::order], steps_between=steps_between)[::order]
        for expected, reply in zip(reference, replies, strict=True):
            np.testing.assert_array_equal(reply.token_ids, expected.token_ids)
            np.testing.assert_array_equal(reply.logprobs, expected.logprobs)


@pytest.mark.parametrize(
    ("names", "same"),
    [(("qwen3", "qwen2", "llama", "mistral"), True), (("gpt2", "gemma2", "granite", "mixtral"), False)],
)
def test_the_fast_path_is_taken_where_it_computes_the_same(
    names: tuple[str, ...], same: bool, random_architecture: Models
) -> None:
    for name in names:
        model = load_model(random_architecture(name), EngineSettings())
        assert isinstance(fused(model), FusedModel) == same, name


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
def test_tokens_follow_the_inverse_cdf_of_the_truncated_distribution(
    top_p: float, random_architecture: Models, engine_for: Engines
) -> None:
    prompt = prompts([11])[0]
    replies = run_all(
        engine_for(random_architecture(), slots=64),
        [generate_request(prompt, seed=seed, max_tokens=1, top_p=top_p, temperature=1.3) for seed in range(300)],
    )
    logprobs = dense_logprobs(random_architecture(), prompt, np.zeros(1, np.int32), 1.3)[0]
    likeliest_first = np.argsort(-logprobs, kind="stable")
    mass = np.cumsum(np.exp(logprobs[likeliest_first]))
    nucleus = likeliest_first[: 1 + int(np.searchsorted(mass, top_p - 1e-9))]
    kept = np.zeros(VOCAB)
    kept[nucleus] = np.exp(logprobs[nucleus])
    cumulative = np.cumsum(kept / kept.sum())
    for seed, reply in enumerate(replies):
        uniform = np.random.Generator(np.random.Philox(seed)).random()
        token = int(reply.token_ids[0])
        assert kept[token] > 0
        assert (cumulative[token - 1] if token else 0) - 1e-5 <= uniform <= cumulative[token] + 1e-5
        assert reply.logprobs[0] == pytest.approx(logprobs[token], abs=1e-4)  # top-p does not change it


def test_a_stop_token_ends_the_response_and_is_part_of_it(random_architecture: Models, engine_for: Engines) -> None:
    free = run_all(engine_for(random_architecture()), [generate_request(prompts([5])[0], seed=3, max_tokens=30)])[0]
    stop = int(free.token_ids[8])
    first = int(np.flatnonzero(free.token_ids == stop)[0])
    request = generate_request(prompts([5])[0], seed=3, max_tokens=30, stop_token_ids=(VOCAB - 1, stop))
    others = [generate_request(prompt, seed=9) for prompt in prompts([3, 4])]
    stopped = run_all(engine_for(random_architecture()), [*others, request])[-1]
    np.testing.assert_array_equal(stopped.token_ids, free.token_ids[: first + 1])
    assert len(stopped.logprobs) == first + 1
    assert (stopped.finish_reason, free.finish_reason) == ("stop", "length")


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        *(("qwen3", rows) for rows in (1, 3, 1000)),
        *((name, 3) for name in ("gpt2", "gemma2")),
        *(pytest.param(name, rows, marks=pytest.mark.long) for name in ("gpt2", "gemma2") for rows in (1, 1000)),
    ],
)
def test_scores_are_those_of_the_dense_distribution(
    name: str, rows: int, random_architecture: Models, engine_for: Engines
) -> None:
    directory = random_architecture(name)
    engine = engine_for(directory, score_logits=rows * VOCAB, score_tokens=200)
    pairs = list(zip(prompts([1, 12, 40, 7, 30]), prompts([20, 1, 60, 50, 2], seed=1), strict=True))
    tasks = [submit(engine, score_request(*pair, temperature=1.0 if len(pair[1]) > 2 else 0.5)) for pair in pairs]
    finish(engine)
    for (prompt, response), task in zip(pairs, tasks, strict=True):
        dense = dense_logprobs(directory, prompt, response, task.request.temperature)
        scores = task.future.result(timeout=0)
        np.testing.assert_allclose(scores.logprobs, dense[np.arange(len(dense)), response], atol=1e-4)
        np.testing.assert_allclose(scores.topk_logprobs, -np.sort(-dense, axis=-1)[:, :5], atol=1e-4)
        np.testing.assert_allclose(
            np.take_along_axis(dense, scores.topk_ids.astype(int), -1), scores.topk_logprobs, atol=1e-4
        )
        np.testing.assert_allclose(scores.entropy, -(np.exp(dense) * dense).sum(-1), atol=1e-4)
        np.testing.assert_array_equal(scores.entropy_lower, scores.entropy_upper)
        np.testing.assert_allclose(scores.tail_logprobs, tails(dense, scores.topk_ids), atol=1e-4)


def tails(dense: np.ndarray, topk_ids: np.ndarray) -> np.ndarray:
    """Return log-probabilities (T,) of all tokens outside of a top-k (T, K), by their sum over whole rows (T, V)."""
    outside = np.ones(dense.shape, np.bool_)
    np.put_along_axis(outside, topk_ids.astype(int), False, axis=1)
    with np.errstate(divide="ignore"):
        return np.log((np.exp(dense) * outside).sum(axis=1))


@pytest.mark.parametrize("tail", [1e-2, 1e-6, 1e-8, 1e-30])
@pytest.mark.parametrize("top_k", [1, 16])
def test_the_tail_is_exact_however_sure_the_model_is(tail: float, top_k: int) -> None:
    draw = np.random.default_rng(0)
    rows = np.full((40, 1000), 0.0)
    rows[:, :top_k] = np.log(draw.dirichlet(np.ones(top_k), 40) * (1 - tail) * 0.8 + (1 - tail) * 0.2 / top_k)
    rows[:, top_k:] = np.log(draw.dirichlet(np.ones(1000 - top_k), 40) * tail * 0.9 + tail * 0.1 / 1000)
    logits = torch.from_numpy((rows + draw.uniform(-30, 30, (40, 1))).astype(np.float32))
    scores = score_rows(
        lambda hidden: hidden, logits, torch.zeros(40).long(), top_k=top_k, temperature=1.0, chunk_rows=7
    )
    assert scores.tail_logprobs is not None
    exact = tails(logits.double().log_softmax(-1).numpy(), scores.topk_ids.numpy())
    np.testing.assert_allclose(scores.tail_logprobs.numpy(), exact, atol=1e-5)
    with np.errstate(divide="ignore", invalid="ignore"):  # what it would be without
        rest = np.log1p(-np.exp(scores.topk_logprobs.double().numpy()).sum(axis=1))
    assert tail > 1e-6 or not np.abs(rest - exact).max() < 0.01


def test_a_very_sure_model_sends_its_tail_too(random_architecture: Models, engine_for: Engines) -> None:
    directory, temperature = random_architecture(), 0.1
    engine, (prompt,), (response,) = engine_for(directory), prompts([12]), prompts([60], seed=1)
    tasks = [submit(engine, score_request(prompt, response, temperature=temperature, top_k=k)) for k in (0, 5, VOCAB)]
    finish(engine)
    none, some, every = (task.future.result(timeout=0).tail_logprobs for task in tasks)
    dense = dense_logprobs(directory, prompt, response, temperature)
    exact = tails(dense, tasks[1].future.result(timeout=0).topk_ids)
    assert (exact < np.log(1e-6)).sum() > 5
    np.testing.assert_allclose(some, exact, atol=1e-3)  # logits ten times as large, and so is their rounding
    assert none is None  # nothing was asked for that it could be outside of
    assert (every == -np.inf).all()


def test_scores_do_not_depend_on_what_is_scored_beside_them(random_architecture: Models, engine_for: Engines) -> None:
    pairs = list(zip(prompts([3, 12, 20, 7]), prompts([20, 1, 10, 15], seed=1), strict=True))
    together, alone = (engine_for(random_architecture(), score_tokens=tokens) for tokens in (4096, 1))
    for engine in (together, alone):
        tasks = [submit(engine, score_request(*pair)) for pair in pairs]
        engine.step()
        assert engine.scoring == (0 if engine is together else len(pairs) - 1)
        finish(engine)
        results = [task.future.result(timeout=0) for task in tasks]
        if engine is together:
            expected = results
    for one, other in zip(expected, results, strict=True):
        for name in ("logprobs", "topk_ids", "topk_logprobs", "entropy", "tail_logprobs"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_candidates_at_chosen_positions(random_architecture: Models, engine_for: Engines) -> None:
    engine = engine_for(random_architecture(), score_logits=2 * VOCAB)
    prompt, response = prompts([9])[0], prompts([25], seed=1)[0]
    positions, candidates = np.array([0, 24, 7], np.int32), np.arange(12, dtype=np.int32).reshape(3, 4) * 5
    chosen = {"positions": positions, "candidate_ids": candidates}
    task = submit(engine, candidate_request(prompt, response, expected_version=WeightVersion(0, 0), **chosen))
    engine.step()
    dense = dense_logprobs(random_architecture(), prompt, response)
    np.testing.assert_allclose(
        task.future.result(timeout=0).logprobs,
        np.take_along_axis(dense[positions], candidates.astype(int), -1),
        atol=1e-4,
    )


def test_candidates_of_other_weights_are_refused_and_of_any_are_not(
    random_architecture: Models, engine_for: Engines
) -> None:
    engine = engine_for(random_architecture())
    chosen = {"positions": np.array([0], np.int32), "candidate_ids": np.array([[1]], np.int32)}
    request = candidate_request(*prompts([9, 5]), expected_version=WeightVersion(0, 3), **chosen)
    task = submit(engine, request)
    live = submit(engine, msgspec.structs.replace(request, expected_version=None))
    engine.step()
    with pytest.raises(VersionMismatchError, match=r"weights 0\.3.*holds 0\.0"):
        task.future.result(timeout=0)
    assert live.future.result(timeout=0).version == WeightVersion(0, 0)


def test_which_of_equal_tokens_are_among_a_rows_best_does_not_depend_on_its_neighbours():
    logits = torch.from_numpy(np.random.default_rng(0).integers(-4, 4, (8, 500)) / 4.0).float()  # many are equal
    ones, draws = torch.ones(8, 1), torch.full((8, 1), 0.5, dtype=torch.float64)
    top_k = np.array([4, 0, 16, 4, 300, 1, 16, 4])
    together = sample(logits, ones, None, draws, top_k=top_k)
    for row, k in enumerate(top_k):
        alone = sample(logits[row : row + 1], ones[:1], None, draws[:1], top_k=top_k[row : row + 1])
        if k:
            assert torch.equal(together.topk_ids[row, :k], alone.topk_ids[0])
            assert torch.equal(together.topk_logprobs[row, :k], alone.topk_logprobs[0])
