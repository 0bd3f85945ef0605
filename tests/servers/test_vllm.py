"""The vLLM backend against the real server, on a CPU in float32.

What any backend must do is the conformance contract's; here are the numbers, and what is peculiar to vLLM: weights
that change in the middle of a response, weights that it cannot load, and the flags that it can be started without.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from conftest import TinyModels
from parity import (
    PARITY_NATS,
    Dense,
    decisions,
    expect_of_samples,
    expect_rollout,
    expect_topk,
    nats_off,
    own,
    soon,
)
from safetensors.numpy import load_file, save_file
from server_process import RunningServer
from vllm_metrics import ENDED_BY_LENGTH, SAMPLED, UNDER_WAY, metric, until_metric

from spot_async.backends.vllm import weights as vllm_weights
from spot_async.backends.vllm.backend import VllmBackend
from spot_async.backends.vllm.client import VllmClient
from spot_async.errors import (
    ConfigError,
    DataError,
    PermanentError,
    ProcessDiedError,
    TransientError,
    VersionMismatchError,
)
from spot_async.types import SamplingSettings, ScoreRequest, VersionSpan, WeightSnapshot, WeightVersion

pytestmark = pytest.mark.asyncio(loop_scope="module")

END = 2
VOCAB = 512
CONTEXT = 2048
PROMPT = np.random.default_rng(7).integers(3, VOCAB, 160).astype(np.int32)  # longer than a block of the prefix cache
V0, V1 = WeightVersion(0, 0), WeightVersion(0, 1)


def sampling(seed: int = 1, max_tokens: int = 48, **changes: Any) -> SamplingSettings:
    return SamplingSettings(**{"max_tokens": max_tokens, "stop_token_ids": (END,), "seed": seed, **changes})


ENDLESS = SamplingSettings(max_tokens=CONTEXT - len(PROMPT), stop_token_ids=(), seed=1)  # seconds of one request


@pytest.fixture(scope="module", params=["vllm", "vllm_v2"])
def runner(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# What takes more than ten seconds in Triton's interpreter.
slow_on_v2 = pytest.mark.parametrize(
    "runner", ["vllm", pytest.param("vllm_v2", marks=pytest.mark.nightly)], indirect=True
)


@pytest.fixture(scope="module")
def vllm_student(runner: str, request: pytest.FixtureRequest) -> RunningServer:
    server: RunningServer = request.getfixturevalue(f"{runner}_student")
    return server


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def backend(vllm_student: RunningServer, models: TinyModels, tmp_path_factory: Any) -> AsyncIterator[VllmBackend]:
    """A student's backend whose server has been sent the first weights, as a run does."""
    settings = VllmBackend.Settings(url=vllm_student.url, top_k=32)
    run = tmp_path_factory.mktemp("run")
    async with VllmBackend(settings, role="student", model=str(models.student), run_directory=run) as backend:
        await backend.update_weights(WeightSnapshot(directory=str(models.student), version=V0), deadline=soon())
        yield backend


@pytest.fixture
def snapshot(models: TinyModels, tmp_path: Path) -> Callable[..., WeightSnapshot]:
    """The other student's weights as version 0.1, with tensors changed as `change` says."""

    def make(change: Callable[[dict[str, Any]], None] | None = None) -> WeightSnapshot:
        directory = tmp_path / "step-1"
        shutil.copytree(models.other, directory)
        if change is not None:
            tensors = load_file(directory / "model.safetensors")
            change(tensors)
            save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return WeightSnapshot(directory=str(directory), version=V1)

    return make


