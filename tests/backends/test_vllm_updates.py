"""Weight updates of the vLLM backend against a stand-in: what is confirmed or undone, and that none stays paused."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
import structlog
from deadlines import passed_once, soon
from vllm_stand_in import (
    PROMPT,
    V0,
    V1,
    Connect,
)

from spot_async.backends.vllm.lora import check_flags
from spot_async.config import LoraConfig
from spot_async.errors import (
    ConfigError,
    DeadlineExceededError,
    ProcessDiedError,
    TransientError,
)
from spot_async.types import SamplingSettings, VersionSpan, WeightSnapshot

UPDATE = [
    "/pause?mode=keep",
    "/collective_rpc",
    "/update_weight_version",
    "/reset_prefix_cache",
    "/weight_info",
    "/weight_checker",
]


async def test_an_update_goes_on_only_with_weights_that_the_server_confirmed(connect: Connect) -> None:
    async with connect() as (backend, stand_in):
        first, second = (WeightSnapshot(directory=str(stand_in.model), version=each) for each in (V0, V1))
        await backend.update_weights(first, deadline=soon())
        assert stand_in.calls == [*UPDATE, "/resume"]
        # Whatever fails after the pause, the weights before are loaded again and confirmed before it continues.
        for number, path in enumerate(UPDATE[1:], start=1):
            stand_in.calls.clear()
            stand_in.failing[path] = (500, {"error": {"message": "no"}})
            with pytest.raises(TransientError, match="HTTP 500: no"):
                await backend.update_weights(second, deadline=soon())
            assert stand_in.calls == [*UPDATE[: number + 1], *UPDATE[1:], "/resume"]
            assert stand_in.weights == str(V0)
        stand_in.failing["/reset_prefix_cache"] = (200, {"success": False})
        with pytest.raises(TransientError, match="could not drop its prefix cache"):
            await backend.update_weights(second, deadline=soon())
        assert stand_in.calls[-1] == "/resume"


async def test_an_update_that_is_cancelled_leaves_the_server_going_with_the_weights_before(connect: Connect) -> None:
    async with connect() as (backend, stand_in):
        first, second = (WeightSnapshot(directory=str(stand_in.model), version=each) for each in (V0, V1))
        await backend.update_weights(first, deadline=soon())
        stand_in.hold = "/reset_prefix_cache"
        update = asyncio.create_task(backend.update_weights(second, deadline=soon()))
        await stand_in.held.wait()
        stand_in.hold = None
        stand_in.calls.clear()
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert stand_in.calls == [*UPDATE[1:], "/resume"]
        assert stand_in.weights == str(V0)


async def test_a_first_update_that_fails_leaves_the_server_going_with_the_models_own_weights(connect: Connect) -> None:
    async with connect() as (backend, stand_in):
        stand_in.failing["/collective_rpc"] = (500, {"error": {"message": "no"}})
        stand_in.bodies.clear()
        with pytest.raises(TransientError, match="HTTP 500: no"):
            await backend.update_weights(WeightSnapshot(directory=str(stand_in.model), version=V1), deadline=soon())
        assert stand_in.calls == [*UPDATE[:2], *UPDATE[1:], "/resume"]
        loaded = [body["kwargs"]["weights_path"] for path, body in stand_in.bodies if path == "/collective_rpc"]
        assert loaded[-1] == str(stand_in.model)
        assert (stand_in.weights, stand_in.paused) == (str(V0), False)
        sampling = SamplingSettings(max_tokens=2, stop_token_ids=(), seed=1)
        assert (await backend.generate(PROMPT, sampling, deadline=soon())).version_spans == (VersionSpan(0, 2, V0),)


async def test_a_server_that_can_load_nothing_stays_paused(connect: Connect) -> None:
    async with connect() as (backend, stand_in):
        stand_in.broken.add("/collective_rpc")
        with pytest.raises(ProcessDiedError, match="stays paused and must be restarted"):
            await backend.update_weights(WeightSnapshot(directory=str(stand_in.model), version=V1), deadline=soon())
        assert stand_in.paused


@pytest.mark.parametrize("path", [*UPDATE, "/resume"])
async def test_a_first_update_that_is_cancelled_anywhere_stays_cancelled_and_the_server_goes_on(
    connect: Connect, path: str
) -> None:
    async with connect() as (backend, stand_in):
        stand_in.hold = path
        snapshot = WeightSnapshot(directory=str(stand_in.model), version=V1)
        update = asyncio.create_task(backend.update_weights(snapshot, deadline=soon()))
        await stand_in.held.wait()
        stand_in.hold = None
        stand_in.calls.clear()
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert stand_in.calls[-1] == "/resume"
        assert not stand_in.paused
        assert stand_in.weights == {"/pause?mode=keep": "default", "/resume": str(V1)}.get(path, str(V0))


async def test_a_cancelled_update_that_cannot_be_undone_stays_cancelled_and_the_server_paused(connect: Connect) -> None:
    async with connect() as (backend, stand_in):
        stand_in.hold = "/collective_rpc"
        snapshot = WeightSnapshot(directory=str(stand_in.model), version=V1)
        update = asyncio.create_task(backend.update_weights(snapshot, deadline=soon()))
        await stand_in.held.wait()
        stand_in.hold = None
        stand_in.broken.add("/collective_rpc")
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert stand_in.paused


async def test_a_pause_that_is_not_answered_in_time_is_taken_back(connect: Connect) -> None:
    async with connect() as (backend, stand_in):
        stand_in.hold = "/pause?mode=keep"
        snapshot = WeightSnapshot(directory=str(stand_in.model), version=V1)
        async with passed_once(stand_in.held):
            with pytest.raises(DeadlineExceededError):
                await backend.update_weights(snapshot, deadline=soon())
        assert stand_in.calls == ["/pause?mode=keep", "/resume"]
        assert not stand_in.paused


async def test_a_server_that_takes_no_weights_is_told_what_it_lacks(connect: Connect) -> None:
    old = {"version": "0.25.1", "chosen_tokens": False}
    for changes, need in (
        (old, "vLLM 0.27 or later.*0.25.1"),
        ({"developer_mode": False}, "VLLM_SERVER_DEV_MODE=1"),
        ({"device": "cpu"}, "a GPU, because on a CPU vLLM goes on with the old output layer"),  # the model is tied
    ):
        with structlog.testing.capture_logs() as logs:
            async with connect(**changes) as (backend, stand_in):
                snapshot = WeightSnapshot(directory=str(stand_in.model), version=V0)
                with pytest.raises(ConfigError, match=need):
                    await backend.update_weights(snapshot, deadline=soon())
                found = await backend.capabilities(deadline=soon())
        assert not found.weight_update
        assert re.search(need, found.weights_need)
        (warned,) = [log for log in logs if log["event"] == "takes no weights"]
        assert re.search(need, warned["needs"])


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ({"max_loras": 4, "max_cpu_loras": 5}, None),  # all layers
        ({"max_loras": 8, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}, None),
        (
            {"max_loras": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
            "student.backend: the server leaves the adapters of gate_proj, up_proj, down_proj out: add them to its "
            "--lora-target-modules",
        ),
        ({"max_loras": 1, "max_cpu_loras": 5}, "uses 1 adapters at once and keeps 5: restart it with --max-loras 4"),
        ({"max_loras": 4}, "uses 4 adapters at once and keeps 4: .* --max-cpu-loras 5"),
    ],
)
async def test_a_server_that_would_leave_adapters_out_is_refused(connect: Connect, flags: Any, refused: Any) -> None:
    lora = LoraConfig()
    async with connect() as (backend, stand_in):
        stand_in.adapter_flags = flags
        if refused is None:
            await check_flags(backend._client, lora, deadline=soon())
        else:
            with pytest.raises(ConfigError, match=refused):
                await check_flags(backend._client, lora, deadline=soon())


async def test_a_server_that_does_not_say_which_layers_it_uses_is_warned_about(connect: Connect) -> None:
    async with connect(developer_mode=False) as (backend, _):
        with structlog.testing.capture_logs() as logs:
            await check_flags(backend._client, LoraConfig(), deadline=soon())
    assert [log["needs"] for log in logs] == ["VLLM_SERVER_DEV_MODE=1"]
