"""The SGLang adapter against the real server, on a CPU: numbers, weights, and what must never reach the server."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.torch import load_file, save_file
from server_process import RunningServer

from spot_async.backends.sglang import SglangBackend
from spot_async.backends.weight_transport import WeightSettings
from spot_async.errors import (
    ConfigError,
    DataError,
    PermanentError,
    RequestError,
    TransientError,
    VersionMismatchError,
)
from spot_async.types import Generation, SamplingSettings, WeightSnapshot, WeightVersion

PARITY_NATS = 2e-5
VOCAB = 512
END = 2
FIRST, SECOND = WeightVersion(0, 0), WeightVersion(0, 1)

Rows = Callable[[Path, npt.NDArray[Any], float], npt.NDArray[np.float64]]
Connect = Callable[..., AbstractAsyncContextManager[SglangBackend]]


def soon(seconds: float = 120.0) -> float:
    return asyncio.get_running_loop().time() + seconds


def tokens(count: int, seed: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(3, 480, count).astype(np.int32)


def sampling(max_tokens: int, **changes: Any) -> SamplingSettings:
    return SamplingSettings(**{"max_tokens": max_tokens, "stop_token_ids": (END,), "seed": 1, **changes})


@pytest.fixture(scope="session")
def rows(dense_logprobs: Callable[..., npt.NDArray[np.float32]]) -> Rows:
    """`rows(model, ids, temperature)`: log-probabilities (len(ids), V) of a plain float32 forward."""

    def compute(model: Path, ids: npt.NDArray[Any], temperature: float) -> npt.NDArray[np.float64]:
        scaled = dense_logprobs(model, ids.tolist()).astype(np.float64) / temperature
        normalizer = np.log(np.exp(scaled).sum(-1, keepdims=True))
        return np.asarray(scaled - normalizer)

    return compute


@pytest.fixture
def connect(tmp_path: Path) -> Connect:
    """`connect(server, url=..., **settings)`: the adapter, attached."""

    @asynccontextmanager
    async def connected(
        server: RunningServer, *, url: str | None = None, **settings: Any
    ) -> AsyncIterator[SglangBackend]:
        backend = SglangBackend(
            SglangBackend.Settings(url=url or server.url, **settings),
            role="student",
            model=str(server.model),
            run_directory=tmp_path,
        )
        async with backend:
            yield backend

    return connected


@pytest.fixture(scope="session")
def router_url(sglang_student: RunningServer) -> Iterator[str]:
    """Passes requests on without the fields that published routers do not know, as they do."""

    class Router(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(httpx.get(sglang_student.url + self.path))

        def do_POST(self) -> None:
            body = msgspec.json.decode(self.rfile.read(int(self.headers["Content-Length"])))
            known = {name: value for name, value in body.items() if not name.startswith("return_flat")}
            self.answer(httpx.post(sglang_student.url + self.path, json=known, timeout=60.0))

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


async def check_everything(backend: SglangBackend, model: Path, rows: Rows, version: WeightVersion) -> None:
    """Rollouts, scores, single positions and candidates of one model against its forward."""
    for seed, (count, length, temperature) in enumerate([(3, 40, 1.0), (150, 200, 1.0), (20, 60, 0.6)]):
        prompt = tokens(count, seed)
        settings = sampling(length, temperature=temperature, stop_token_ids=())
        generation = await backend.generate(prompt, settings, top_k=8, deadline=soon())
        response = generation.token_ids
        sequence = np.concatenate([prompt, response])
        wanted = rows(model, sequence, temperature)[count - 1 : -1]
        within = PARITY_NATS / temperature  # which the logits' errors are divided by, too
        assert len(response) == length
        assert [span.version for span in generation.version_spans] == [version]
        np.testing.assert_allclose(generation.logprobs, wanted[np.arange(length), response], atol=within)
        assert_top(generation.topk_ids, generation.topk_logprobs, wanted, within)

        positions = np.array([0, 7, length - 1], np.int32)
        candidates = np.random.default_rng(seed).permuted(np.tile(np.arange(VOCAB), (3, 1)), axis=1)[:, :16]
        chosen = await backend.candidate_logprobs(
            prompt, response, positions, candidates.astype(np.int32),
            temperature=temperature, expected_version=version, deadline=soon(),
        )  # fmt: skip
        np.testing.assert_allclose(chosen, wanted[positions[:, None], candidates], atol=within)

        at = await backend.score_at(prompt, response, positions, top_k=VOCAB, temperature=temperature, deadline=soon())
        entropy = -(np.exp(wanted) * wanted).sum(-1)[positions]
        assert_top(at.topk_ids, at.topk_logprobs, wanted[positions], within)
        np.testing.assert_allclose(at.entropy_lower, entropy, atol=1e-4)
        np.testing.assert_allclose(at.entropy_upper, entropy, atol=1e-4)

        if temperature == 1.0:
            scores = await backend.score(prompt, response, top_k=16, temperature=1.0, deadline=soon())
            np.testing.assert_allclose(scores.logprobs, wanted[np.arange(length), response], atol=within)
            assert_top(scores.topk_ids, scores.topk_logprobs, wanted, within)
            entropy = -(np.exp(wanted) * wanted).sum(-1)
            assert (scores.entropy_lower <= entropy).all()
            assert (entropy <= scores.entropy_upper).all()


def assert_top(ids: Any, logprobs: Any, wanted: npt.NDArray[np.float64], within: float) -> None:
    """The largest of each row; ids may differ where two log-probabilities are as good as equal."""
    k = ids.shape[1]
    np.testing.assert_allclose(logprobs, -np.sort(-wanted, axis=-1)[:, :k], atol=within)
    np.testing.assert_allclose(np.take_along_axis(wanted, ids, axis=-1), logprobs, atol=within)


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


async def test_the_longest_sequence_that_is_promised_is_served(
    sglang_student: RunningServer, connect: Connect, rows: Rows
) -> None:
    async with connect(sglang_student) as backend:
        limit = (await backend.capabilities(deadline=soon())).max_context_tokens
        prompt = tokens(100, 5)
        settings = sampling(limit - 100, stop_token_ids=())
        response = (await backend.generate(prompt, settings, deadline=soon())).token_ids
        assert len(response) == limit - 100
        scores = await backend.score(prompt, response, top_k=4, temperature=1.0, deadline=soon())
        wanted = rows(sglang_student.model, np.concatenate([prompt, response]), 1.0)[99:-1]
        np.testing.assert_allclose(scores.logprobs, wanted[np.arange(len(response)), response], atol=PARITY_NATS)
        empty = await backend.score(prompt, response[:0], top_k=4, temperature=1.0, deadline=soon())
        assert empty.topk_ids.shape == (0, 4)
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
                await backend.score(prompt, bad, top_k=4, temperature=1.0, deadline=soon())
            with pytest.raises(PermanentError, match="out of the vocabulary"):
                await backend.candidate_logprobs(
                    prompt, response, position, bad[None], temperature=1.0, expected_version=FIRST, deadline=soon()
                )
        with pytest.raises(PermanentError, match="top_k=513 is not one of 0 to 512"):
            await backend.score(prompt, response, top_k=VOCAB + 1, temperature=1.0, deadline=soon())
        with pytest.raises(PermanentError, match="top_k=513"):
            await backend.generate(prompt, sampling(4), top_k=VOCAB + 1, deadline=soon())
        with pytest.raises(PermanentError, match="at least one token"):
            await backend.score(prompt[:0], response, top_k=4, temperature=1.0, deadline=soon())
        with pytest.raises(PermanentError, match="positions are not all of the response's 4"):
            await backend.score_at(prompt, response, position + 3, top_k=4, temperature=1.0, deadline=soon())
        with pytest.raises(PermanentError, match="temperature 1 only"):
            await backend.score(prompt, response, top_k=4, temperature=0.7, deadline=soon())
        assert len((await backend.generate(prompt, sampling(4), deadline=soon())).token_ids)


async def test_another_models_directory_is_refused(sglang_student: RunningServer, tmp_path: Path, models: Any) -> None:
    """A tokenizer that gives other ids would let every number be about other tokens."""
    foreign = tmp_path / "foreign"
    shutil.copytree(models.student, foreign)
    tokenizer = msgspec.json.decode((foreign / "tokenizer.json").read_bytes())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:20]
    (foreign / "tokenizer.json").write_bytes(msgspec.json.encode(tokenizer))
    settings = SglangBackend.Settings(url=sglang_student.url)
    with pytest.raises(ConfigError, match=r"student\.model: its tokenizer gives other tokens than the server's"):
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
    async with httpx.AsyncClient(base_url=sglang_student.url) as client:
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
        monkeypatch.setattr("spot_async.backends.sglang.uuid.uuid4", lambda: same)
        first = asyncio.create_task(backend.generate(tokens(5, 1), sampling(1500, stop_token_ids=()), deadline=soon()))
        await wait_until(sglang_student, 1)
        with pytest.raises(TransientError, match="Duplicate request ID"):
            await backend.generate(tokens(5, 1), sampling(4), deadline=soon())
        assert len((await first).token_ids) == 1500


# Weights.


def snapshot_of(model: Path, version: WeightVersion) -> WeightSnapshot:
    return WeightSnapshot(directory=str(model), version=version)


def weight_settings(transport: str) -> WeightSettings:
    return WeightSettings(transport=transport, backend="gloo")


async def wait_until(server: RunningServer, count: int) -> None:
    """Until so many requests are under way on the server."""
    async with asyncio.timeout(30.0), httpx.AsyncClient() as client:
        while True:
            loads = (await client.get(server.url + "/v1/loads")).json()["loads"]
            if sum(each["num_running_reqs"] + each["num_waiting_reqs"] for each in loads) == count:
                return


@pytest.mark.parametrize("transport", ["disk", "distributed"])
async def test_new_weights_are_served_whole_and_named(
    transport: str,
    sglang_student: RunningServer,
    models: Any,
    connect: Connect,
    rows: Rows,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("spot_async.backends.weight_transport.buckets.__defaults__", (100_000,))  # several parts
    async with connect(sglang_student, weights=weight_settings(transport)) as backend:
        await backend.update_weights(snapshot_of(models.student, FIRST), deadline=soon())
        await check_everything(backend, models.student, rows, FIRST)
        await backend.update_weights(snapshot_of(models.other, SECOND), deadline=soon())
        await check_everything(backend, models.other, rows, SECOND)
        assert (await backend.capabilities(deadline=soon())).version == SECOND
        one = np.zeros(1, np.int32)
        with pytest.raises(VersionMismatchError, match=r"holds weights 0\.1, not the 0\.0 asked for"):
            await backend.candidate_logprobs(
                tokens(4, 0), tokens(2, 1), one, one[None] + 9, temperature=1.0, expected_version=FIRST, deadline=soon()
            )
        await backend.update_weights(snapshot_of(models.student, FIRST), deadline=soon())
        await check_everything(backend, models.student, rows, FIRST)


@pytest.mark.parametrize("transport", ["disk", "distributed"])
async def test_an_update_in_the_middle_of_a_generation_splits_it_at_the_switch(
    transport: str, sglang_student: RunningServer, models: Any, connect: Connect, rows: Rows
) -> None:
    prompt = tokens(20, 8)
    settings = sampling(1500, stop_token_ids=())
    async with connect(sglang_student, weights=weight_settings(transport)) as backend:
        await backend.update_weights(snapshot_of(models.student, FIRST), deadline=soon())
        async with asyncio.TaskGroup() as group:
            under_way = group.create_task(backend.generate(prompt, settings, top_k=4, deadline=soon()))
            await wait_until(sglang_student, 1)
            await asyncio.sleep(0.1)  # into the generation
            await backend.update_weights(snapshot_of(models.other, SECOND), deadline=soon())
        generation = under_way.result()
        await backend.update_weights(snapshot_of(models.student, FIRST), deadline=soon())
    assert_split(generation, prompt, models.student, models.other, rows)


def assert_split(generation: Generation, prompt: Any, before: Path, after: Path, rows: Rows) -> None:
    old, new = generation.version_spans
    assert (old.version, new.version) == (FIRST, SECOND)
    assert 0 < old.end == new.start < new.end == 1500
    sequence = np.concatenate([prompt, generation.token_ids])
    taken = np.arange(1500), generation.token_ids
    by_old, by_new = (rows(model, sequence, 1.0)[len(prompt) - 1 : -1][taken] for model in (before, after))
    wanted = np.where(np.arange(1500) < old.end, by_old, by_new)
    np.testing.assert_allclose(generation.logprobs, wanted, atol=PARITY_NATS)


async def test_the_sequence_of_older_versions_ends_with_the_new_weights_too(
    sglang_student: RunningServer, models: Any, connect: Connect, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests in flight are aborted there, which their stages take as a reason to ask again."""
    monkeypatch.setattr("spot_async.backends.sglang_weights.FLUSH_WHILE_PAUSED", (9,))
    async with connect(sglang_student) as backend:
        under_way = asyncio.create_task(backend.generate(tokens(5, 1), sampling(1500), deadline=soon()))
        await wait_until(sglang_student, 1)
        await backend.update_weights(snapshot_of(models.other, SECOND), deadline=soon())
        with pytest.raises(TransientError, match="the server aborted the request"):
            await under_way
        await check_everything(backend, models.other, rows, SECOND)
        await backend.update_weights(snapshot_of(models.student, FIRST), deadline=soon())