async def test_start_up_finds_what_the_server_offers(backend: VllmBackend, runner: str) -> None:
    found = await backend.capabilities(deadline=soon())
    assert found.server == "vllm 0.32.0"
    assert found.vocab_size == VOCAB
    assert (found.max_top_k, found.max_generation_top_k, found.max_position_top_k) == (64, 63, 64)
    # One that scores chosen tokens needs room for the token that vLLM samples after them.
    offered = {"vllm": ("single", CONTEXT), "vllm_v2": ("batched", CONTEXT - 1)}
    assert (found.candidate_logprobs, found.max_context_tokens) == offered[runner]
    assert (found.weight_update, found.logprob_convention) == (True, "untruncated")
    assert (found.score_temperature, found.generation_temperature, found.version) == ("one", "one", None)
    assert 0.0 <= found.logprob_noise_nats < PARITY_NATS


async def test_what_the_generation_config_says_bends_no_sample(backend: VllmBackend) -> None:
    """The server was started with a top_k of 1. That penalties change no log-probability is seen below."""
    async with asyncio.TaskGroup() as group:
        asked = [
            group.create_task(backend.generate(PROMPT, sampling(seed, stop_token_ids=()), deadline=soon()))
            for seed in range(8)
        ]
    assert len({tuple(task.result().token_ids.tolist()) for task in asked}) == 8


@slow_on_v2
async def test_rollouts_have_the_models_log_probabilities_alone_and_in_company(
    backend: VllmBackend, models: TinyModels, dense_logprobs: Dense
) -> None:
    alone = await backend.generate(PROMPT, sampling(seed=3), top_k=16, deadline=soon())
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(backend.generate(PROMPT[: 9 * n], sampling(seed=3), top_k=16, deadline=soon()))
            for n in range(1, 17)
        ]
        again = group.create_task(backend.generate(PROMPT, sampling(seed=3), top_k=16, deadline=soon()))
        other = group.create_task(backend.generate(PROMPT, sampling(seed=4), top_k=16, deadline=soon()))
    assert again.result().token_ids.tolist() == alone.token_ids.tolist()
    assert other.result().token_ids.tolist() != alone.token_ids.tolist()
    for n, task in enumerate(tasks, start=1):
        prompt, reply = PROMPT[: 9 * n].tolist(), task.result()
        rows = dense_logprobs(models.student, prompt + reply.token_ids.tolist())
        expect_rollout(reply, decisions(rows, prompt, reply.token_ids))


async def test_only_the_stop_tokens_of_the_request_end_a_response(backend: VllmBackend) -> None:
    free = await backend.generate(PROMPT, sampling(seed=5), deadline=soon())
    stop = int(free.token_ids[7])
    first = free.token_ids.tolist().index(stop) + 1
    stopping = SamplingSettings(max_tokens=48, stop_token_ids=(stop,), seed=5)
    stopped = await backend.generate(PROMPT, stopping, deadline=soon())
    assert (stopped.finish_reason, stopped.token_ids.tolist()) == ("stop", free.token_ids[:first].tolist())
    # The model's own end token is one among others when the request does not name it.
    only = VllmClient(backend._server)
    only.model = backend._client.model
    parameters = {"max_tokens": 3, "ignore_eos": True, "logit_bias": {str(END): 100}}
    answer = await only.sample(PROMPT.tolist(), parameters, top_k=0, logprobs=0, deadline=soon())
    assert answer.token_ids.tolist() == [END] * 3


async def test_scores_are_the_models_from_the_first_response_token_to_the_last(
    backend: VllmBackend, models: TinyModels, dense_logprobs: Dense
) -> None:
    response = np.random.default_rng(8).integers(0, VOCAB, CONTEXT - len(PROMPT) - 1).astype(np.int32)  # the longest
    rows = decisions(dense_logprobs(models.student, [*PROMPT.tolist(), *response.tolist()]), PROMPT, response)
    scores = await backend.score(ScoreRequest(PROMPT, response, 1.0, soon()), top_k=16)
    np.testing.assert_allclose(scores.logprobs, own(rows, response), rtol=0, atol=PARITY_NATS)
    assert scores.topk_ids.shape == (len(response), 16)
    expect_topk(scores.topk_ids, scores.topk_logprobs, rows)
    entropy = -(np.exp(rows.astype(np.float64)) * rows).sum(axis=1)
    assert (scores.entropy_lower <= entropy + 1e-4).all()
    assert (entropy <= scores.entropy_upper + 1e-4).all()
    longer = np.append(response, np.int32(5))
    with pytest.raises(PermanentError, match="exceed the server's context of 2048 tokens"):
        await backend.score(ScoreRequest(PROMPT, longer, 1.0, soon()), top_k=16)
    empty = await backend.score(ScoreRequest(PROMPT, response[:0], 1.0, soon()), top_k=16)
    assert empty.topk_logprobs.shape == (0, 16)


