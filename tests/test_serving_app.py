"""The server's application and its engine thread, in this process: keys, bodies, crashes, cancelled requests."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette

from spot_async import wire
from spot_async.serving import api
from spot_async.serving.app import build_app
from spot_async.serving.engine import Engine
from spot_async.serving.model import load_model
from spot_async.serving.server import _run
from spot_async.serving.settings import EngineSettings
from spot_async.serving.worker import EngineWorker
from spot_async.types import Capabilities, SamplingSettings

VOCAB = 50
PROMPT = np.array([5, 9, 2], np.int32)
RESPONSE = np.array([7, 7, 30, 1], np.int32)
CAPABILITIES = Capabilities(
    model="m",
    vocab_size=VOCAB,
    vocab_fingerprint="f",
    max_context_tokens=64,
    max_top_k=VOCAB,
    exact_entropy=True,
    candidate_logprobs="batched",
    weight_update=True,
)


def sampling(max_tokens: int) -> SamplingSettings:
    return SamplingSettings(max_tokens=max_tokens, stop_token_ids=(), seed=1)


@pytest.fixture
def worker(random_model: Callable[..., Path]) -> EngineWorker:
    """Not running: what is put to it stays queued."""
    settings = EngineSettings()
    return EngineWorker(Engine(load_model(random_model(max_position_embeddings=20000), settings), settings))


async def test_a_server_with_a_key_answers_nobody_without_it(worker: EngineWorker) -> None:
    transport = httpx.ASGITransport(app=build_app(worker, CAPABILITIES, api_key="secret"))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert (await client.get(api.HEALTH, headers=headers)).status_code == 401
        assert (await client.get(api.HEALTH, headers={"Authorization": "Bearer secret"})).status_code == 200


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", wire.encode({"prompt_ids": 3}), wire.encode({"prompt_ids": ["|O", [1], b"x"], "top_k": 1})]
)
async def test_a_body_that_is_no_request_is_a_bad_request(body: bytes, worker: EngineWorker) -> None:
    transport = httpx.ASGITransport(app=build_app(worker, CAPABILITIES, api_key=None))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        reply = await client.post(api.SCORE, content=body)
    assert reply.status_code == 400
    assert wire.decode(reply.content, api.ErrorReply).error == "PermanentError"


async def test_an_engine_that_crashes_ends_the_server(worker: EngineWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(worker._engine, "step", crash)
    request = api.ScoreRequest(prompt_ids=PROMPT, response_ids=RESPONSE, top_k=0, timeout_s=60.0)
    worker.submit(request)
    with pytest.raises(ExceptionGroup) as crashed:
        await _run(worker, Starlette(), socket.create_server(("127.0.0.1", 0)))
    assert crashed.group_contains(ZeroDivisionError, match="a bug")


def test_cancelling_a_future_aborts_its_request(worker: EngineWorker) -> None:
    endless = api.GenerateRequest(prompt_ids=PROMPT, sampling=sampling(19000), timeout_s=60.0)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        assert worker.submit(endless).cancel()
        short = api.GenerateRequest(prompt_ids=PROMPT, sampling=sampling(8), timeout_s=60.0)
        worker.submit(short).result(timeout=30)
        assert (worker.stats().active, worker.stats().waiting) == (0, 0)
    finally:
        worker.stop()
        thread.join(timeout=10)
    assert not thread.is_alive()
