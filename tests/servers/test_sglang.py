"""The SGLang backend against the real server, on a CPU: numbers, and what must never reach the server."""

from __future__ import annotations

import asyncio
import shutil
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from parity import expect_of_samples, own
from server_process import RunningServer
from sglang_on_cpu import (
    END,
    FIRST,
    VOCAB,
    Connect,
    Rows,
    check_everything,
    connecting,
    endless,
    rows_of,
    sampling,
    soon,
    tokens,
)

from spot_async.backends.sglang.backend import SglangBackend
from spot_async.backends.sglang.weights import Control
from spot_async.errors import (
    ConfigError,
    PermanentError,
    TransientError,
)
from spot_async.types import ScoreRequest


@pytest.fixture(scope="module")
def rows(dense_logprobs: Any) -> Rows:
    return rows_of(dense_logprobs)


@pytest.fixture
def connect(tmp_path: Path) -> Connect:
    return connecting(tmp_path)


@pytest.fixture(scope="session")
def router_url(sglang_student: RunningServer) -> Iterator[str]:
    """Passes requests on without the fields that published routers do not know, as they do."""

    class Router(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(httpx.get(sglang_student.url + self.path, timeout=None))

        def do_POST(self) -> None:
            body = msgspec.json.decode(self.rfile.read(int(self.headers["Content-Length"])))
            known = {name: value for name, value in body.items() if not name.startswith("return_flat")}
            self.answer(httpx.post(sglang_student.url + self.path, json=known, timeout=None))

        def answer(self, reply: httpx.Response) -> None:
            self.send_response(reply.status_code)
            self.send_header("Content-Length", str(len(reply.content)))
            self.end_headers()
            self.wfile.write(reply.content)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Router) as router:
        threading.Thread(target=router.serve_forever).start()
        yield f"http://127.0.0.1:{router.server_port}"
        router.shutdown()


async def test_numbers_are_those_of_a_plain_forward(
    sglang_student: RunningServer, connect: Connect, rows: Rows
) -> None:
    async with connect(sglang_student) as backend:
        await check_everything(backend, sglang_student.model, rows, FIRST)


async def test_a_router_that_drops_the_flat_fields_changes_no_number(
    sglang_student: RunningServer, connect: Connect, rows: Rows, router_url: str
) -> None:
    async with connect(sglang_student, url=router_url) as backend:
        await check_everything(backend, sglang_student.model, rows, FIRST)


async def test_start_up_finds_what_the_server_offers(sglang_student: RunningServer, connect: Connect) -> None:
    async with connect(sglang_student) as backend:
        found = await backend.capabilities(deadline=soon())
    assert (found.server, found.seeds, found.prefix_caching) == ("sglang 0.5.23", False, True)
    assert (found.max_top_k, found.max_generation_top_k, found.max_position_top_k) == (VOCAB, VOCAB, VOCAB)
    assert (found.score_temperature, found.generation_temperature) == ("one", "request")
    assert 0 < found.logprob_noise_nats < 1e-4
    assert found.version is None  # it ran already, with whatever weights


async def test_what_the_server_prefers_bends_no_sample(sglang_student: RunningServer, connect: Connect) -> None:
    """It was started with a top_k of 1. That its penalties change no log-probability is seen above."""
    async with connect(sglang_student) as backend, asyncio.TaskGroup() as group:
        asked = [group.create_task(backend.generate(tokens(12, 3), endless(20), deadline=soon())) for _ in range(8)]
    assert len({tuple(task.result().token_ids.tolist()) for task in asked}) == 8


async def test_the_longest_sequence_that_is_promised_is_served(
    sglang_student: RunningServer, connect: Connect, rows: Rows
) -> None:
    async with connect(sglang_student) as backend:
        limit = (await backend.capabilities(deadline=soon())).max_context_tokens
        prompt = tokens(100, 5)
        settings = sampling(limit - 100, stop_token_ids=())

        async def fill_the_context() -> float:
            response = (await backend.generate(prompt, settings, deadline=soon())).token_ids
            assert len(response) == limit - 100
            scores = await backend.score(ScoreRequest(prompt, response, 1.0, soon()), top_k=4)
            wanted = rows(sglang_student.model, np.concatenate([prompt, response]), 1.0)[99:-1]
            return float(np.abs(scores.logprobs - own(wanted, response)).max())

        await expect_of_samples(fill_the_context)
        with pytest.raises(PermanentError, match="at least one token"):
            await backend.score(ScoreRequest(prompt, prompt[:0], 1.0, soon()), top_k=4)
        with pytest.raises(PermanentError, match=f"exceed the server's context of {limit}"):
            await backend.generate(prompt, sampling(limit - 99), deadline=soon())


async def test_a_response_ends_with_any_of_our_end_tokens(sglang_student: RunningServer, connect: Connect) -> None:
    prompt, greedy = tokens(12, 3), 1e-3
    async with connect(sglang_student) as backend:
        free = await backend.generate(prompt, sampling(30, stop_token_ids=(), temperature=greedy), deadline=soon())
        end = int(free.token_ids[20])
        first = free.token_ids.tolist().index(end)
        settings = sampling(30, stop_token_ids=(END, end), temperature=greedy)
        ended = await backend.generate(prompt, settings, deadline=soon())
    assert free.finish_reason == "length"
    assert (ended.finish_reason, ended.token_ids.tolist()) == ("stop", free.token_ids.tolist()[: first + 1])