async def test_a_score_without_a_top_k_is_of_the_tokens_alone(
    backend: VllmBackend, models: TinyModels, dense_logprobs: Dense
) -> None:
    response = PROMPT[::-1][:20].copy()
    narrow = VllmClient(backend._server)
    narrow.model = backend._client.model
    rows = decisions(dense_logprobs(models.student, [*PROMPT.tolist(), *response.tolist()]), PROMPT, response)
    scored = await narrow.score(PROMPT.tolist(), response.tolist(), top_k=0, deadline=soon())
    np.testing.assert_allclose(scored.logprobs, own(rows, response), rtol=0, atol=PARITY_NATS)
    assert scored.topk_ids.shape == (20, 0)


async def test_single_positions_are_served_wider(
    backend: VllmBackend, models: TinyModels, dense_logprobs: Dense
) -> None:
    response, positions = PROMPT[::-1].copy(), np.array([0, 3, 150], np.int32)
    rows = decisions(dense_logprobs(models.student, [*PROMPT.tolist(), *response.tolist()]), PROMPT, response)
    reply = await backend.score_at(ScoreRequest(PROMPT, response, 1.0, soon()), positions, top_k=64)
    expect_topk(reply.topk_ids, reply.topk_logprobs, rows[positions])
    scores = await backend.score(ScoreRequest(PROMPT, response, 1.0, soon()), top_k=16)
    assert (reply.entropy_upper - reply.entropy_lower < (scores.entropy_upper - scores.entropy_lower)[positions]).all()


async def test_candidates_are_exact_whatever_their_rank_and_of_the_version_asked_for(
    backend: VllmBackend, models: TinyModels, dense_logprobs: Dense
) -> None:
    response, positions = PROMPT[::-1].copy(), np.array([0, 1, 77, 159], np.int32)
    rows = decisions(dense_logprobs(models.student, [*PROMPT.tolist(), *response.tolist()]), PROMPT, response)
    ranks = np.argsort(-rows[positions], axis=1)
    candidates = ranks[:, [0, 15, 200, VOCAB - 1]].astype(np.int32)

    async def ask(version: WeightVersion) -> Any:
        return await backend.candidate_logprobs(
            ScoreRequest(PROMPT, response, 1.0, soon()), positions, candidates, expected_version=version
        )

    # Beside requests with log-probabilities of their own, which vLLM's way of asking for many tokens at once corrupts.
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(ask(V0))
        beside = group.create_task(backend.generate(PROMPT, sampling(), top_k=5, deadline=soon()))
    expected = np.take_along_axis(rows[positions], candidates.astype(np.int64), axis=1)
    np.testing.assert_allclose(asked.result(), expected, rtol=0, atol=PARITY_NATS)
    generated = beside.result()
    tokens = [*PROMPT.tolist(), *generated.token_ids.tolist()]
    expect_rollout(generated, decisions(dense_logprobs(models.student, tokens), PROMPT, generated.token_ids))
    with pytest.raises(VersionMismatchError, match=r"holds weights 0\.0, not the 0\.1 asked for"):
        await ask(V1)


