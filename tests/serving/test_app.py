"""The server's application and its engine thread, in this process: keys, bodies, crashes, cancelled requests."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import itertools
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import torch
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

import spot_async.serving.http.connections as connections_module
import spot_async.serving.http.requests as bodies_module
from spot_async.base import wire
from spot_async.base.connection_room import listening_at
from spot_async.errors import ThrottledError
from spot_async.models.vocabulary import load_tokenizer
from spot_async.serving import api
from spot_async.serving.api import Credentials
from spot_async.serving.engine.engine import Engine
from spot_async.serving.engine.model import load_model
from spot_async.serving.engine.worker import EngineWorker
from spot_async.serving.http.app import build_app
from spot_async.serving.http.connections import HEAD_BYTES, MOST_HEADERS, HttpServer
from spot_async.serving.http.replies import TOGETHER_S, Replies
from spot_async.serving.http.requests import MAX_BYTES, MIB, Bodies, Refusal
from spot_async.serving.openai.app import MAX_BYTES as MAX_JSON_BYTES
from spot_async.serving.openai.app import openai_v1
from spot_async.serving.openai.completion import CompletionRequest, ServedModel, TokenTexts
from spot_async.serving.server import _run
from spot_async.serving.settings import EngineSettings
from spot_async.testing.services import capabilities
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.types import Generation, SamplingSettings, VersionSpan, WeightVersion

VOCAB = 50
PROMPT = np.array([5, 9, 2], np.int32)
RESPONSE = np.array([7, 7, 30, 1], np.int32)
CAPABILITIES = capabilities(VOCAB, max_context_tokens=64)


def sampling(max_tokens: int) -> SamplingSettings:
    return SamplingSettings(max_tokens=max_tokens, stop_token_ids=(), seed=1)


@pytest.fixture
def worker(random_model: Callable[..., Path]) -> EngineWorker:
    """Not running: what is put to it stays queued."""
    settings = EngineSettings()
    return EngineWorker(Engine(load_model(random_model(max_position_embeddings=20000), settings), settings))


@pytest.fixture
def served(worker: EngineWorker) -> ServedModel:
    name = worker._engine._model.name
    tokenizer = load_tokenizer(Path(name))
    return ServedModel("m", name, 20000, VOCAB, (), tokenizer, TokenTexts(tokenizer))


@pytest.fixture
def open_app(worker: EngineWorker, served: ServedModel) -> ASGIApp:
    """Without a key, and with `/v1`."""
    v1 = openai_v1(worker, served, max_completions=8)
    return build_app(worker, CAPABILITIES, credentials=Credentials(), other_api=v1)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        wire.encode({"prompt_ids": 3}),
        wire.encode({"prompt_ids": ["|O", [1], b"x"], "top_k": 1}),
        b"\x81\xa1x" + b"\x91" * 10_000 + b"\xc0",  # nested 10,000 deep
    ],
)
async def test_a_body_that_is_no_request_is_a_bad_request(body: bytes, worker: EngineWorker) -> None:
    transport = httpx.ASGITransport(app=build_app(worker, CAPABILITIES, credentials=Credentials()))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        reply = await client.post(api.SCORE, content=body, headers={"Content-Type": api.CONTENT_TYPE})
    assert reply.status_code == 400
    assert wire.decode(reply.content, api.ErrorReply).error == "PermanentError"


async def test_a_body_that_is_too_large_is_refused_before_it_is_read(open_app: ASGIApp) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += MIB
            yield bytes(MIB)

    routes = (
        (api.SCORE, api.CONTENT_TYPE, MAX_BYTES),
        ("/v1/completions", "application/json", MAX_JSON_BYTES),
    )
    transport = httpx.ASGITransport(app=open_app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        for path, kind, limit in routes:
            sent = 0
            for size in ({"Content-Length": str(limit + 1)}, {"Transfer-Encoding": "chunked"}):
                headers = size | {"Content-Type": kind}
                reply = await client.post(path, content=endless(), headers=headers)
                assert reply.status_code == 413
                assert f"more than {limit // MIB} MiB" in reply.text
                assert reply.headers["Connection"] == "close"
            assert sent <= limit + 2 * MIB


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, *, places: int = 16) -> AsyncIterator[int]:
    """Serve an app on a port of loopback, which is yielded."""
    server = HttpServer(app, places=places, patience_s=600, log_config=None, log_level="critical")
    listener = listening_at("127.0.0.1", 0)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(server.serve([listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("connection", ["close", "keep-alive"])
async def test_a_client_that_sends_a_large_body_and_reads_afterwards_sees_why_it_is_refused(
    open_app: ASGIApp, is_chunked: bool, connection: str
) -> None:
    def ask(port: int, path: str, kind: str) -> tuple[int, bytes]:
        parts = (bytes(MIB) for _ in range(MAX_JSON_BYTES // MIB + 24))
        body = parts if is_chunked else b"".join(parts)
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as client:
            headers = {"Content-Type": kind, "Connection": connection}
            client.request("POST", path, body, headers, encode_chunked=is_chunked)
            reply = client.getresponse()
            return reply.status, reply.read()

    async with serving(open_app) as port:
        status, said = await asyncio.to_thread(ask, port, "/v1/completions", "application/json")
        assert (status, b"more than 8 MiB" in said) == (413, True)
        assert (await asyncio.to_thread(ask, port, "/none", api.CONTENT_TYPE))[0] == 404  # is not read either


async def test_who_waits_for_leave_to_send_a_large_body_sends_nothing(open_app: ASGIApp) -> None:
    words = f"Content-Type: application/json\r\nContent-Length: {MAX_JSON_BYTES + 1}\r\nExpect: 100-continue"
    async with serving(open_app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"POST /v1/completions HTTP/1.1\r\n{words}\r\n\r\n".encode())
        assert (await reader.read()).startswith(b"HTTP/1.1 413 Request Entity Too Large\r\n")  # and is closed
        writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nA: " + b"a" * HEAD_BYTES,
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * (MOST_HEADERS + 2),
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"A: b\r\n" * (MOST_HEADERS + 2),
    ],
    ids=["one long header", "many headers", "many headers behind the body"],
)
async def test_endless_headers_end_their_connection(open_app: ASGIApp, sent: bytes) -> None:
    async with serving(open_app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()


async def test_a_body_without_an_end_is_dropped_up_to_a_bound(
    open_app: ASGIApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "BODY_BYTES", MIB)
    async with serving(open_app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):  # or the time-out ends this
            while True:
                writer.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
                await writer.drain()
        writer.close()


async def test_who_does_not_take_an_answer_makes_room_for_others() -> None:
    answered = Response(bytes(64 * MIB))
    async with serving(answered, places=2) as port:
        slow = []
        for _ in range(4):  # the first two lose their places
            slow.append(await asyncio.open_connection("127.0.0.1", port, limit=1))
            slow[-1][1].write(b"GET / HTTP/1.1\r\n\r\n")
            await slow[-1][0].readexactly(1)
        for reader, writer in slow[:2]:
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(64 * MIB)
            writer.close()
        for _, writer in slow[2:]:
            writer.close()


def request_of(*parts: bytes) -> Request:
    messages = [{"type": "http.request", "body": part, "more_body": part is not parts[-1]} for part in parts]

    async def receive() -> Any:
        return messages.pop(0)

    return Request({"type": "http", "headers": []}, receive)


async def test_large_bodies_are_understood_one_at_a_time_and_others_meanwhile() -> None:
    bodies = Bodies(2 * MIB, 8 * MIB)
    read: list[int] = []

    async def understand(size: int) -> None:
        async with bodies.read(request_of(bytes(size))):
            read.append(size)

    async with asyncio.TaskGroup() as group, bodies.read(request_of(bytes(2 * MIB))):
        for size in (MIB, 1):
            group.create_task(understand(size))
        for _ in range(10):
            await asyncio.sleep(0)
        assert read == [1]
    assert read == [1, MIB]


async def test_bodies_that_come_in_slowly_take_no_more_memory_than_they_may() -> None:
    bodies = Bodies(max_bytes=4, max_held_bytes=6)
    async with bodies.read(request_of(b"123", b"4")) as first:
        assert first == b"1234"
        with pytest.raises(ThrottledError):
            async with bodies.read(request_of(b"12", b"3")):
                pass
    async with bodies.read(request_of(b"123")) as second:
        assert second == b"123"


def endless_request(*parts: bytes) -> Request:
    """Return a request of which nothing more comes after these parts."""
    left = list(parts)

    async def receive() -> Any:
        if not left:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": left.pop(0), "more_body": True}

    return Request({"type": "http", "headers": []}, receive)


async def test_bodies_that_never_end_make_room_for_others_the_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = Bodies(max_bytes=4, max_held_bytes=12)
    given_up: list[int] = []

    async def hold(number: int) -> None:
        with pytest.raises(ThrottledError, match="too slowly"):
            async with bodies.read(endless_request(b"12", b"3")):
                pytest.fail("it ended")
        given_up.append(number)

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        holding = [group.create_task(hold(number)) for number in range(4)]
        await asyncio.sleep(0.01)
        with pytest.raises(ThrottledError, match="all the room"):  # they have only begun
            async with bodies.read(request_of(b"1")):
                pass
        monkeypatch.setattr(bodies_module, "SAFE_S", 0.0)
        async with bodies.read(request_of(b"1234")) as body:
            assert body == b"1234"
            await asyncio.sleep(0.01)
            assert given_up == [0, 1]
        async with bodies.read(request_of(b"1234")):
            pass
        assert given_up == [0, 1]
        monkeypatch.setattr(bodies_module, "LONGEST_S", 0.05)
        await hold(4)
        for task in holding:
            task.cancel()


async def test_the_server_answers_while_a_text_is_tokenized(worker: EngineWorker, served: ServedModel) -> None:
    answered, seen = threading.Event(), []

    class Slow:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            seen.append(answered.wait(timeout=60))
            return []

    v1 = openai_v1(worker, dataclasses.replace(served, tokenizer=Slow()), max_completions=8)
    transport = httpx.ASGITransport(app=build_app(worker, CAPABILITIES, credentials=Credentials(), other_api=v1))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client, asyncio.TaskGroup() as group:
        completion = group.create_task(client.post("/v1/completions", json={"prompt": "w3"}))
        await asyncio.sleep(0.01)
        assert (await client.get(api.HEALTH)).status_code == 200
        answered.set()
        assert (await completion).status_code == 400  # it has no tokens
    assert seen == [True]


def test_a_text_that_is_far_too_long_is_not_read(served: ServedModel) -> None:
    read = []

    class Counting:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            read.append(len(text))
            return [5] * len(text)

    model, asked = dataclasses.replace(served, tokenizer=Counting()), CompletionRequest(prompt="")
    with pytest.raises(Refusal, match="the prompt has at least 20001") as refused:
        model.read("w" * 10_000_000, asked)
    assert refused.value.code == "context_length_exceeded"
    assert not read
    assert len(model.read("w" * 19_000, asked).token_ids) == 19_000


async def test_an_engine_that_crashes_ends_the_server(worker: EngineWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(worker._engine, "step", crash)
    request = api.ScoreRequest(prompt_ids=PROMPT, response_ids=RESPONSE, top_k=0, timeout_s=60.0)
    worker.submit(request)
    with pytest.raises(ExceptionGroup) as crashed:
        await _run(worker, Response(), socket.create_server(("127.0.0.1", 0)))
    assert crashed.group_contains(ZeroDivisionError, match="a bug")


def test_cancelling_a_future_aborts_its_request(worker: EngineWorker) -> None:
    endless = api.GenerateRequest(prompt_ids=PROMPT, sampling=sampling(19000), timeout_s=60.0)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        assert worker.submit(endless).cancel()
        short = api.GenerateRequest(prompt_ids=PROMPT, sampling=sampling(8), timeout_s=60.0)
        worker.submit(short).result(timeout=300)
        assert (worker.stats().active, worker.stats().waiting) == (0, 0)
    finally:
        worker.stop()
        thread.join(timeout=300)
    assert not thread.is_alive()


@pytest.fixture
def running(worker: EngineWorker) -> Iterator[EngineWorker]:
    thread = threading.Thread(target=worker.run)
    thread.start()
    yield worker
    worker.stop()
    thread.join(timeout=300)
    assert not thread.is_alive()


async def test_a_failure_of_the_engine_is_an_error_in_openai_s_form_and_the_server_continues(
    running: EngineWorker, open_app: ASGIApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, steps = running._engine._model, itertools.count()
    decode = model.decode

    def failing(*arguments: Any) -> torch.Tensor:
        if next(steps) == 20:
            raise RuntimeError("out of memory\nand more")
        return decode(*arguments)

    monkeypatch.setattr(model, "decode", failing)
    transport = httpx.ASGITransport(app=open_app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        body = {"prompt": "w3 w4", "max_tokens": 60}
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 500
        assert reply.json() == {
            "error": {
                "message": "the engine failed on this request: out of memory",
                "type": "server_error",
                "param": None,
                "code": None,
            }
        }
        assert (await client.post("/v1/completions", json=body)).status_code == 200


def test_replies_that_end_within_a_moment_are_sent_at_once_and_the_last_one_waits_for_none() -> None:
    request = api.GenerateRequest(prompt_ids=PROMPT, sampling=sampling(4), timeout_s=60.0)
    generation = Generation(
        token_ids=RESPONSE,
        logprobs=np.zeros(4, np.float32),
        finish_reason="length",
        version_spans=(VersionSpan(0, 4, WeightVersion(0, 0)),),
    )
    futures: list[Future[Generation]] = []
    sent: list[tuple[float, bytes]] = []

    class Worker:
        def submit(self, request: api.GenerateRequest) -> Future[Generation]:
            futures.append(Future())
            return futures[-1]

    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def send(message: Any) -> None:
            if message.get("body"):
                sent.append((loop.time(), message["body"]))

        replies = Replies(Worker(), [request] * 4)  # type: ignore[arg-type]
        answering = asyncio.create_task(replies({}, loop.create_future, send))  # nobody hangs up
        await asyncio.sleep(1.0)
        for future in futures[:3]:
            future.set_result(generation)
            await asyncio.sleep(TOGETHER_S / 4)
        await asyncio.sleep(1.0)
        futures[3].set_result(generation)
        ended = loop.time()
        await answering
        assert loop.time() == ended

    run_on_virtual_time(main())
    reply = msgspec.Raw(wire.encode(generation))
    frames = [api.frame(wire.encode(api.ManyReply(index=i, reply=reply))) for i in range(4)]
    assert [body for _, body in sent] == [b"".join(frames[:3]), frames[3]]
    assert sent[0][0] == pytest.approx(1.0 + TOGETHER_S)
