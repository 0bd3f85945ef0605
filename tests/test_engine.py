"""The serving engine against plain transformers forwards in float64, which share no code with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from spot_async.errors import PoisonedReplyError, TransientError, VersionMismatchError
from spot_async.serving.api import CandidateRequest, GenerateRequest, ScoreRequest
from spot_async.serving.engine import DECODES_BETWEEN_PREFILLS, Engine
from spot_async.serving.fused import FusedModel, fused
from spot_async.serving.model import load_model
from spot_async.serving.sampling import sample
from spot_async.serving.settings import EngineSettings
from spot_async.serving.tasks import new_task
from spot_async.types import Generation, SamplingSettings, VersionSpan, WeightVersion

VOCAB = 61
STOP = 7
ARCHITECTURES = ("qwen3", "qwen2", "llama", "gpt2", "gemma2", "granite", "mistral", "mixtral")

Models = Callable[..., Path]
Engines = Callable[..., Engine]


@pytest.fixture(params=["fast", "general"])
def engine_for(request: pytest.FixtureRequest) -> Engines:
    """Makes engines, all of them on one of the two paths."""

    def make(directory: Path, **settings: object) -> Engine:
        chosen = EngineSettings(**{"slots": 8, **settings})  # type: ignore[arg-type]
        model = load_model(directory, chosen)
        return Engine(fused(model) if request.param == "fast" else model, chosen)

    return make


def prompts(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, VOCAB, length).astype(np.int32) for length in lengths]


def generate_request(prompt: np.ndarray, *, seed: int = 0, top_k: int = 0, **sampling: object) -> GenerateRequest:
    chosen = SamplingSettings(**{"max_tokens": 12, "stop_token_ids": (), "seed": seed, **sampling})  # type: ignore[arg-type]
    return GenerateRequest(prompt_ids=prompt, sampling=chosen, top_k=top_k, timeout_s=60.0)


def score_request(prompt: np.ndarray, response: np.ndarray, **more: object) -> ScoreRequest:
    return ScoreRequest(**{"prompt_ids": prompt, "response_ids": response, "top_k": 5, "timeout_s": 60.0, **more})  # type: ignore[arg-type]


def candidate_request(prompt: np.ndarray, response: np.ndarray, **more: Any) -> CandidateRequest:
    return CandidateRequest(prompt_ids=prompt, response_ids=response, timeout_s=60.0, **more)


def submit(engine: Engine, request: GenerateRequest | ScoreRequest | CandidateRequest) -> Any:
    engine.limits.check(request)
    task = new_task(request)
    engine.submit(task)
    return task


def finish(engine: Engine) -> None:
    while engine.busy:
        engine.step()


def run_all(engine: Engine, requests: list[GenerateRequest], *, steps_between: int = 0) -> list[Generation]:
    """Submit with `steps_between` engine steps after each, then run to the end."""
    tasks = []
    for request in requests:
        tasks.append(submit(engine, request))
        for _ in range(steps_between):
            engine.step()
    finish(engine)
    return [task.future.result(timeout=0) for task in tasks]


def dense_logprobs(directory: Path, prompt: np.ndarray, response: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """(T, V) float64 log-probabilities that decide each response token, from one plain full forward."""
    config = transformers.AutoConfig.from_pretrained(directory)
    dtype = torch.float32 if config.model_type == "mixtral" else torch.float64  # torch's expert kernel takes no float64
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    tokens = torch.tensor([[*prompt.tolist(), *response.tolist()]])
    with torch.no_grad():
        logits = model(tokens).logits[0].double().numpy() / temperature
    rows = logits[len(prompt) - 1 : len(prompt) - 1 + len(response)]
    shifted = rows - rows.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize(
    ("name", "deterministic"), [*((name, None) for name in ARCHITECTURES), ("qwen3", False), ("gpt2", False)]
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


def test_another_seed_gives_another_response(random_architecture: Models, engine_for: Engines) -> None:
    prompt = prompts([6])[0]
    replies = run_all(engine_for(random_architecture()), [generate_request(prompt, seed=seed) for seed in range(8)])
    assert len({tuple(reply.token_ids) for reply in replies}) == 8


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


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "gemma2"])
@pytest.mark.parametrize("rows", [1, 3, 1000])
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
        for name in ("logprobs", "topk_ids", "topk_logprobs", "entropy"):
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


def test_candidates_of_other_weights_are_refused(random_architecture: Models, engine_for: Engines) -> None:
    engine = engine_for(random_architecture())
    chosen = {"positions": np.array([0], np.int32), "candidate_ids": np.array([[1]], np.int32)}
    request = candidate_request(*prompts([9, 5]), expected_version=WeightVersion(0, 3), **chosen)
    task = submit(engine, request)
    engine.step()
    with pytest.raises(VersionMismatchError, match=r"weights 0\.3.*holds 0\.0"):
        task.future.result(timeout=0)


def test_after_an_update_responses_go_on_under_the_new_weights(
    random_architecture: Models, engine_for: Engines
) -> None:
    old, new = random_architecture("qwen3", 0), random_architecture("qwen3", 1)
    engine = engine_for(old, slots=4)
    requests = [
        generate_request(prompt, seed=i, max_tokens=20 + i, top_k=2)
        for i, prompt in enumerate(prompts([5, 12, 2, 8, 33]))
    ]
    tasks = [submit(engine, request) for request in requests]
    for _ in range(6):
        engine.step()
    engine.update_weights(engine.parameters.read(new), WeightVersion(0, 1))
    finish(engine)
    for request, task in zip(requests, tasks, strict=True):
        reply = task.future.result(timeout=0)
        chosen = np.arange(len(reply.token_ids)), reply.token_ids
        under = {
            WeightVersion(0, 0): dense_logprobs(old, request.prompt_ids, reply.token_ids),
            WeightVersion(0, 1): dense_logprobs(new, request.prompt_ids, reply.token_ids),
        }
        assert reply.version_spans[-1].end == len(reply.token_ids) == request.sampling.max_tokens
        for span in reply.version_spans:
            dense = under[span.version]
            np.testing.assert_allclose(
                reply.logprobs[span.start : span.end], dense[chosen][span.start : span.end], atol=1e-4
            )
            assert reply.topk_logprobs is not None
            expected = -np.sort(-dense, axis=-1)[span.start : span.end, :2]
            np.testing.assert_allclose(reply.topk_logprobs[span.start : span.end], expected, atol=1e-4)
    assert tasks[0].future.result().version_spans == (
        VersionSpan(0, 6, WeightVersion(0, 0)),
        VersionSpan(6, 20, WeightVersion(0, 1)),
    )
    assert [span.version for span in tasks[4].future.result().version_spans] == [WeightVersion(0, 1)]  # had no slot yet


def test_an_abort_frees_the_slot_and_leaves_the_others_alone(random_architecture: Models, engine_for: Engines) -> None:
    requests = [generate_request(prompt, seed=i, max_tokens=15) for i, prompt in enumerate(prompts([5, 12, 2, 33]))]
    expected = run_all(engine_for(random_architecture()), requests)
    engine = engine_for(random_architecture(), slots=2)
    tasks = [submit(engine, request) for request in requests]
    engine.step()
    engine.step()
    assert (engine.active, engine.waiting) == (2, 2)
    engine.abort(tasks[0])
    engine.abort(tasks[2])
    assert (engine.active, engine.waiting) == (1, 1)
    finish(engine)
    assert not tasks[0].future.done()
    for i in (1, 3):
        np.testing.assert_array_equal(tasks[i].future.result(timeout=0).logprobs, expected[i].logprobs)
    engine.abort(tasks[1])  # already answered


def test_long_prompts_wait_for_their_turn_between_decode_steps(
    random_architecture: Models, engine_for: Engines
) -> None:
    engine = engine_for(random_architecture(), prefill_tokens=64, slots=4)  # those that wait fill the free ones
    running = submit(engine, generate_request(prompts([4])[0], max_tokens=40))
    engine.step()
    for prompt in prompts([60, 60, 60]):
        submit(engine, generate_request(prompt))
    for step in range(1, 4):
        produced, read = engine.tokens_generated, engine.tokens_prefilled
        engine.step()
        assert engine.tokens_prefilled - read == 64
        assert engine.tokens_generated - produced == 1 + step
    assert not running.future.done()


def test_a_request_with_more_alternatives_joins_others_that_run(
    random_architecture: Models, engine_for: Engines
) -> None:
    requests = [generate_request(prompts([4])[0], seed=i, top_k=k, max_tokens=30) for i, k in enumerate((0, 2, 5, 0))]
    engine = engine_for(random_architecture())
    tasks = []
    for request in requests:
        tasks.append(submit(engine, request))
        for _ in range(DECODES_BETWEEN_PREFILLS + 1):
            engine.step()
    finish(engine)
    for request, task in zip(requests, tasks, strict=True):
        (alone,) = run_all(engine_for(random_architecture()), [request])
        reply = task.future.result(timeout=0)
        np.testing.assert_array_equal(reply.logprobs, alone.logprobs)
        for name in ("topk_ids", "topk_logprobs") if request.top_k else ():
            np.testing.assert_array_equal(getattr(reply, name), getattr(alone, name))


def test_prompts_that_come_one_by_one_are_read_together_after_a_few_decodes(
    random_architecture: Models, engine_for: Engines
) -> None:
    engine = engine_for(random_architecture(), slots=16)
    submit(engine, generate_request(prompts([4])[0], max_tokens=40))
    engine.step()
    reads = []
    for prompt in prompts([5] * DECODES_BETWEEN_PREFILLS):
        submit(engine, generate_request(prompt, max_tokens=30))
        engine.step()
        reads.append(engine.active)
    assert reads == [1] * (DECODES_BETWEEN_PREFILLS - 1) + [1 + DECODES_BETWEEN_PREFILLS]


def test_contexts_that_differ_in_their_last_token_are_read_once(
    random_architecture: Models, engine_for: Engines
) -> None:
    """However few of them the budget of a prefill has room for: 32 tokens are fewer than one takes."""
    branch, other = prompts([40, 50])
    contexts = [np.append(branch, np.int32(token)) for token in (3, 3, 9, 11)]
    contexts.insert(2, other)
    requests = [generate_request(context, seed=i) for i, context in enumerate(contexts)]
    for budget in (32, 64, 96, 4096):
        together = engine_for(random_architecture(), prefill_tokens=budget)
        replies = run_all(together, requests)
        assert together.tokens_prefilled == 2 * 64
    for request, reply in zip(requests, replies, strict=True):
        alone = run_all(engine_for(random_architecture()), [request])[0]
        np.testing.assert_array_equal(reply.token_ids, alone.token_ids)
        np.testing.assert_array_equal(reply.logprobs, alone.logprobs)


def test_reading_a_prompt_ends_with_the_last_keys_and_values(random_architecture: Models) -> None:
    """The module's last layer has no more to do for a prompt's tokens; their hidden states are nobody's."""
    settings = EngineSettings(slots=8)
    model = load_model(random_architecture(), settings)
    first, last = (model.module.model.layers[number].mlp for number in (0, -1))
    tokens = {first: 0, last: 0}

    def count(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        tokens[module] += output.shape[:-1].numel()

    for module in tokens:
        module.register_forward_hook(count)
    run_all(Engine(model, settings), [generate_request(prompts([40])[0], max_tokens=3)])
    assert tokens == {first: 64 + 3 * 8, last: 3 * 8}


def test_logits_that_are_not_finite_fail_their_requests_and_leave_nothing_in_the_slots(
    random_architecture: Models, engine_for: Engines
) -> None:
    engine = engine_for(random_architecture())
    requests = [generate_request(prompt, seed=i) for i, prompt in enumerate(prompts([9, 60, 5]))]
    expected = run_all(engine, requests)
    healthy = engine.parameters.read(random_architecture())
    engine.parameters.copy_in({name: torch.full_like(tensor, torch.nan) for name, tensor in healthy.items()})
    broken = [submit(engine, requests[1]), submit(engine, score_request(prompts([9])[0], prompts([4])[0]))]
    finish(engine)
    for task in broken:
        with pytest.raises(PoisonedReplyError, match=r"weights 0\.0 gave logits that are not finite"):
            task.future.result(timeout=0)
    engine.parameters.copy_in(healthy)
    for before, after in zip(expected, run_all(engine, requests), strict=True):
        np.testing.assert_array_equal(after.logprobs, before.logprobs)


def test_a_torch_error_fails_the_batch_it_concerns_and_nothing_else(
    random_architecture: Models, monkeypatch: pytest.MonkeyPatch, engine_for: Engines
) -> None:
    engine = engine_for(random_architecture(), slots=2)
    running = submit(engine, generate_request(prompts([5])[0]))
    engine.step()

    def fail(*args: object) -> None:
        raise RuntimeError("not enough memory: 3 TB\n(stack)")

    with monkeypatch.context() as patch:
        patch.setattr(engine._model, "hidden", fail)
        scored = submit(engine, score_request(prompts([9])[0], prompts([4])[0]))
        engine.step()
    with pytest.raises(TransientError, match=r"failed on this request: not enough memory: 3 TB$"):
        scored.future.result(timeout=0)
    with monkeypatch.context() as patch:
        patch.setattr(engine._model, "prefill", fail)
        refused = submit(engine, generate_request(prompts([5])[0]))
        engine.step()
    with pytest.raises(TransientError):
        refused.future.result(timeout=0)
    finish(engine)
    assert len(running.future.result(timeout=0).token_ids) == 12
    with monkeypatch.context() as patch:
        patch.setattr(engine._model, "decode", fail)
        doomed = submit(engine, generate_request(prompts([5])[0]))
        engine.step()
    with pytest.raises(TransientError):
        doomed.future.result(timeout=0)
    assert not engine.busy


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