async def test_new_weights_serve_everything_and_old_ones_again(
    backend: VllmBackend, models: TinyModels, dense_logprobs: Dense, snapshot: Callable[..., WeightSnapshot]
) -> None:
    for directory, version in ((Path(snapshot().directory), V1), (models.student, V0)):
        await backend.generate(PROMPT, sampling(max_tokens=1), deadline=soon())  # fills the prefix cache
        await backend.update_weights(WeightSnapshot(directory=str(directory), version=version), deadline=soon())
        reply = await backend.generate(PROMPT, sampling(), top_k=16, deadline=soon())
        assert reply.version_spans == (VersionSpan(0, len(reply.token_ids), version),)
        rows = dense_logprobs(directory, [*PROMPT.tolist(), *reply.token_ids.tolist()])
        rows = decisions(rows, PROMPT, reply.token_ids)
        expect_rollout(reply, rows)
        scores = await backend.score(ScoreRequest(PROMPT, reply.token_ids, 1.0, soon()), top_k=16)
        np.testing.assert_allclose(scores.logprobs, own(rows, reply.token_ids), rtol=0, atol=PARITY_NATS)
        positions = np.array([0, 5], np.int32)
        candidates = np.array([[1, 500], [2, 7]], np.int32)
        served = await backend.candidate_logprobs(
            ScoreRequest(PROMPT, reply.token_ids, 1.0, soon()), positions, candidates, expected_version=version
        )
        expected = np.take_along_axis(rows[positions], candidates.astype(np.int64), axis=1)
        np.testing.assert_allclose(served, expected, rtol=0, atol=PARITY_NATS)


@slow_on_v2
async def test_tokens_of_a_response_that_weights_change_under_carry_the_right_version(
    backend: VllmBackend, vllm_student: RunningServer, models: TinyModels, dense_logprobs: Dense, snapshot: Any
) -> None:
    new, old = snapshot(), WeightSnapshot(directory=str(models.student), version=V0)

    async def meet_an_update() -> float:
        before = await metric(vllm_student, SAMPLED)
        async with asyncio.TaskGroup() as group:
            response = group.create_task(backend.generate(PROMPT, ENDLESS, top_k=4, deadline=soon()))
            await until_metric(vllm_student, SAMPLED, lambda tokens: tokens >= before + 10)
            await backend.update_weights(new, deadline=soon())
        await backend.update_weights(old, deadline=soon())
        reply = response.result()
        spans = reply.version_spans
        assert [span.version for span in spans] == [V0, V1]
        tokens = [*PROMPT.tolist(), *reply.token_ids.tolist()]
        old_rows, new_rows = (
            decisions(dense_logprobs(Path(each.directory), tokens), PROMPT, reply.token_ids) for each in (old, new)
        )
        switch = spans[0].end
        assert 0 < switch < len(reply.token_ids)
        # After the switch the whole context is read again: nothing of the old weights is left in the cache.
        return nats_off(reply, np.concatenate([old_rows[:switch], new_rows[switch:]]))

    await expect_of_samples(meet_an_update)


async def test_weights_of_another_shape_never_reach_the_server(
    backend: VllmBackend, snapshot: Callable[..., WeightSnapshot]
) -> None:
    def narrower(tensors: dict[str, Any]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]

    with pytest.raises(DataError, match=r"model\.norm\.weight.*shape"):
        await backend.update_weights(snapshot(narrower), deadline=soon())
    reply = await backend.generate(PROMPT, sampling(max_tokens=4), deadline=soon())
    assert {span.version for span in reply.version_spans} == {V0}


async def test_a_server_that_cannot_load_a_snapshot_goes_on_with_the_one_before(
    backend: VllmBackend, models: TinyModels, dense_logprobs: Dense, tmp_path: Path, monkeypatch: Any
) -> None:
    async def unchecked(*_: Any) -> None:
        """The server sees another file system than we do."""

    monkeypatch.setattr(vllm_weights, "check_snapshot", unchecked)
    with pytest.raises(TransientError, match="collective_rpc: HTTP 500"):
        await backend.update_weights(WeightSnapshot(directory=str(tmp_path), version=V1), deadline=soon())
    reply = await backend.generate(PROMPT, sampling(), top_k=4, deadline=soon())
    assert {span.version for span in reply.version_spans} == {V0}
    rows = dense_logprobs(models.student, [*PROMPT.tolist(), *reply.token_ids.tolist()])
    expect_rollout(reply, decisions(rows, PROMPT, reply.token_ids))


