"""A real server gets each new version as an adapter, under a load of rollouts, and keeps two beside the newest.

Every response is of one version, and its log-probabilities are those that a plain forward gives with that adapter
merged in. Nothing is lost, and nothing piles up in the server.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from conftest import StartServer, TinyModels
from parity import PARITY_NATS, Dense, decisions, own, soon
from safetensors.torch import load_file, save_file
from server_process import RunningServer
from under_load import expect_rounding, nats_off_spans, under_load

from spot_async.backends.sglang.backend import SglangBackend
from spot_async.backends.shared.lora import LOADED_AT_ONCE
from spot_async.backends.vllm.backend import VllmBackend
from spot_async.config import LoraConfig
from spot_async.errors import ConfigError, DataError
from spot_async.models.adapter_files import WEIGHTS_FILE, layers_of, tensor_shapes, write_config
from spot_async.models.weight_files import ADAPTER
from spot_async.types import ScoreRequest, WeightSnapshot, WeightVersion

TOKENS = 60
LORA = LoraConfig(rank=8, alpha=16.0, targets="all")
KINDS = {"vllm": VllmBackend, "vllm_v2": VllmBackend, "sglang": SglangBackend}


def published(directory: Path, base: Path, seed: int) -> Path:
    """Weights as the trainer publishes them: the merged model, and the adapter beside it."""
    layers, draw = layers_of(base, LORA), torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=draw) * 0.05 for name, shape in tensor_shapes(layers, LORA.rank).items()
    }
    (directory / ADAPTER).mkdir(parents=True)
    save_file(tensors, directory / ADAPTER / WEIGHTS_FILE)
    write_config(directory / ADAPTER, layers, LORA, str(base))
    for file in base.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    weights = load_file(base / "model.safetensors")
    for name in layers:
        down, up = (tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        weights[f"{name}.weight"] += LORA.scale * up @ down
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(params=["vllm", pytest.param("vllm_v2", marks=pytest.mark.nightly), "sglang"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def start(kind: str, request: pytest.FixtureRequest) -> StartServer:
    made: StartServer = request.getfixturevalue(f"start_{kind}")
    return made


def backend(kind: str, server: RunningServer, directory: Path, lora: LoraConfig = LORA) -> Any:
    settings = KINDS[kind].Settings.model_validate({"url": server.url, "weights": {"transport": "adapter"}})
    return KINDS[kind](settings.with_lora(lora), role="student", model=str(server.model), run_directory=directory)


@pytest.mark.parametrize("updates", [6, pytest.param(50, marks=pytest.mark.nightly)])
async def test_every_version_is_an_adapter_of_its_own(
    updates: int, kind: str, start: StartServer, models: TinyModels, tmp_path: Path, dense_logprobs: Dense
) -> None:
    later = [published(tmp_path / f"step-{number}", models.student, number) for number in (1, 2)]
    held = {WeightVersion(0, step): later[step % 2] for step in range(1, updates + 1)}
    flags = ["--lora-backend", "torch_native"] if kind == "sglang" else []
    with start(models.student, *flags, adapters=LORA) as server:
        before = {WeightVersion(0, 0): models.student}
        load = await under_load(lambda: backend(kind, server, tmp_path / "run"), before | held, TOKENS)
        async with httpx.AsyncClient() as client:
            listed = (await client.get(f"{server.url}/v1/models")).json()["data"]

        assert len(load.replies) == load.asked
        assert all(len(reply.version_spans) == 1 for _, reply in load.replies)
        assert {reply.version_spans[0].version for _, reply in load.replies} == (before | held).keys()
        expect_rounding(np.concatenate([nats_off_spans(*each, before | held, dense_logprobs) for each in load.replies]))
        assert len(listed) <= 1 + LOADED_AT_ONCE

        broken = tmp_path / "step-1" / ADAPTER / WEIGHTS_FILE
        broken.write_bytes(broken.read_bytes()[:-100])
        async with backend(kind, server, tmp_path / "again") as student:
            prompt, response = np.array([40, 41, 42], np.int32), np.array([50, 60, 70, 80], np.int32)
            newer = WeightSnapshot(directory=str(tmp_path / "step-2"), version=WeightVersion(0, 2))
            await student.update_weights(newer, deadline=soon())
            for ask, model in ((student.score_base, models.student), (student.score, tmp_path / "step-2")):
                scores = await ask(ScoreRequest(prompt, response, 1.0, soon()), top_k=1)
                rows = decisions(dense_logprobs(model, [*prompt, *response]), prompt, response)
                assert np.abs(scores.logprobs - own(rows, response)).max() < PARITY_NATS
            snapshot = WeightSnapshot(directory=str(tmp_path / "step-1"), version=WeightVersion(0, 1))
            with pytest.raises(DataError, match="cannot be read"):
                await student.update_weights(snapshot, deadline=soon())
        with pytest.raises(ConfigError, match="max-lora-rank"):
            async with backend(kind, server, tmp_path / "larger", LORA.model_copy(update={"rank": 64})):
                pass


async def test_a_server_without_adapters_is_refused(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    server: RunningServer = request.getfixturevalue(f"{kind}_student")
    with pytest.raises(ConfigError, match="--enable-lora"):
        async with backend(kind, server, tmp_path):
            pass


async def test_a_server_that_would_leave_layers_out_is_refused(
    kind: str, start: StartServer, models: TinyModels, tmp_path: Path
) -> None:
    flags = ["--lora-backend", "torch_native"] if kind == "sglang" else []
    with start(models.student, *flags, adapters=LORA.model_copy(update={"targets": "attention"})) as server:
        student = backend(kind, server, tmp_path)
        with pytest.raises(ConfigError, match="lora-target-modules"):
            await student.__aenter__()
