"""The serving engine step by step: whose turn it is, what is read once, aborts, new weights, and steps that fail."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_requests import (
    Engines,
    Models,
    dense_logprobs,
    finish,
    generate_request,
    prompts,
    run_all,
    score_request,
    submit,
)

from spot_async.errors import PoisonedReplyError, TransientError
from spot_async.serving.engine.engine import DECODES_BETWEEN_PREFILLS, Engine
from spot_async.serving.engine.model import load_model
from spot_async.serving.settings import EngineSettings
from spot_async.types import VersionSpan, WeightVersion


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
