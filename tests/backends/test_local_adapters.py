"""The local backend with adapters as weights: a response is of one version, and what the run loaded is unloaded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import soon
from engine_requests import dense_logprobs
from random_adapters import merged_model, random_adapter

from spot_async.backends.local.backend import LocalBackend
from spot_async.backends.local.server import LocalServer
from spot_async.backends.shared.launch import free_port
from spot_async.config import LoraConfig
from spot_async.errors import ConfigError, ServerRestartedError, VersionMismatchError
from spot_async.models.weight_files import ADAPTER
from spot_async.serving import api
from spot_async.types import (
    FloatArray,
    Generation,
    SamplingSettings,
    ScoreRequest,
    VersionSpan,
    WeightSnapshot,
    WeightVersion,
)

pytestmark = pytest.mark.usefixtures("servers_on_threads")
LORA = LoraConfig(rank=4, alpha=8.0, targets="all")
PROMPT, RESPONSE = np.array([5, 9, 2], np.int32), np.array([7, 7, 30, 1], np.int32)
TOKENS = 300
V0 = WeightVersion(0, 0)
AS_ADAPTERS = {"weights": {"transport": "adapter"}}


def snapshot(directory: Path | str, step: int) -> WeightSnapshot:
    return WeightSnapshot(directory=str(directory), version=WeightVersion(0, step))


@pytest.fixture
def base(random_model: Callable[..., Path]) -> Path:
    return random_model(initializer_range=0.2)


@pytest.fixture
def updates(tmp_path: Path, base: Path) -> list[WeightSnapshot]:
    for step in (1, 2):
        random_adapter(tmp_path / f"step-{step}" / ADAPTER, base, LORA, seed=step)
    return [snapshot(tmp_path / f"step-{step}", step) for step in (1, 2)]


def student(base: Path, directory: Path, **settings: Any) -> LocalBackend:
    chosen = LocalBackend.Settings.model_validate({**AS_ADAPTERS, **settings}).with_lora(LORA)
    return LocalBackend(chosen, role="student", model=str(base), run_directory=directory)


async def generate(backend: LocalBackend, seed: int) -> Generation:
    sampling = SamplingSettings(max_tokens=TOKENS, stop_token_ids=(), seed=seed)
    return await backend.generate(PROMPT, sampling, session="s", deadline=soon())


async def score(backend: LocalBackend) -> FloatArray:
    return (await backend.score(ScoreRequest(PROMPT, RESPONSE, 1.0, soon()), top_k=0)).logprobs


async def candidates(backend: LocalBackend, expected: WeightVersion) -> FloatArray:
    return await backend.candidate_logprobs(
        ScoreRequest(PROMPT, RESPONSE, 1.0, soon()),
        np.arange(4, dtype=np.int32),
        RESPONSE[:, None],
        expected_version=expected,
    )


async def test_responses_under_way_end_on_their_version_and_the_next_are_of_the_new_one(
    base: Path, updates: list[WeightSnapshot], tmp_path: Path
) -> None:
    models = {V0: base}
    for each in updates:
        models[each.version] = merged_model(tmp_path / f"of-{each.version}", base, Path(each.directory) / ADAPTER, LORA)
    async with (
        student(base, tmp_path / "run") as backend,
        asyncio.TaskGroup() as group,
        contextlib.AsyncExitStack() as of_the_first,
    ):
        found = await backend.capabilities(deadline=soon())
        assert (found.weight_transport, found.weight_update, found.in_flight_updates) == ("adapter", True, True)
        assert found.version == V0
        of_the_first.enter_context(backend._asking())  # a request that does not end before the others
        tasks = []
        for update in (None, *updates):
            if update is not None:
                await backend.update_weights(update, deadline=soon())
            tasks.append([group.create_task(generate(backend, seed)) for seed in range(2)])
            scored = await score(backend)  # steps pass
            version = V0 if update is None else update.version
            exact = dense_logprobs(models[version], PROMPT, RESPONSE)[np.arange(4), RESPONSE]
            np.testing.assert_allclose(scored, exact, atol=1e-5)
            np.testing.assert_allclose((await candidates(backend, version))[:, 0], exact, atol=1e-5)
        exact = dense_logprobs(base, PROMPT, RESPONSE)[np.arange(4), RESPONSE]
        np.testing.assert_allclose((await candidates(backend, V0))[:, 0], exact, atol=1e-5)
        reference = await backend.score_base(ScoreRequest(PROMPT, RESPONSE, 1.0, soon()), top_k=0)
        np.testing.assert_allclose(reference.logprobs, exact, atol=1e-5)
        await of_the_first.aclose()
        await asyncio.gather(*tasks[0], *tasks[1])
        await backend.update_weights(snapshot(updates[0].directory, 3), deadline=soon())
        with pytest.raises(VersionMismatchError, match=r"holds weights 0\.3, not the 0\.1 asked for"):
            await candidates(backend, updates[0].version)
    for version, of_version in zip(models, tasks, strict=True):
        for task in of_version:
            reply = task.result()
            assert reply.version_spans == (VersionSpan(0, TOKENS, version),)
            exact = dense_logprobs(models[version], PROMPT, reply.token_ids)
            np.testing.assert_allclose(reply.logprobs, exact[np.arange(TOKENS), reply.token_ids], atol=1e-5)


async def test_a_server_that_a_run_leaves_has_none_of_its_adapters_and_one_with_other_weights_takes_none(
    base: Path, updates: list[WeightSnapshot], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, names = free_port(), []
    load = LocalServer.load

    async def noted(self: LocalServer, name: str, *rest: Any, **more: Any) -> None:
        names.append(name)
        await load(self, name, *rest, **more)

    monkeypatch.setattr(LocalServer, "load", noted)
    monkeypatch.setenv("SPOT_ASYNC_API_KEY", "key")
    owner = LocalBackend(
        LocalBackend.Settings(port=port), role="student", model=str(base), run_directory=tmp_path / "owner"
    )
    async with owner:
        monkeypatch.setenv("SPOT_ASYNC_UPDATE_TOKEN", owner._server.credentials.update_token or "")
        url = f"http://127.0.0.1:{port}"
        async with student(base, tmp_path / "run", url=url) as backend:
            await backend.update_weights(updates[0], deadline=soon())
        assert len(names) == 2
        for name in names:
            request = api.ScoreRequest(prompt_ids=PROMPT, response_ids=RESPONSE, top_k=0, adapter=name, timeout_s=60.0)
            with pytest.raises(ServerRestartedError, match=f"has no adapter {name}"):
                await owner._server.post(api.SCORE, request, object, lambda reply: reply, soon())
        await owner.update_weights(snapshot(base, 7), deadline=soon())
        with pytest.raises(ConfigError, match=r"student\.backend: .*was given other weights after its start"):
            async with student(base, tmp_path / "late", url=url):
                pass
