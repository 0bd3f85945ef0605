"""A vLLM that was started without the flags that spot-async asks for: what is refused, and what works."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import StartServer, TinyModels
from parity import (
    Dense,
    decisions,
    expect_rollout,
    expect_topk,
    soon,
)
from safetensors.numpy import load_file, save_file
from server_process import RunningServer

from spot_async.backends.shared.remote import RemoteServer, ServerKind
from spot_async.backends.vllm import weights as vllm_weights
from spot_async.backends.vllm.backend import VllmBackend
from spot_async.backends.vllm.client import VllmClient, read_error
from spot_async.backends.vllm.replies import CompletionsRoute
from spot_async.backends.vllm.weights import DiskTransport, WeightUpdater
from spot_async.errors import (
    ConfigError,
    ProcessDiedError,
    TransientError,
)
from spot_async.types import SamplingSettings, ScoreRequest, WeightSnapshot, WeightVersion

pytestmark = pytest.mark.asyncio(loop_scope="module")

END = 2
VOCAB = 512
CONTEXT = 2048
PROMPT = np.random.default_rng(7).integers(3, VOCAB, 160).astype(np.int32)
V0, V1 = WeightVersion(0, 0), WeightVersion(0, 1)


def sampling(seed: int = 1, max_tokens: int = 48, **changes: Any) -> SamplingSettings:
    return SamplingSettings(max_tokens=max_tokens, stop_token_ids=(END,), seed=seed, **changes)


@pytest.fixture(scope="module")
def bare_server(start_vllm: StartServer, models: TinyModels) -> Iterator[RunningServer]:
    """Started as people start one: no token route, processed log-probabilities; no limit to how many.

    And with defaults of sampling, as a model's generation_config.json has them.
    """
    defaults = '{"top_p": 0.5, "top_k": 1, "min_p": 0.5, "repetition_penalty": 5.0, "presence_penalty": 2.0}'
    arguments = ("--logprobs-mode", "processed_logprobs", "--override-generation-config", defaults)
    with start_vllm(models.student, *arguments, max_logprobs=-1, scale_out=False) as server:
        yield server


async def test_a_server_without_its_token_route_names_the_flag_to_add(
    bare_server: RunningServer, models: TinyModels, tmp_path: Path
) -> None:
    settings = VllmBackend.Settings(url=bare_server.url)
    with pytest.raises(ConfigError, match=r"^teacher.*add --enable-scale-out to its command"):
        async with VllmBackend(settings, role="teacher", model=str(models.student), run_directory=tmp_path):
            pass


async def test_the_openai_route_serves_servers_without_the_other_and_processed_log_probabilities_are_seen(
    bare_server: RunningServer, models: TinyModels, dense_logprobs: Dense, tmp_path: Path, monkeypatch: Any
) -> None:
    settings = VllmBackend.Settings(url=bare_server.url)
    backend = VllmBackend(settings, role="teacher", model=str(models.student), run_directory=tmp_path)
    monkeypatch.setattr(backend._client, "route", CompletionsRoute())  # as when the other answers 404
    async with backend:
        found = await backend.capabilities(deadline=soon())
        assert (found.logprob_convention, found.generation_temperature) == ("truncated", "request")
        assert (found.candidate_logprobs, found.weight_update) == ("none", False)
        assert (found.max_top_k, found.max_context_tokens) == (VOCAB, CONTEXT - 1)
        reply = await backend.generate(PROMPT, sampling(), top_k=16, deadline=soon())
        rows = dense_logprobs(models.student, [*PROMPT.tolist(), *reply.token_ids.tolist()])
        rows = decisions(rows, PROMPT, reply.token_ids)
        expect_rollout(reply, rows)
        scores = await backend.score(ScoreRequest(PROMPT, reply.token_ids, 1.0, soon()), top_k=VOCAB)
        expect_topk(scores.topk_ids, scores.topk_logprobs, rows)
        entropy = -(np.exp(rows.astype(np.float64)) * rows).sum(axis=1)
        np.testing.assert_allclose(scores.entropy, entropy, rtol=0, atol=1e-4)


async def test_a_server_that_can_load_nothing_stays_paused_and_one_that_is_killed_is_transient(
    bare_server: RunningServer, models: TinyModels, tmp_path: Path, monkeypatch: Any
) -> None:
    of_other_shapes = tmp_path / "other-shapes"
    shutil.copytree(models.other, of_other_shapes)
    tensors = load_file(of_other_shapes / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    save_file(tensors, of_other_shapes / "model.safetensors", metadata={"format": "pt"})

    async def unchecked(*_: Any) -> None: ...

    settings = VllmBackend.Settings(url=bare_server.url)
    server = RemoteServer(
        settings,
        role="student",
        model=str(models.student),
        run_directory=tmp_path,
        kind=ServerKind(read_error=partial(read_error, "student")),
    )
    async with server:
        updater, client = WeightUpdater(server, DiskTransport(server)), VllmClient(server)
        client.route = CompletionsRoute()
        client.model = str(models.student)
        monkeypatch.setattr(vllm_weights, "check_snapshot", unchecked)
        with pytest.raises(TransientError, match="collective_rpc: HTTP 500"):  # and back to the model's own weights
            await updater.update(WeightSnapshot(directory=str(tmp_path), version=V1), deadline=soon())
        assert await server.get("/is_paused", dict[str, bool], deadline=soon()) == {"is_paused": False}
        await client.sample([5], {"max_tokens": 1}, top_k=0, logprobs=0, deadline=soon())
        good = WeightSnapshot(directory=str(models.student), version=V0)
        await updater.update(good, deadline=soon())
        with pytest.raises(ProcessDiedError, match="stays paused and must be restarted"):
            await updater.update(WeightSnapshot(directory=str(of_other_shapes), version=V1), deadline=soon())
        assert await server.get("/is_paused", dict[str, bool], deadline=soon()) == {"is_paused": True}
        waiting = asyncio.create_task(client.sample([5], {"max_tokens": 1}, top_k=0, logprobs=0, deadline=soon()))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        bare_server.signal_group(signal.SIGKILL)
        with pytest.raises(TransientError, match=r"^student/v1/completions: "):
            await waiting
