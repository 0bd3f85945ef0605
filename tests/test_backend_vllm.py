"""The vLLM adapter where no vLLM runs: replies recorded from 0.32.0, and a small server for what cannot run on a CPU.

The stand-in answers as vLLM 0.32 with the V2 model runner and as vLLM 0.25 do by their sources; it serves a table of
next-token distributions. `tests/servers/test_vllm.py` is the real server's.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog

from spot_async.backends import vllm_launch
from spot_async.backends.launch import LaunchSettings
from spot_async.backends.stepwise import run_at_once
from spot_async.backends.vllm import VllmBackend
from spot_async.backends.vllm_client import NoSuchRouteError, read_error
from spot_async.backends.vllm_replies import (
    CompletionsRoute,
    Dialect,
    GenerateRoute,
    Table,
    read_prompt_row,
    read_table,
)
from spot_async.errors import (
    ConfigError,
    DeadlineExceededError,
    PermanentError,
    PoisonedReplyError,
    ProcessDiedError,
    ServerRestartedError,
    TransientError,
    VersionMismatchError,
)
from spot_async.types import SamplingSettings, VersionSpan, WeightSnapshot, WeightVersion

RECORDED = Path(__file__).parent / "data" / "vllm_0.32.0" / "replies.json"
V0, V1 = WeightVersion(0, 0), WeightVersion(0, 1)
VOCAB = 50
PROMPT = np.array([3, 9, 27], np.int32)
RESPONSE = np.array([31, 4, 4, 40, 12], np.int32)


def recorded(name: str) -> Any:
    return json.loads(RECORDED.read_text())[name]["reply"]


def table_of(route: Dialect, reply: Any, width: int) -> Table:
    answer = route.read(msgspec.json.encode(reply))
    return run_at_once(read_table(answer.token_rows, route.read_row, width=width))


def soon(seconds: float = 60.0) -> float:
    return asyncio.get_running_loop().time() + seconds


class Raw(str):
    """A reply that is no JSON."""


def as_before_0_32(reply: Any) -> Any:
    """The same reply in the shape that versions up to 0.31 gave it."""
    for entry in reply["choices"][0]["logprobs"]["content"]:
        for token in (entry, *entry["top_logprobs"]):
            token["token"] = f"token_id:{token.pop('token_id')}"
            token["bytes"] = None
    return reply


@pytest.mark.parametrize("shape", [lambda reply: reply, as_before_0_32])
def test_both_shapes_of_a_sampled_response_give_its_own_and_the_likeliest_tokens(shape: Callable[[Any], Any]) -> None:
    reply = recorded("generate")  # logprobs: 3, so the top two are complete whatever was sampled
    content = recorded("generate")["choices"][0]["logprobs"]["content"]
    tokens = np.array(reply["choices"][0]["token_ids"], np.int32)
    table = table_of(GenerateRoute(), shape(reply), width=4)
    np.testing.assert_array_equal(table.of_tokens(tokens), np.float32([entry["logprob"] for entry in content]))
    ids, logprobs = table.top(2)
    for row, entry in enumerate(content):
        best = sorted(entry["top_logprobs"], key=lambda token: -token["logprob"])[:2]
        assert ids[row].tolist() == [token["token_id"] for token in best]
        assert logprobs[row].tolist() == [np.float32(token["logprob"]) for token in best]


def test_the_openai_route_gives_the_same_numbers() -> None:
    first = table_of(GenerateRoute(), recorded("generate"), width=5)
    second = table_of(CompletionsRoute(), recorded("completions"), width=5)
    assert recorded("generate")["choices"][0]["token_ids"] == recorded("completions")["choices"][0]["token_ids"]
    np.testing.assert_array_equal(first.top(2)[0], second.top(2)[0])
    np.testing.assert_array_equal(first.top(2)[1], second.top(2)[1])


def test_the_openai_route_leaves_nothing_of_sampling_to_the_models_generation_config() -> None:
    body = CompletionsRoute().body("m", [1, 2], {"max_tokens": 4, "temperature": 0.5, "top_p": 0.9})
    neutral = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert {name: body[name] for name in neutral} == neutral
    assert (body["temperature"], body["top_p"]) == (0.5, 0.9)
    assert CompletionsRoute().body("m", [1, 2], {})["top_p"] == 1.0


@pytest.mark.parametrize(("name", "route"), [("score", GenerateRoute()), ("score_completions", CompletionsRoute())])
def test_rows_of_given_tokens_hold_the_token_and_the_likeliest(name: str, route: Dialect) -> None:
    rows = route.read(msgspec.json.encode(recorded(name))).prompt_rows
    whole = recorded("score")["prompt_logprobs"]
    table = run_at_once(read_table(rows[1:], read_prompt_row, width=3))
    tokens = np.array([6, 7, 300, 301, 17], np.int32)
    expected = [whole[i + 1][str(token)]["logprob"] for i, token in enumerate(tokens)]
    np.testing.assert_array_equal(table.of_tokens(tokens), np.float32(expected))
    by_rank = [sorted(row.items(), key=lambda item: -item[1]["logprob"])[:2] for row in whole[1:]]
    np.testing.assert_array_equal(table.top(2)[0], [[int(token) for token, _ in row] for row in by_rank])


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"7": {"logprob": -9999.0}, "8": {"logprob": -0.1}}], "-9999"),
        ([{"8": {"logprob": -0.1}, "9": {"logprob": -0.2}}], "does not hold its own token 7"),
        ([{"7": {"logprob": -0.1}}], "fewer than the 2"),
        ([{str(i): {"logprob": -1.0} for i in range(9)}], "9 log-probabilities where at most 3"),
        ([{"7": {"logprob": None}}], "Expected `float`"),
        ([None], "Expected `object`"),
    ],
)
def test_rows_that_cannot_be_true_are_refused(rows: list[Any], problem: str) -> None:
    raw = [msgspec.Raw(msgspec.json.encode(row)) for row in rows]

    def read() -> None:
        table = run_at_once(read_table(raw, read_prompt_row, width=3))
        table.of_tokens(np.array([7], np.int32))
        table.top(2)

    with pytest.raises((PoisonedReplyError, msgspec.ValidationError), match=problem):
        read()


def test_failures_that_call_for_a_flag_or_an_older_route_are_told_apart() -> None:
    assert isinstance(read_error("student", 404, b'{"detail":"Not Found"}'), NoSuchRouteError)
    assert read_error("student", 404, json.dumps(recorded("no_model")).encode()) is None
    disabled = b'{"error":{"message":"Scale-out endpoints are disabled. Restart with --enable-scale-out"}}'
    refusal = read_error("student", 403, disabled)
    assert type(refusal) is PermanentError
    assert "student.backend: the server takes no token ids: add --enable-scale-out" in str(refusal)


class StandIn:
    """A server whose next token depends on the last one alone: row `i` of the table (V, V) follows token `i`."""

    def __init__(
        self,
        model: Path,
        tokenizer: Any,
        *,
        version: str = "0.32.0",
        chosen_tokens: bool = True,
        paused: bool = False,
        developer_mode: bool = True,
    ) -> None:
        self.model, self.tokenizer, self.version, self.chosen_tokens = model, tokenizer, version, chosen_tokens
        logits = np.random.default_rng(0).normal(0.0, 2.0, (VOCAB, VOCAB))
        self.table = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        self.weights = "default"
        self.names_weights = version >= "0.27"
        self.paused = paused
        self.developer_mode = developer_mode
        self.finish_reason = "length"
        self.calls: list[str] = []
        self.bodies: list[tuple[str, Any]] = []
        self.failing: dict[str, tuple[int, Any]] = {}  # the next answer
        self.broken: set[str] = set()  # every answer
        self.held = asyncio.Event()
        self.hold: str | None = None
        self.answers_developers = True
        self.metrics: list[str] = []

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        missing = (404, {"detail": "Not Found"})
        routes: dict[str, Callable[[], tuple[int, Any]]] = {
            "/version": lambda: (200, {"version": self.version}),
            "/v1/models": lambda: (200, {"data": [{"id": "m", "max_model_len": 64}]}),
            "/tokenize": lambda: (200, {"tokens": self.tokenizer.encode(body["prompt"], add_special_tokens=False)}),
            "/inference/v1/generate": lambda: self.generate(body["token_ids"], body["sampling_params"]),
            "/weight_info": lambda: (
                (200, {"weight_version": self.weights}) if self.names_weights and self.developer_mode else missing
            ),
            "/update_weight_version": lambda: self.rename(body["new_version"]),
            "/reset_prefix_cache": lambda: (200, {"success": True}),
            "/is_paused": lambda: (200, {"is_paused": self.paused}) if self.answers_developers else missing,
            "/metrics": lambda: (200, Raw(self.metrics.pop(0) if self.metrics else "")),
            "/health": lambda: (200, {}),
            "/pause?mode=keep": lambda: self.pause(True),
            "/collective_rpc": lambda: (200, {"results": [None]}),
            "/resume": lambda: self.pause(False),
        }
        self.calls.append(path)
        self.bodies.append((path, body))
        if path in self.broken:
            return 500, {"error": {"message": "broken"}}
        return self.failing.pop(path, None) or routes.get(path, lambda: missing)()

    def pause(self, paused: bool) -> tuple[int, Any]:
        self.paused = paused
        return 200, {"status": "paused" if paused else "resumed"}

    def rename(self, name: str) -> tuple[int, Any]:
        self.weights = name
        return 200, {"success": True, "new_version": name}

    def generate(self, tokens: list[int], asked: dict[str, Any]) -> tuple[int, Any]:
        def refuse(message: str) -> tuple[int, Any]:
            return 400, {"error": {"message": message, "type": "BadRequestError"}}

        if max(tokens) >= VOCAB:
            return refuse(f"Token id {max(tokens)} is out of vocabulary")
        if (asked.get("prompt_logprobs") or 0) > 20:
            return refuse("Requested prompt logprobs of 50, which is greater than max allowed: 20")
        reply: dict[str, Any] = {"prompt_logprobs": None, "prompt_token_id_logprobs": None}
        rows = asked.get("prompt_logprob_token_ids")
        if rows is not None and self.version >= "0.31":
            if not self.chosen_tokens:
                return refuse("prompt_logprob_token_ids requires the V2 model runner (VLLM_USE_V2_MODEL_RUNNER=1).")
            start = asked["prompt_logprob_start"]
            if len(rows) != len(tokens) - 1 - start:
                return refuse(f"prompt_logprob_token_ids has {len(rows)} rows")
            values = np.full((len(rows), max(map(len, rows))), -np.inf, np.float32)
            for i, row in enumerate(rows):
                values[i, : len(row)] = self.table[tokens[start + i], row]
            file = io.BytesIO()
            np.save(file, values)
            reply["prompt_token_id_logprobs"] = base64.b64encode(file.getvalue()).decode()
        if asked.get("prompt_logprobs") is not None:
            reply["prompt_logprobs"] = [None] + [
                {str(v): {"logprob": x} for v, x in self.entries(before, token, asked["prompt_logprobs"])}
                for before, token in itertools.pairwise(tokens)
            ]
        sampled, content = [], []
        for _ in range(asked["max_tokens"]):
            row = self.table[(tokens + sampled)[-1]]
            token = asked.get("allowed_token_ids", [int(row.argmax())])[0]
            entries = self.entries((tokens + sampled)[-1], token, asked.get("logprobs") or 0)
            shown = [self.entry(*entry) for entry in entries[: max(1, asked.get("logprobs") or 0)]]
            content.append({**shown[0], "top_logprobs": shown})
            sampled.append(token)
        choice: dict[str, Any] = {"token_ids": sampled, "finish_reason": self.finish_reason}
        if asked.get("logprobs") is not None:
            choice["logprobs"] = {"content": content}
        if self.names_weights:
            choice["weight_versions"] = [{"version": self.weights, "start": 0, "end": len(sampled)}]
        return 200, {**reply, "choices": [choice]}

    def entries(self, before: int, token: int, count: int) -> list[tuple[int, float]]:
        """The token itself, then the likeliest others."""
        row = self.table[before]
        best = [int(v) for v in np.argsort(-row)[:count] if v != token]
        return [(v, float(np.float32(row[v]))) for v in (token, *best)]

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        name = {"token_id": token} if self.version >= "0.32" else {"token": f"token_id:{token}"}
        return {**name, "logprob": logprob}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                lengths = [line.split(":")[1] for line in head.splitlines() if line.startswith("content-length")]
                body = await reader.readexactly(int(lengths[0])) if lengths else b""
                path = head.split()[1]
                status, reply = self.answer(path, json.loads(body) if body and body != b"null" else None)
                if path == self.hold:  # done, but the answer never comes
                    self.held.set()
                    await asyncio.sleep(3600.0)
                content = reply.encode() if isinstance(reply, Raw) else json.dumps(reply).encode()
                writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


Connect = Callable[..., Any]


@pytest.fixture
def connect(random_model: Any, tmp_path: Path) -> Connect:
    """`connect(role, **stand_in)`: a backend on a stand-in, both entered."""
    from spot_async.vocabulary import load_tokenizer

    model = random_model()

    @asynccontextmanager
    async def enter(role: str = "student", **changes: Any) -> AsyncIterator[tuple[VllmBackend, StandIn]]:
        stand_in = StandIn(model, load_tokenizer(model), **changes)
        async with await asyncio.start_server(stand_in.serve, "127.0.0.1", 0) as server:
            settings = VllmBackend.Settings(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            async with VllmBackend(settings, role=role, model=str(model), run_directory=tmp_path) as backend:
                stand_in.calls.clear()
                yield backend, stand_in

    return enter


async def test_a_server_with_the_v2_model_runner_gives_all_candidates_at_once(connect: Connect) -> None:
    async with connect() as (backend, stand_in):
        assert (await backend.capabilities(deadline=soon())).candidate_logprobs == "batched"
        positions = np.array([3, 1, 3], np.int32)  # in any order, and one twice
        candidates = np.array([[5, 49], [0, 12], [7, 8]], np.int32)

        async def ask(version: WeightVersion) -> Any:
            return await backend.candidate_logprobs(
                PROMPT, RESPONSE, positions, candidates, temperature=1.0, expected_version=version, deadline=soon()
            )

        last = np.array([4, 31, 4])  # the token before each of the positions
        expected = stand_in.table[last[:, None], candidates]
        np.testing.assert_allclose(await ask(V0), expected, rtol=0, atol=1e-6)
        assert stand_in.calls == ["/inference/v1/generate"]
        with pytest.raises(VersionMismatchError, match="holds weights"):
            await ask(V1)


@pytest.mark.parametrize("version", ["0.25.1", "0.31.0"])
async def test_older_versions_are_read_as_well_and_offer_less(connect: Connect, version: str) -> None:
    async with connect(version=version, chosen_tokens=False) as (backend, stand_in):
        found = await backend.capabilities(deadline=soon())
        assert found.weight_update == (version >= "0.27")  # else nothing could confirm which weights are served
        assert (found.candidate_logprobs, found.server) == ("single", f"vllm {version}")
        assert (found.max_top_k, found.max_generation_top_k) == (20, 19)
        assert 1e-6 <= found.logprob_noise_nats < 1e-3  # equal readings are no promise of equal ones
        sampling = SamplingSettings(max_tokens=5, stop_token_ids=(), seed=1)
        reply = await backend.generate(PROMPT, sampling, top_k=3, deadline=soon())
        assert reply.version_spans == (VersionSpan(0, 5, V0),)
        rows = stand_in.table[[PROMPT[-1], *reply.token_ids[:-1].tolist()]]
        np.testing.assert_allclose(reply.topk_logprobs, -np.sort(-rows, axis=1)[:, :3], rtol=0, atol=1e-6)


async def test_a_server_that_was_left_paused_is_not_waited_for(connect: Connect) -> None:
    with pytest.raises(ConfigError, match="the server is paused"):
        async with connect(paused=True):
            pass


async def test_a_response_that_the_server_gave_up_is_not_one(connect: Connect) -> None:
    async with connect() as (backend, stand_in):
        sampling = SamplingSettings(max_tokens=5, stop_token_ids=(), seed=1)
        stand_in.finish_reason = "abort"
        with pytest.raises(TransientError, match="gave up after 5 tokens"):
            await backend.generate(PROMPT, sampling, deadline=soon())
        stand_in.finish_reason = "tool_calls"
        with pytest.raises(PoisonedReplyError, match="finish reason 'tool_calls' is unknown"):
            await backend.generate(PROMPT, sampling, deadline=soon())


async def test_weights_that_this_run_never_sent_are_noticed(connect: Connect) -> None:
    async with connect() as (backend, stand_in):
        await backend.update_weights(WeightSnapshot(directory=str(stand_in.model), version=V1), deadline=soon())
        sampling = SamplingSettings(max_tokens=2, stop_token_ids=(), seed=1)
        assert (await backend.generate(PROMPT, sampling, deadline=soon())).version_spans == (VersionSpan(0, 2, V1),)
        stand_in.weights = "default"  # as after a restart
        with pytest.raises(ServerRestartedError, match="'default', which this run never sent: was it restarted"):
            await backend.generate(PROMPT, sampling, deadline=soon())
        stand_in.weights = str(V0)  # as after an update by another run
        with pytest.raises(ServerRestartedError, match=r"holds weights 0\.0 and was last given 0\.1"):
            await backend.generate(PROMPT, sampling, deadline=soon())


async def test_a_ping_asks_the_engine_which_weights_it_has(connect: Connect) -> None:
    async with connect() as (backend, stand_in):
        await backend.ping(deadline=soon())
        assert stand_in.calls == ["/is_paused", "/weight_info"]  # no token, and no wait for a place
        stand_in.paused = True
        with pytest.raises(TransientError, match="the server is paused, but not by this run"):
            await backend.ping(deadline=soon())
        stand_in.paused = False
        await backend.update_weights(WeightSnapshot(directory=str(stand_in.model), version=V1), deadline=soon())
        await backend.ping(deadline=soon())
        stand_in.weights = "default"
        with pytest.raises(ServerRestartedError, match="'default', which this run never sent"):
            await backend.ping(deadline=soon())


async def test_a_ping_during_an_update_leaves_the_engine_alone(connect: Connect) -> None:
    async with connect() as (backend, stand_in):
        stand_in.hold = "/collective_rpc"
        snapshot = WeightSnapshot(directory=str(stand_in.model), version=V1)
        async with asyncio.TaskGroup() as group:
            updating = group.create_task(backend.update_weights(snapshot, deadline=soon()))
            await stand_in.held.wait()
            stand_in.calls.clear()
            await backend.ping(deadline=soon())
            assert stand_in.calls == ["/health"]
            stand_in.hold = None
            updating.cancel()


async def test_without_developer_mode_a_ping_is_a_token_or_signs_of_work(connect: Connect) -> None:
    def counted(read: float, sampled: float) -> str:
        name = '_tokens_total{engine="0",model_name="m"}'
        return f"vllm:prompt{name} {read}\nvllm:generation{name} {sampled}\nvllm:other_total 3.0\n"

    async with connect("teacher") as (backend, stand_in):
        stand_in.answers_developers = False
        await backend.ping(deadline=soon())
        assert stand_in.calls == ["/is_paused", "/metrics", "/inference/v1/generate"]
        stand_in.hold = "/inference/v1/generate"  # all places are taken
        stand_in.metrics = [counted(7.0, 1.0), counted(7.0, 2.0)]
        await backend.ping(deadline=soon(0.4))
        stand_in.metrics = [counted(7.0, 2.0), counted(7.0, 2.0)]
        with pytest.raises(DeadlineExceededError):
            await backend.ping(deadline=soon(0.4))


UPDATE = ["/pause?mode=keep", "/collective_rpc", "/update_weight_version", "/reset_prefix_cache", "/weight_info"]


async def test_an_update_goes_on_only_with_weights_that_the_server_confirmed(connect: Connect) -> None:
    async with connect() as (backend, stand_in):
        first, second = (WeightSnapshot(directory=str(stand_in.model), version=each) for each in (V0, V1))
        await backend.update_weights(first, deadline=soon())
        assert stand_in.calls == [*UPDATE, "/resume"]
        # Whatever fails after the pause, the weights before are loaded again and confirmed before it goes on.
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
        with pytest.raises(ProcessDiedError, match="must be restarted, it stays paused"):
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
        with pytest.raises(DeadlineExceededError):
            await backend.update_weights(snapshot, deadline=asyncio.get_running_loop().time() + 1.0)
        assert stand_in.calls == ["/pause?mode=keep", "/resume"]
        assert not stand_in.paused


async def test_a_server_that_takes_no_weights_is_told_what_it_lacks(connect: Connect) -> None:
    old = {"version": "0.25.1", "chosen_tokens": False}
    for changes, need in ((old, "vLLM 0.27 or later.*0.25.1"), ({"developer_mode": False}, "VLLM_SERVER_DEV_MODE=1")):
        with structlog.testing.capture_logs() as logs:
            async with connect(**changes) as (backend, stand_in):
                snapshot = WeightSnapshot(directory=str(stand_in.model), version=V0)
                with pytest.raises(ConfigError, match=need):
                    await backend.update_weights(snapshot, deadline=soon())
        (warned,) = [log for log in logs if log["event"] == "takes no weights"]
        assert re.search(need, warned["needs"])


async def test_only_temperature_1_is_scored(connect: Connect) -> None:
    async with connect() as (backend, stand_in):
        positions, candidates = np.array([1], np.int32), np.array([[5]], np.int32)
        common: dict[str, Any] = {"temperature": 0.7, "deadline": soon()}
        for scored in (
            backend.score(PROMPT, RESPONSE, top_k=2, **common),
            backend.score_at(PROMPT, RESPONSE, positions, top_k=2, **common),
            backend.candidate_logprobs(PROMPT, RESPONSE, positions, candidates, expected_version=V0, **common),
        ):
            with pytest.raises(PermanentError, match=r"temperature 1 only, not at 0\.7"):
                await scored
        assert stand_in.calls == []


@pytest.mark.parametrize(("version", "flag"), [("0.29.1", False), ("0.30.0+cpu", True), ("1.0.0rc1", True)])
def test_the_command_has_the_flags_that_the_installed_version_knows(
    version: str, flag: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_launch, "installed_version", lambda settings, package: version)
    settings = LaunchSettings(
        python="/opt/vllm/bin/python",
        tensor_parallel_size=2,
        memory_fraction=0.5,
        dtype="bfloat16",
        arguments=["--max-model-len", "5121"],
        environment={"VLLM_LOGGING_LEVEL": "ERROR"},
    )
    command = vllm_launch.vllm_command(settings, Path("/models/student"), 8123, max_logprobs=65, takes_weights=True)
    given = " ".join(command.argv)
    assert ("--enable-scale-out" in command.argv) == flag
    for part in (
        "/opt/vllm/bin/python -m vllm.entrypoints.openai.api_server --model /models/student",
        "--host 127.0.0.1 --port 8123",
        "--max-logprobs 65 --dtype bfloat16 --tensor-parallel-size 2",
        "--enable-prompt-tokens-details --gpu-memory-utilization 0.5",
    ):
        assert part in given
    assert list(command.argv[-2:]) == ["--max-model-len", "5121"]
    assert command.environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert command.environment["VLLM_LOGGING_LEVEL"] == "ERROR"
    teacher = vllm_launch.vllm_command(settings, Path("/models/teacher"), 8124, max_logprobs=65, takes_weights=False)
    assert "VLLM_SERVER_DEV_MODE" not in teacher.environment
