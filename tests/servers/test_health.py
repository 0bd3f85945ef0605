"""Pings of real servers: what they notice, what does not deceive them, and a restart behind our back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from parity import soon
from server_process import WAIT_S, RunningServer, command_line, name_of
from sglang_on_cpu import wait_until
from tiny_models import VOCAB_SIZE
from vllm_metrics import WAITING, until_metric

from spot_async.backends.sglang.backend import SglangBackend
from spot_async.backends.vllm.backend import VllmBackend
from spot_async.base.processes.guard import process_tree
from spot_async.errors import DeadlineExceededError, ServerRestartedError
from spot_async.types import SamplingSettings, WeightSnapshot, WeightVersion

PROMPT = np.random.default_rng(5).integers(5, VOCAB_SIZE, 40).astype(np.int32)
V7 = WeightVersion(0, 7)
PATIENCE_S = 20.0  # of a ping beside much work: machines that test are busy ones
LYING = {"vllm": ["/health", "/version", "/v1/models"], "sglang": ["/ready", "/model_info", "/v1/loads"]}

Backend = VllmBackend | SglangBackend


def attached(kind: str, server: RunningServer, role: str, run: Path) -> Backend:
    if kind == "vllm":
        return VllmBackend(VllmBackend.Settings(url=server.url), role=role, model=str(server.model), run_directory=run)
    return SglangBackend(SglangBackend.Settings(url=server.url), role=role, model=str(server.model), run_directory=run)


async def generate(backend: Backend, *, tokens: int = 4, seed: int = 1) -> Any:
    sampling = SamplingSettings(max_tokens=tokens, stop_token_ids=(), seed=seed)
    return await backend.generate(PROMPT, sampling, deadline=soon())


@contextmanager
def frozen(server: RunningServer, name: str) -> Iterator[None]:
    """The server's engine, not the process that answers for it."""
    below = process_tree(server.process.pid).keys() - {server.process.pid}
    pid = next(pid for pid in below if name in name_of(pid) or name in " ".join(command_line(pid)))
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def expect_a_ping_to_tell_a_frozen_engine(
    kind: str, engine: str, backend: Backend, server: RunningServer
) -> None:
    await backend.ping(deadline=soon())
    async with asyncio.TaskGroup() as group:  # more than it has places for, so some wait for long
        busy = [group.create_task(generate(backend, tokens=1500, seed=seed)) for seed in range(100)]
        if kind == "vllm":
            await until_metric(server, WAITING, lambda count: count > 0)
        else:
            await wait_until(server, len(busy))
        await backend.ping(deadline=soon(PATIENCE_S))
        assert not all(task.done() for task in busy)
        for task in busy:
            task.cancel()
    with frozen(server, engine):
        async with httpx.AsyncClient() as client:
            for path in LYING[kind]:
                assert (await client.get(server.url + path, timeout=WAIT_S)).status_code == 200
        with pytest.raises(DeadlineExceededError):
            await backend.ping(deadline=soon(3.0))
    await backend.ping(deadline=soon())


async def expect_a_restart_to_be_recognised(
    kind: str, backend: Backend, restart: Callable[[], AbstractContextManager[RunningServer]], run: Path
) -> None:
    """`backend` holds version 0.7 and is entered."""
    with restart() as again:
        for asking in (generate, lambda backend: backend.ping(deadline=soon())):
            with pytest.raises(ServerRestartedError, match=r"never sent: was it restarted|and was last given 0\.7"):
                await asking(backend)
        async with attached(kind, again, "student", run) as fresh:
            await fresh.update_weights(WeightSnapshot(directory=str(again.model), version=V7), deadline=soon())
            assert [span.version for span in (await generate(fresh)).version_spans] == [V7]
            await fresh.ping(deadline=soon())


@pytest.mark.parametrize(("kind", "engine"), [("vllm", "EngineCore"), ("sglang", "scheduler")])
async def test_a_students_server(kind: str, engine: str, request: Any, models: Any, tmp_path: Path) -> None:
    start = request.getfixturevalue(f"start_{kind}")
    with start(models.student) as server:
        backend = attached(kind, server, "student", tmp_path)
        async with backend:
            update = WeightSnapshot(directory=str(models.student), version=V7)
            async with asyncio.TaskGroup() as group:
                updating = group.create_task(backend.update_weights(update, deadline=soon()))
                while not updating.done():
                    await backend.ping(deadline=soon())
            await expect_a_ping_to_tell_a_frozen_engine(kind, engine, backend, server)
            port = int(server.url.rpartition(":")[2])
            server.signal_group(signal.SIGKILL)
            server.process.wait()
            await expect_a_restart_to_be_recognised(kind, backend, lambda: start(models.student, port=port), tmp_path)


async def test_a_vllm_without_developer_mode(start_vllm: Any, models: Any, tmp_path: Path) -> None:
    with start_vllm(models.teacher, takes_weights=False) as server:
        async with attached("vllm", server, "teacher", tmp_path) as backend:
            await expect_a_ping_to_tell_a_frozen_engine("vllm", "EngineCore", backend, server)