@contextmanager
def others_while_loading(monkeypatch: pytest.MonkeyPatch, transport: Any, planted: Path) -> Iterator[None]:
    """Put other weights in the place of a snapshot's while the server reads them, and nowhere else."""
    send = transport.send

    async def send_others(snapshot: WeightSnapshot, layout: Any, *, deadline: float) -> None:
        path, own = Path(snapshot.directory) / "model.safetensors", Path(snapshot.directory) / "own"
        path.rename(own)
        shutil.copyfile(planted / path.name, path)
        try:
            await send(snapshot, layout, deadline=deadline)
        finally:
            own.replace(path)

    with monkeypatch.context() as patch:
        patch.setattr(transport, "send", send_others)
        yield


async def test_weights_that_are_others_only_while_the_server_reads_them_are_noticed(
    backend: VllmBackend,
    models: TinyModels,
    snapshot: Callable[..., WeightSnapshot],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def moved(tensors: dict[str, Any]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.5

    assert (await backend.capabilities(deadline=soon())).weights_checked
    await backend.update_weights(new := snapshot(moved), deadline=soon())
    with (
        others_while_loading(monkeypatch, backend._updater._transport, models.teacher),
        pytest.raises(ProcessDiedError, match=r"student: does not hold weights 0\.1 after loading them"),
    ):
        await backend.update_weights(new, deadline=soon())
    old = WeightSnapshot(directory=str(models.student), version=V0)
    await backend.update_weights(old, deadline=soon())
    reply = await backend.generate(PROMPT, sampling(max_tokens=4), deadline=soon())
    assert {span.version for span in reply.version_spans} == {V0}


async def test_cancelled_requests_free_their_places(backend: VllmBackend, vllm_student: RunningServer) -> None:
    ended = await metric(vllm_student, ENDED_BY_LENGTH)
    requests = [asyncio.create_task(backend.generate(PROMPT, ENDLESS, deadline=soon())) for _ in range(16)]
    await until_metric(vllm_student, UNDER_WAY, lambda count: count > 8)
    for request in requests:
        request.cancel()
    outcomes = await asyncio.gather(*requests, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {asyncio.CancelledError}
    await until_metric(vllm_student, UNDER_WAY, lambda count: count == 0)
    assert await metric(vllm_student, ENDED_BY_LENGTH) == ended  # none was sampled to its end


async def test_an_aborted_response_is_no_response(backend: VllmBackend, vllm_student: RunningServer) -> None:
    requests = [asyncio.create_task(backend.generate(PROMPT, ENDLESS, deadline=soon())) for _ in range(16)]
    await until_metric(vllm_student, UNDER_WAY, lambda count: count == 16)
    await backend._server.post("/abort_requests", {}, dict[str, Any], deadline=soon())
    for outcome in await asyncio.gather(*requests, return_exceptions=True):
        assert isinstance(outcome, TransientError)
        assert "gave up after" in str(outcome)


async def test_what_does_not_fit_is_refused_before_vllm_would_cut_it_short(backend: VllmBackend) -> None:
    with pytest.raises(PermanentError, match=r"160 tokens and 1889 new ones exceed the server's context of 2048"):
        await backend.generate(PROMPT, sampling(max_tokens=CONTEXT - len(PROMPT) + 1), deadline=soon())


async def test_a_directory_with_another_tokenizer_is_refused(
    vllm_student: RunningServer, models: TinyModels, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(models.student, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"]["add_prefix_space"] = True
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = VllmBackend.Settings(url=vllm_student.url)
    with pytest.raises(ConfigError, match=r"tokenizers of .* and of the served model .* differ"):
        async with VllmBackend(settings, role="teacher", model=str(other), run_directory=tmp_path):
            pass
