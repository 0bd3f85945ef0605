"""The engine's adapters: their numbers are those of merged weights, and requests of several run side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from random_adapters import merged_model, random_adapter
from safetensors.numpy import load_file, save_file

from spot_async.config import LoraConfig
from spot_async.errors import (
    DataError,
    PermanentError,
    PoisonedReplyError,
    ServerRestartedError,
    VersionMismatchError,
)
from spot_async.models.adapter_files import WEIGHTS_FILE
from spot_async.serving.engine.engine import Engine
from spot_async.serving.engine.weights import HELD_AT_ONCE
from spot_async.types import VersionSpan, WeightVersion

LORA = LoraConfig(rank=4, alpha=8.0, targets="all")
V1, V2 = WeightVersion(0, 1), WeightVersion(0, 2)
NAMES = ("one", "two", None)


def load(engine: Engine, name: str, directory: Path, version: WeightVersion) -> None:
    engine.adapters.load(name, engine.adapters.read(directory, version))


@pytest.fixture
def versions(tmp_path: Path, random_architecture: Models) -> Callable[..., tuple[Path, dict[str | None, Path]]]:
    """A base model, and its adapters one and two in the directories of these names."""

    def make(name: str = "qwen3", lora: LoraConfig = LORA) -> tuple[Path, dict[str | None, Path]]:
        base = random_architecture(name)
        adapters = {
            each: random_adapter(tmp_path / each, base, lora, seed=seed) for seed, each in enumerate(("one", "two"))
        }
        return base, {**adapters}

    return make


def adapted_engine(engine_for: Engines, base: Path, adapters: Any, **settings: Any) -> Engine:
    engine = engine_for(base, **settings)
    for number, name in enumerate(("one", "two"), 1):
        load(engine, name, adapters[name], WeightVersion(0, number))
    return engine


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("qwen3", LORA),
        ("qwen2", LoraConfig(rank=16, alpha=16.0, targets="attention")),
        pytest.param("llama", LoraConfig(rank=3, alpha=3.0, targets="mlp"), marks=pytest.mark.long),
    ],
)
def test_numbers_are_those_of_merged_weights(
    name: str, lora: LoraConfig, versions: Any, engine_for: Engines, tmp_path: Path
) -> None:
    """As closely as float32 can: a plain float32 forward of the merged weights says how closely that is, on this CPU.

    Three products and a sum stand in place of one product, so an adapted layer rounds at most four times as much.
    """
    base, adapters = versions(name, lora)
    merged = {each: merged_model(tmp_path / f"merged-{each}", base, path, lora) for each, path in adapters.items()}
    engine = adapted_engine(engine_for, base, adapters, slots=5, prefill_tokens=64)
    requests = [
        msgspec.structs.replace(generate_request(prompt, seed=i, max_tokens=[9, 30][i % 2]), adapter=NAMES[i % 3])
        for i, prompt in enumerate(prompts([1, 30, 33, 5, 64, 9]))
    ]
    replies = run_all(engine, requests, steps_between=2)
    exact, rounded = (
        [
            dense_logprobs(merged.get(request.adapter, base), request.prompt_ids, reply.token_ids, dtype=dtype)
            for request, reply in zip(requests, replies, strict=True)
        ]
        for dtype in (torch.float64, torch.float32)
    )
    nats = 4 * max(float(np.abs(one - two).max()) for one, two in zip(exact, rounded, strict=True))
    for number, (request, reply, dense) in enumerate(zip(requests, replies, exact, strict=True)):
        adapter = request.adapter
        of_tokens = dense[np.arange(len(dense)), reply.token_ids]
        np.testing.assert_allclose(reply.logprobs, of_tokens, rtol=0, atol=nats)
        assert reply.version_spans == (VersionSpan(0, len(dense), WeightVersion(0, (number + 1) % 3)),)
        scored = submit(engine, score_request(request.prompt_ids, reply.token_ids, adapter=adapter))
        ids = np.arange(VOCAB, dtype=np.int32)[None]
        candidates = candidate_request(
            *(request.prompt_ids, reply.token_ids),
            positions=np.array([len(dense) - 1], np.int32),
            candidate_ids=ids,
            expected_version=reply.version_spans[0].version,
            adapter=adapter,
        )
        chosen = submit(engine, candidates)
        finish(engine)
        np.testing.assert_allclose(scored.future.result(timeout=0).logprobs, of_tokens, rtol=0, atol=nats)
        np.testing.assert_allclose(chosen.future.result(timeout=0).logprobs[0], dense[-1], rtol=0, atol=nats)


def test_the_same_seed_gives_the_same_bits_whichever_adapters_run_beside_it(versions: Any, engine_for: Engines) -> None:
    base, adapters = versions()
    requests = [
        msgspec.structs.replace(generate_request(prompt, seed=i, max_tokens=10 + i), adapter=NAMES[i % 3])
        for i, prompt in enumerate(prompts([4, 40, 12, 33, 7, 61, 1, 20, 35]))
    ]
    engine = adapted_engine(engine_for, base, adapters)
    alone = [run_all(engine, [request])[0] for request in requests]
    together = run_all(
        adapted_engine(engine_for, base, adapters, slots=9, prefill_tokens=96), requests, steps_between=1
    )
    for expected, reply in zip(alone, together, strict=True):
        np.testing.assert_array_equal(reply.token_ids, expected.token_ids)
        np.testing.assert_array_equal(reply.logprobs, expected.logprobs)


def test_a_prefix_is_not_shared_between_adapters(versions: Any, engine_for: Engines) -> None:
    base, adapters = versions()
    prompt = prompts([20])[0]
    requests = [msgspec.structs.replace(generate_request(prompt), adapter=name) for name in NAMES]
    engine = adapted_engine(engine_for, base, adapters)
    for request, reply in zip(requests, run_all(engine, requests), strict=True):
        np.testing.assert_array_equal(reply.logprobs, run_all(engine, [request])[0].logprobs)


def test_a_response_ends_on_the_adapter_that_it_began_with(versions: Any, engine_for: Engines) -> None:
    base, adapters = versions()
    request = msgspec.structs.replace(generate_request(prompts([8])[0], max_tokens=20), adapter="one")
    engine = engine_for(base)
    load(engine, "one", adapters["one"], V1)
    expected = run_all(engine, [request])[0]
    task = submit(engine, request)
    for _ in range(5):
        engine.step()
    load(engine, "two", adapters["two"], V2)
    engine.adapters.unload("one")
    late = submit(engine, request)
    newer = submit(engine, msgspec.structs.replace(request, adapter="two"))
    finish(engine)
    np.testing.assert_array_equal(task.future.result(timeout=0).logprobs, expected.logprobs)
    assert task.future.result(timeout=0).version_spans == (VersionSpan(0, 20, V1),)
    assert newer.future.result(timeout=0).version_spans == (VersionSpan(0, 20, V2),)
    with pytest.raises(ServerRestartedError, match="has no adapter one"):
        late.future.result(timeout=0)


def test_an_adapter_is_never_replaced(versions: Any, engine_for: Engines) -> None:
    base, adapters = versions()
    engine = adapted_engine(engine_for, base, adapters)
    with pytest.raises(PermanentError, match="has an adapter one already"):
        load(engine, "one", adapters["two"], V2)


def test_adapters_of_runs_that_were_killed_do_not_pile_up(versions: Any, engine_for: Engines) -> None:
    base, adapters = versions()
    engine = adapted_engine(engine_for, base, adapters)
    one = engine.adapters.named("one")
    for number in range(HELD_AT_ONCE):
        engine.adapters.load(f"left-{number}", engine.adapters.read(adapters["two"], V2))
        assert engine.adapters.named("one") is one
    for name in ("two", "left-0"):
        with pytest.raises(ServerRestartedError, match=f"has no adapter {name}"):
            engine.adapters.named(name)


def test_a_row_is_not_touched_by_an_overflow_in_the_adapter_of_another(versions: Any, engine_for: Engines) -> None:
    base, adapters = versions()
    weights = load_file(adapters["two"] / WEIGHTS_FILE)
    save_file({name: each * 1e37 for name, each in weights.items()}, adapters["two"] / WEIGHTS_FILE)
    requests = [msgspec.structs.replace(generate_request(prompts([20])[0]), adapter=name) for name in NAMES]
    engine = adapted_engine(engine_for, base, adapters)
    tasks = [submit(engine, request) for request in requests]
    finish(engine)
    assert isinstance(tasks[1].future.exception(timeout=0), PoisonedReplyError)
    for task, request in zip(tasks[::2], requests[::2], strict=True):
        alone = run_all(engine, [request])[0]
        np.testing.assert_array_equal(task.future.result(timeout=0).logprobs, alone.logprobs)


def test_candidates_of_another_version_are_refused(versions: Any, engine_for: Engines) -> None:
    base, adapters = versions()
    engine = adapted_engine(engine_for, base, adapters)
    zero = np.zeros(1, np.int32)
    asked = candidate_request(
        *(zero, zero), positions=zero, candidate_ids=zero[None], expected_version=V2, adapter="one"
    )
    task = submit(engine, asked)
    finish(engine)
    with pytest.raises(VersionMismatchError):
        task.future.result(timeout=0)


def test_other_weights_end_what_was_asked_of_adapters(versions: Any, engine_for: Engines) -> None:
    base, adapters = versions()
    engine = adapted_engine(engine_for, base, adapters, slots=2)
    tasks = [
        submit(engine, msgspec.structs.replace(generate_request(prompt), adapter=name))
        for name, prompt in zip([*NAMES, "one"], prompts([3, 4, 5, 6]), strict=True)
    ]
    engine.step()
    engine.update_weights(engine.parameters.read(base), V1)
    finish(engine)
    assert tasks[2].future.result(timeout=0).token_ids.size
    for task in (tasks[0], tasks[1], tasks[3]):
        with pytest.raises(ServerRestartedError, match="were replaced"):
            task.future.result(timeout=0)
    with pytest.raises(PermanentError, match="was given other weights"):
        load(engine, "three", adapters["one"], V2)


@pytest.mark.parametrize(("engine", "said"), [("qwen3", "has shape"), ("gpt2", "target modules")])
def test_an_adapter_of_another_base_or_for_other_layers_is_refused(
    engine: str, said: str, tmp_path: Path, random_architecture: Models, engine_for: Engines
) -> None:
    other = random_adapter(tmp_path / "other", random_architecture("llama"), LORA, seed=0)
    with pytest.raises(DataError, match=said):
        engine_for(random_architecture(engine)).adapters.read(other, V1)