# What ends a server must not reach it.


async def test_what_would_end_the_server_is_refused_before_it_is_sent(
    sglang_student: RunningServer, connect: Connect
) -> None:
    prompt, response = tokens(5, 0), tokens(4, 1)
    outside, negative = np.array([7, VOCAB], np.int32), np.array([7, -1], np.int32)
    position = np.array([1], np.int32)
    async with connect(sglang_student) as backend:
        for bad in (outside, negative):
            with pytest.raises(PermanentError, match="out of the vocabulary of 512"):
                await backend.generate(bad, sampling(4), deadline=soon())
            with pytest.raises(PermanentError, match="out of the vocabulary"):
                await backend.score(ScoreRequest(prompt, bad, 1.0, soon()), top_k=4)
            with pytest.raises(PermanentError, match="out of the vocabulary"):
                await backend.candidate_logprobs(
                    ScoreRequest(prompt, response, 1.0, soon()), position, bad[None], expected_version=FIRST
                )
        with pytest.raises(PermanentError, match="top_k=513 is not one of 0 to 512"):
            await backend.score(ScoreRequest(prompt, response, 1.0, soon()), top_k=VOCAB + 1)
        with pytest.raises(PermanentError, match="top_k=513"):
            await backend.generate(prompt, sampling(4), top_k=VOCAB + 1, deadline=soon())
        with pytest.raises(PermanentError, match="at least one token"):
            await backend.score(ScoreRequest(prompt[:0], response, 1.0, soon()), top_k=4)
        with pytest.raises(PermanentError, match="positions are not all of the response's 4"):
            await backend.score_at(ScoreRequest(prompt, response, 1.0, soon()), position + 3, top_k=4)
        with pytest.raises(PermanentError, match="temperature 1 only"):
            await backend.score(ScoreRequest(prompt, response, 0.7, soon()), top_k=4)
        assert len((await backend.generate(prompt, sampling(4), deadline=soon())).token_ids)


async def test_another_models_directory_is_refused(sglang_student: RunningServer, tmp_path: Path, models: Any) -> None:
    """A tokenizer that gives other ids would let every number be about other tokens."""
    foreign = tmp_path / "foreign"
    shutil.copytree(models.student, foreign)
    tokenizer = msgspec.json.decode((foreign / "tokenizer.json").read_bytes())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:20]
    (foreign / "tokenizer.json").write_bytes(msgspec.json.encode(tokenizer))
    settings = SglangBackend.Settings(url=sglang_student.url)
    with pytest.raises(ConfigError, match=r"student\.model: the tokenizers of .* and of the served model differ"):
        async with SglangBackend(settings, role="student", model=str(foreign), run_directory=tmp_path):
            pass


@pytest.mark.parametrize(("vocab_size", "wrong"), [(VOCAB + 1, "refuses token 512"), (VOCAB - 1, "takes token 511")])
async def test_a_directory_with_another_vocabulary_size_is_refused_by_a_server_that_goes_on(
    vocab_size: int, wrong: str, sglang_student: RunningServer, tmp_path: Path, models: Any, connect: Connect
) -> None:
    foreign = tmp_path / "foreign"
    shutil.copytree(models.student, foreign)
    config = msgspec.json.decode((foreign / "config.json").read_bytes())
    (foreign / "config.json").write_bytes(msgspec.json.encode({**config, "vocab_size": vocab_size}))
    settings = SglangBackend.Settings(url=sglang_student.url)
    with pytest.raises(ConfigError, match=f"vocab_size={vocab_size}, but the server {wrong}"):
        async with SglangBackend(settings, role="student", model=str(foreign), run_directory=tmp_path):
            pass
    async with connect(sglang_student):
        pass


async def test_a_paused_server_is_named_at_start_up_and_serves_once_it_is_told_to_go_on(
    sglang_student: RunningServer, connect: Connect
) -> None:
    async with httpx.AsyncClient(base_url=sglang_student.url, timeout=None) as client:
        await client.post("/pause_generation", json={"mode": "retract"})
        with pytest.raises(ConfigError, match=r"the server is paused.*POST /continue_generation"):
            async with connect(sglang_student):
                pass
        await client.post("/continue_generation", json={})
    async with connect(sglang_student):
        pass


async def test_an_id_that_is_still_in_use_is_a_transient_error(
    sglang_student: RunningServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(sglang_student) as backend:
        same = uuid.uuid4()
        monkeypatch.setattr("spot_async.backends.sglang.requests.uuid.uuid4", lambda: same)
        control = Control(backend._server)
        await control.post("/pause_generation", {"mode": "in_place"}, soon())  # so that no response ends meanwhile
        both = [asyncio.create_task(backend.generate(tokens(5, 1), endless(15), deadline=soon())) for _ in range(2)]
        [refused], [accepted] = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        await control.post("/continue_generation", {}, soon())
        with pytest.raises(TransientError, match="Duplicate request ID"):
            refused.result()
        assert len((await accepted).token_ids) == 15