async def test_an_update_whose_flush_was_refused_is_finished(
    sglang_student: RunningServer, models: Any, connect: Connect, rows: Rows
) -> None:
    """Held with their cache (in_place), requests keep the server from flushing: updated, but without its name."""
    async with connect(sglang_student) as backend:
        control = backend._weights._control
        transport = backend._weights._transport
        under_way = asyncio.create_task(backend.generate(tokens(5, 1), sampling(1500), deadline=soon()))
        await wait_until(sglang_student, 1)
        await control.post("/pause_generation", {"mode": "in_place"}, soon())

        async with asyncio.TaskGroup() as group:
            update = transport.send(snapshot_of(models.other, SECOND), {}, deadline=soon())
            updating = group.create_task(update)
            await asyncio.sleep(1.0)
            assert not updating.done()  # it waits for the flush
            await control.post("/pause_generation", {"mode": "retract"}, soon())
        await control.confirm(SECOND, soon())
        await control.post("/continue_generation", {}, soon())
        under_way.cancel()
        await asyncio.wait([under_way])
        await check_everything(backend, models.other, rows, SECOND)
        await backend.update_weights(snapshot_of(models.student, FIRST), deadline=soon())


async def test_weights_that_are_not_the_models_are_refused_and_the_old_ones_serve(
    sglang_student: RunningServer, models: Any, connect: Connect, rows: Rows, tmp_path: Path
) -> None:
    whole = load_file(models.other / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    cut = (models.other / "model.safetensors").read_bytes()[:-100]

    def directory(title: str, tensors: dict[str, Any] | None, raw: bytes = b"") -> WeightSnapshot:
        path = tmp_path / title
        path.mkdir()
        if tensors is None:
            (path / "model.safetensors").write_bytes(raw)
        else:
            save_file(tensors, path / "model.safetensors")
        return snapshot_of(path, SECOND)

    bad = [
        directory("partial", {key: value for key, value in whole.items() if key != name}),
        directory("shape", {**whole, name: whole[name].T.contiguous()}),
        directory("named", {**whole, "model.layers.7.mlp.down_proj.weight": whole[name].clone()}),
        directory("cut", None, cut),
        snapshot_of(tmp_path / "nowhere", SECOND),
    ]
    for transport in ("disk", "distributed"):
        async with connect(sglang_student, weights=weight_settings(transport)) as backend:
            await backend.update_weights(snapshot_of(models.student, FIRST), deadline=soon())
            for snapshot in bad:
                with pytest.raises(DataError, match=Path(snapshot.directory).name):
                    await backend.update_weights(snapshot, deadline=soon())
            await check_everything(backend, models.student, rows, FIRST)


async def test_a_sender_that_dies_leaves_the_old_weights_and_the_next_update_starts_another(
    sglang_student: RunningServer, models: Any, connect: Connect, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(sglang_student, weights=weight_settings("distributed")) as backend:
        await backend.update_weights(snapshot_of(models.student, FIRST), deadline=soon())
        sender = backend._weights._transport._sender  # type: ignore[attr-defined]
        os.kill(sender._child.pid, signal.SIGSTOP)  # the server is in the middle of receiving
        update = asyncio.create_task(backend.update_weights(snapshot_of(models.other, SECOND), deadline=soon()))
        await asyncio.sleep(1.0)
        os.killpg(sender._child.pid, signal.SIGKILL)
        with pytest.raises(RequestError, match=r"student-weights .* was killed by SIGKILL|/update_weights_from_distr"):
            await update
        await check_everything(backend, models.student, rows, FIRST)

        monkeypatch.setattr(type(sender), "join", lambda *_, **__: asyncio.sleep(3600))
        with pytest.raises(RequestError, match="before the deadline"):  # the sender never joins
            await backend.update_weights(snapshot_of(models.other, SECOND), deadline=soon(10.0))
        monkeypatch.undo()
        await backend.update_weights(snapshot_of(models.other, SECOND), deadline=soon())
        await check_everything(backend, models.other, rows, SECOND)
        await backend.update_weights(snapshot_of(models.student, FIRST), deadline=soon())


# Requests that are given up, and a server that goes away.


async def test_a_request_that_is_given_up_frees_its_place_and_no_other(
    sglang_student: RunningServer, connect: Connect
) -> None:
    async with connect(sglang_student) as backend:
        requests = [
            asyncio.create_task(backend.generate(tokens(5, n), sampling(1800, stop_token_ids=()), deadline=soon()))
            for n in range(4)
        ]
        await wait_until(sglang_student, 4)
        requests[1].cancel()
        started = asyncio.get_running_loop().time()
        await asyncio.wait([requests[1]])
        await wait_until(sglang_student, 3)
        assert asyncio.get_running_loop().time() - started < 2.0  # by itself the server notices after 4 s
        finished = await asyncio.gather(requests[0], requests[2], requests[3])
    assert [len(each.token_ids) for each in finished] == [1800] * 3


async def test_a_deadline_that_passes_frees_the_place_too(sglang_student: RunningServer, connect: Connect) -> None:
    async with connect(sglang_student) as backend:
        with pytest.raises(TransientError, match="no reply before the deadline"):
            await backend.generate(tokens(5, 0), sampling(1900, stop_token_ids=()), deadline=soon(0.5))
        await wait_until(sglang_student, 0)


async def test_seeds_act_under_deterministic_inference_and_a_killed_server_is_a_transient_error(
    start_sglang: Any, models: Any, connect: Connect
) -> None:
    """Two things of one server, because it takes long to start."""
    with start_sglang(models.student, "--enable-deterministic-inference") as server:
        async with connect(server) as backend:
            assert (await backend.capabilities(deadline=soon())).seeds

            async def sample(seed: int) -> list[int]:
                settings = sampling(24, seed=seed, stop_token_ids=())
                return list((await backend.generate(tokens(10, 0), settings, deadline=soon())).token_ids)

            first, again, other = await asyncio.gather(sample(1 << 62), sample(1 << 62), sample((1 << 62) + 1))
            assert first == again != other

            settings = sampling(1900, stop_token_ids=())
            request = asyncio.create_task(backend.generate(tokens(5, 0), settings, deadline=soon()))
            await wait_until(server, 1)
            server.signal_group(signal.SIGKILL)
            with pytest.raises(TransientError, match="student/generate"):
                await request
