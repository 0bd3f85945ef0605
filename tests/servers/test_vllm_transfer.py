"""Weights from process to process, against the real server on a CPU.

vLLM's own transfer backends need GPUs, so a plugin adds one between CPUs (`vllm_plugins`). The protocol, the sessions
and the loading are vLLM's, the sender is ours. NCCL is not run.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from conftest import TinyModels
from parity import Dense, decisions, expect_rollout, soon

from spot_async.backends.shared.launch_settings import LaunchSettings
from spot_async.backends.shared.weight_transport import WeightSender, WeightSettings
from spot_async.backends.vllm.backend import VllmBackend
from spot_async.base.processes.guard import process_tree
from spot_async.errors import ProcessDiedError, SpotError, TransientError
from spot_async.types import SamplingSettings, VersionSpan, WeightSnapshot, WeightVersion

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = np.random.default_rng(7).integers(3, 512, 160).astype(np.int32)  # longer than a block of the prefix cache
SAMPLING = SamplingSettings(max_tokens=32, stop_token_ids=(), seed=1)
V0, V1, V2 = WeightVersion(0, 0), WeightVersion(0, 1), WeightVersion(0, 2)
DISTRIBUTED = WeightSettings(transport="distributed", device="cpu")


@pytest.fixture(scope="module", params=["vllm", pytest.param("vllm_v2", marks=pytest.mark.nightly)])
def launch(request: pytest.FixtureRequest) -> LaunchSettings:
    """What starts a server with the V1 or the V2 model runner, and with the plugin."""
    settings: LaunchSettings = request.getfixturevalue(f"{request.param}_launch")
    plugins = settings.environment["VLLM_PLUGINS"] + ",gloo_weight_transfer"
    return settings.model_copy(update={"environment": {**settings.environment, "VLLM_PLUGINS": plugins}})


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def backend(launch: LaunchSettings, models: TinyModels, tmp_path_factory: Any) -> AsyncIterator[VllmBackend]:
    settings, run = VllmBackend.Settings(launch=launch, weights=DISTRIBUTED), tmp_path_factory.mktemp("run")
    others = process_tree(os.getpid()).keys()
    async with VllmBackend(settings, role="student", model=str(models.student), run_directory=run) as backend:
        started = process_tree(os.getpid()).keys() - others
        yield backend
    assert not process_tree(os.getpid()).keys() & started, "it ends with its backend"


async def expect_weights(backend: VllmBackend, model: Path, version: WeightVersion, dense: Dense) -> None:
    reply = await backend.generate(PROMPT, SAMPLING, top_k=4, deadline=soon())
    assert reply.version_spans == (VersionSpan(0, len(reply.token_ids), version),)
    rows = dense(model, [*PROMPT.tolist(), *reply.token_ids.tolist()])
    expect_rollout(reply, decisions(rows, PROMPT, reply.token_ids))


async def test_weights_that_are_sent_serve_everything_and_others_after_them(
    backend: VllmBackend, models: TinyModels, dense_logprobs: Dense
) -> None:
    assert (await backend.capabilities(deadline=soon())).weight_transport == "distributed"
    for model, version in ((models.other, V1), (models.student, V2), (models.other, V1)):
        await backend.update_weights(WeightSnapshot(directory=str(model), version=version), deadline=soon())
        await expect_weights(backend, model, version, dense_logprobs)


@pytest.mark.parametrize("sent", [1, 7, 12])  # of 25; the last leaves a fused matrix half there
async def test_a_sender_that_ends_half_way_leaves_the_weights_before(
    backend: VllmBackend, models: TinyModels, dense_logprobs: Dense, monkeypatch: Any, sent: int
) -> None:
    before = WeightSnapshot(directory=str(models.student), version=V0)
    await backend.update_weights(before, deadline=soon())
    whole = WeightSender.broadcast

    async def half(self: WeightSender, directory: str, tensors: Any, *, deadline: float) -> None:
        monkeypatch.setattr(WeightSender, "broadcast", whole)  # the next is sent whole
        await whole(self, directory, tensors[:sent], deadline=deadline)
        raise TransientError("the sender ended")

    monkeypatch.setattr(WeightSender, "broadcast", half)
    with pytest.raises(TransientError, match="the sender ended"):
        await backend.update_weights(WeightSnapshot(directory=str(models.other), version=V1), deadline=soon())
    await expect_weights(backend, models.student, V0, dense_logprobs)
    await backend.update_weights(WeightSnapshot(directory=str(models.other), version=V1), deadline=soon())
    await expect_weights(backend, models.other, V1, dense_logprobs)


async def test_a_session_that_somebody_left_open_ends_and_the_next_update_is_whole(
    backend: VllmBackend, models: TinyModels, dense_logprobs: Dense
) -> None:
    await backend._server.ask("/start_weight_update", None, bytes, deadline=soon())
    update = WeightSnapshot(directory=str(models.other), version=V2)
    with pytest.raises(TransientError, match="already active"):
        await backend.update_weights(update, deadline=soon())
    await backend.update_weights(update, deadline=soon())
    await expect_weights(backend, models.other, V2, dense_logprobs)


async def test_a_server_without_the_backend_says_so_in_its_own_words(
    vllm_launch: LaunchSettings, models: TinyModels, tmp_path: Path
) -> None:
    settings = VllmBackend.Settings(launch=vllm_launch, weights=DISTRIBUTED)
    with pytest.raises(SpotError, match="Invalid weight transfer backend: gloo") as caught:
        async with VllmBackend(settings, role="student", model=str(models.student), run_directory=tmp_path):
            pass
    assert isinstance(caught.value, ProcessDiedError)
