"""The SGLang adapter where no SGLang runs: replies recorded from 0.5.23, and a stand-in for what cannot run on a CPU.

The stand-in's control endpoints answer with recorded replies. `tests/servers/test_sglang.py` is the real server's.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from spot_async.backends.held_weights import WeightNames
from spot_async.backends.launch import LaunchSettings
from spot_async.backends.limits import Limits
from spot_async.backends.probing import LEAST_NOISE_NATS, differences, noise_nats, temperature_convention
from spot_async.backends.sglang import SglangBackend
from spot_async.backends.sglang_checks import check_ready, check_vocabulary
from spot_async.backends.sglang_launch import sglang_command
from spot_async.backends.sglang_replies import STEP_BYTES, read_generation, read_next_token, read_scores
from spot_async.backends.sglang_weights import Control, DistributedTransport, ServerInfo, SglangWeights
from spot_async.backends.stepwise import run_at_once
from spot_async.backends.weight_transport import Tensor, WeightSettings
from spot_async.errors import (
    ConfigError,
    DeadlineExceededError,
    PermanentError,
    PoisonedReplyError,
    RequestError,
    ServerRestartedError,
    TransientError,
)
from spot_async.types import Capabilities, Generation, SamplingSettings, VersionSpan, WeightSnapshot, WeightVersion

RECORDED = Path(__file__).parent / "data" / "sglang_0.5.23" / "replies.json"
V0, V1 = WeightVersion(0, 0), WeightVersion(0, 1)
VOCAB = 512
NAMES = WeightNames("student", is_student=True).now()
PROMPT = np.array([263, 301, 88, 17, 402], np.int32)
RESPONSE = np.array([511, 88, 83, 300, 511], np.int32)  # with the last token of the vocabulary


def recorded(name: str) -> Any:
    return json.loads(RECORDED.read_text())[name]["reply"]


def recorded_bytes(name: str) -> bytes:
    return json.dumps(recorded(name)).encode()


def soon(seconds: float = 60.0) -> float:
    return asyncio.get_running_loop().time() + seconds


# Replies.


def test_flat_and_nested_top_k_of_a_response_are_read_alike() -> None:
    flat = run_at_once(read_generation(recorded_bytes("generate"), NAMES, top_k=3))
    nested = run_at_once(read_generation(recorded_bytes("generate nested"), NAMES, top_k=3))
    assert flat.topk_ids is not None
    assert flat.topk_logprobs is not None
    assert nested.topk_logprobs is not None
    assert (flat.topk_ids.shape, flat.topk_ids.dtype, flat.topk_logprobs.dtype) == ((6, 3), np.int32, np.float32)
    # The first position is the same distribution in both; what was sampled after it is not.
    np.testing.assert_allclose(flat.topk_logprobs[0], nested.topk_logprobs[0], atol=2e-5)
    values = np.frombuffer(
        base64.b64decode(recorded("generate")["meta_info"]["output_top_logprobs_val_flat_b64"]), "<f4"
    )
    np.testing.assert_array_equal(flat.topk_logprobs.ravel(), values)
    assert flat.token_ids.tolist() == recorded("generate")["output_ids"]
    assert flat.version_spans == (VersionSpan(0, 6, V0),)


def test_scores_drop_the_prompts_row_and_read_alike_in_both_forms() -> None:
    flat = run_at_once(read_scores(recorded_bytes("score"), NAMES, RESPONSE, vocab_size=VOCAB))
    nested = run_at_once(read_scores(recorded_bytes("score nested"), NAMES, RESPONSE, vocab_size=VOCAB))
    own = [logprob for logprob, _, _ in recorded("score")["meta_info"]["input_token_logprobs"]]
    assert own[0] is None
    np.testing.assert_array_equal(flat.logprobs, np.array(own[1:], np.float32))
    assert flat.top.ids.shape == (5, 4)
    np.testing.assert_array_equal(flat.top.ids, nested.top.ids)
    np.testing.assert_allclose(flat.top.logprobs, nested.top.logprobs, atol=2e-5)
    # The server calls the vocabulary's last token 0 in its list of what it scored, and scores it all the same.
    assert [token for _, token, _ in recorded("score")["meta_info"]["input_token_logprobs"][1:]] == [0, 88, 83, 300, 0]


def test_only_the_vocabularys_last_token_may_come_back_as_0() -> None:
    for response in ([511, 88, 83, 300, 12], [510, 88, 83, 300, 511]):
        with pytest.raises(PoisonedReplyError, match="scored tokens are not the response's"):
            run_at_once(read_scores(recorded_bytes("score"), NAMES, np.array(response, np.int32), vocab_size=VOCAB))


def test_a_students_weights_are_those_it_started_with_until_it_is_sent_some_and_then_only_those() -> None:
    names = WeightNames("student", is_student=True)
    names.start("default")
    before = names.now()
    assert before.version("default") == before.version(None) == V0  # some servers name none
    for name in ("checkpoint-3", ""):
        with pytest.raises(ServerRestartedError, match=f"student: the server calls its weights '{name}'.*restarted"):
            before.version(name)
    with names.updating(V1):
        assert before.version("default") == V0
    assert before.version("0.1") == names.now().version("0.1") == V1  # a response under way has tokens of both
    for name in ("default", None):
        with pytest.raises(ServerRestartedError, match=f"{name!r}, which this run never sent"):
            names.now().version(name)
    with pytest.raises(ServerRestartedError, match=r"holds weights 0\.0 and was last given 0\.1"):
        names.now().version("0.0")
    teachers = WeightNames("teacher", is_student=False).now()
    assert teachers.version("default") == teachers.version("7.7") == V0


def test_chosen_tokens_come_in_the_order_that_they_were_asked_for_in() -> None:
    found = run_at_once(read_next_token(recorded_bytes("candidates"), NAMES, [9, 400, 83]))
    row = recorded("candidates")["meta_info"]["output_token_ids_logprobs"][0]
    assert found.chosen is not None
    np.testing.assert_array_equal(found.chosen, np.array([logprob for logprob, _, _ in row], np.float32))
    with pytest.raises(PoisonedReplyError, match="other tokens than asked for"):
        run_at_once(read_next_token(recorded_bytes("candidates"), NAMES, [9, 83, 400]))
    top = run_at_once(read_next_token(recorded_bytes("position"), NAMES, None)).top
    assert top is not None
    assert top.ids.shape == (1, 3)


def test_a_response_that_saw_an_update_says_which_weights_sampled_each_token() -> None:
    names = WeightNames("student", is_student=True)
    sent = names.now()
    with names.updating(V1):
        generation = run_at_once(read_generation(recorded_bytes("two versions"), sent, top_k=0))
    assert generation.version_spans == (VersionSpan(0, 4, V0), VersionSpan(4, 8, V1))


@pytest.mark.parametrize("name", ["aborted", "aborted in the queue"])
def test_an_aborted_response_is_none_however_little_the_reply_says(name: str) -> None:
    with pytest.raises(TransientError, match="the server aborted the request: Abort"):
        run_at_once(read_generation(recorded_bytes(name), NAMES, top_k=0))


def without_row(name: str) -> Callable[[Any], None]:
    return lambda meta: meta[name].pop()


def with_null(*path: Any) -> Callable[[Any], None]:
    def change(meta: Any) -> None:
        for key in path[:-1]:
            meta = meta[key]
        meta[path[-1]] = None

    return change


def shorter(name: str) -> Callable[[Any], None]:
    def change(meta: Any) -> None:
        meta[name] = base64.b64encode(base64.b64decode(meta[name])[:-4]).decode()

    return change


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("generate", without_row("output_token_logprobs")),
        ("generate", with_null("output_token_logprobs", 2, 0)),
        ("generate", shorter("output_top_logprobs_val_flat_b64")),
        ("generate", with_null("output_top_logprobs_val_flat_b64")),
        ("generate", with_null("output_top_logprobs_idx_flat_b64")),
        ("generate", with_null("finish_reason")),
        ("generate nested", with_null("output_top_logprobs", 1, 1, 0)),
        ("generate nested", lambda meta: meta["output_top_logprobs"][1].pop()),
        ("score", without_row("input_token_logprobs")),
        ("score", lambda meta: meta["input_token_logprobs"].append([-1.0, 9, None])),
        ("score", lambda meta: meta["input_token_logprobs"].__setitem__(2, [-1.0, 9, None])),
        ("score nested", with_null("input_top_logprobs", 3)),
        ("score nested", with_null("input_top_logprobs", 3, 0, 0)),
    ],
)
def test_a_reply_with_something_missing_or_no_number_is_poisoned(name: str, change: Callable[[Any], None]) -> None:
    reply = recorded(name)
    change(reply["meta_info"])
    body = json.dumps(reply).encode()
    with pytest.raises((PoisonedReplyError, ValueError, TypeError)):  # the latter become the first in `RemoteServer`
        run_at_once(
            read_scores(body, NAMES, RESPONSE, vocab_size=VOCAB)
            if "score" in name
            else read_generation(body, NAMES, top_k=3)
        )


@pytest.mark.parametrize("spaces", [False, True])
def test_long_nested_rows_are_the_same_when_they_are_read_in_parts(spaces: bool) -> None:
    draw = np.random.default_rng(0)
    count, k = 2000, 8
    ids = draw.integers(1, VOCAB, (count, k)).astype(np.int32)
    logprobs = -draw.exponential(5.0, (count, k)).astype(np.float32)
    reply = recorded("score nested")
    meta = reply["meta_info"]
    meta["input_token_logprobs"] = [[None, 402, None], *([-1.5, token, None] for token in ids[:, 0].tolist())]
    rows = zip(logprobs.tolist(), ids.tolist(), strict=True)
    meta["input_top_logprobs"] = [None, *([(x, v, None) for x, v in zip(*row, strict=True)] for row in rows)]
    body = json.dumps(reply).encode() if spaces else msgspec.json.encode(reply)
    assert len(body) > 3 * STEP_BYTES
    steps = read_scores(body, NAMES, ids[:, 0], vocab_size=VOCAB)
    assert sum(1 for _ in steps) > 3  # the event loop has its turn in between
    found = run_at_once(read_scores(body, NAMES, ids[:, 0], vocab_size=VOCAB))
    np.testing.assert_array_equal(found.top.ids, ids)
    np.testing.assert_array_equal(found.top.logprobs, logprobs)


def test_noise_and_temperature_convention_follow_from_rows_asked_for_twice() -> None:
    row = np.array([-0.5, -1.5, -3.0], np.float32)
    assert temperature_convention(row, row) == "one"
    assert temperature_convention(row, 2 * row - np.float32(0.3)) == "request"
    ids = np.array([[4, 5]], np.int32)
    top = np.array([[-1.0, -2.0]], np.float32)
    generated = Generation(
        token_ids=np.array([4], np.int32), logprobs=np.array([-1.0], np.float32), finish_reason="length",
        version_spans=(), topk_ids=ids, topk_logprobs=top,
    )  # fmt: skip

    def noise(logprob: float, read_ids: Any, read: Any) -> float:
        return noise_nats(differences(generated, np.array([logprob], np.float32), read_ids, read))

    assert noise(-1.01, ids, top) == pytest.approx(0.02, abs=1e-6)
    assert noise(-1.0, ids, top - np.float32(0.1)) == pytest.approx(0.2, abs=1e-6)
    assert noise(-1.0, ids[:, ::-1], top - np.float32(0.1)) == LEAST_NOISE_NATS  # equal once is not equal for ever


# Requests.


@dataclass
class StandIn:
    """Answers each path from a list of (status, body), the last of which stays; notes what it was asked."""

    replies: dict[str, list[tuple[int, bytes]]]
    asked: list[tuple[str, Any]] = field(default_factory=list)
    silent: asyncio.Event = field(default_factory=asyncio.Event)  # set when a request is left without an answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:")), 0)
                body = await reader.readexactly(length)
                path = head.split()[1]
                self.asked.append((path, json.loads(body) if body else None))
                answers = self.replies.get(path, [(404, b"{}")])
                status, reply = answers.pop(0) if len(answers) > 1 else answers[0]
                if status < 0:
                    return
                if status == 0:
                    self.silent.set()
                    await reader.read()  # never answers
                    return
                writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(reply)}\r\n\r\n".encode() + reply)
                await writer.drain()
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


def ok(**fields: Any) -> list[tuple[int, bytes]]:
    return [(200, json.dumps(fields).encode())]


@pytest.fixture(scope="module")
def model(random_model: Callable[..., Path]) -> Path:
    return random_model(vocab_size=VOCAB)


@asynccontextmanager
async def connected(
    model: Path, tmp_path: Path, *, generation_temperature: Any = "request", **replies: Any
) -> AsyncIterator[tuple[SglangBackend, StandIn]]:
    """A backend as after start-up, and what it talks to."""
    stand_in = StandIn({f"/{path}": answers for path, answers in replies.items()})
    server = await asyncio.start_server(stand_in.serve, "127.0.0.1", 0)
    settings = SglangBackend.Settings(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    backend = SglangBackend(settings, role="student", model=str(model), run_directory=tmp_path)
    backend._capabilities = Capabilities(
        model="m", vocab_size=VOCAB, vocab_fingerprint="", max_context_tokens=100, max_top_k=VOCAB,
        exact_entropy=False, candidate_logprobs="single", weight_update=True,
        generation_temperature=generation_temperature,
    )  # fmt: skip
    backend._limits = Limits("student", VOCAB, 100, VOCAB, "--context-length")
    async with server, backend._server:
        yield backend, stand_in


async def test_a_request_says_what_is_asked_for_under_an_id_of_fixed_length(model: Path, tmp_path: Path) -> None:
    reply = [(200, recorded_bytes("generate stopped"))]
    end = recorded("generate stopped")["output_ids"][-1]
    async with connected(model, tmp_path, generate=reply) as (backend, stand_in):
        for seed in (1, 2):
            sampling = SamplingSettings(temperature=0.7, top_p=0.9, max_tokens=30, stop_token_ids=(end, 1), seed=seed)
            generation = await backend.generate(PROMPT, sampling, deadline=soon())
    assert (generation.finish_reason, generation.token_ids[-1]) == ("stop", end)
    (_, first), (_, second) = stand_in.asked
    assert first["sampling_params"] == {
        "temperature": 0.7, "top_p": 0.9, "max_new_tokens": 30, "stop_token_ids": [end, 1],
        "ignore_eos": False,  # or the server would not look at stop_token_ids
        "sampling_seed": 1,
    }  # fmt: skip
    assert len(first["rid"]) == len(second["rid"]) == 32
    assert first["rid"] != second["rid"]  # aborts match by prefix


async def test_an_end_token_that_only_the_server_knows_is_named(model: Path, tmp_path: Path) -> None:
    end = recorded("generate stopped")["output_ids"][-1]
    reply = [(200, recorded_bytes("generate stopped"))]
    async with connected(model, tmp_path, generate=reply) as (backend, _):
        sampling = SamplingSettings(max_tokens=30, stop_token_ids=(1,), seed=0)
        with pytest.raises(PermanentError, match=rf"ends responses at token {end}, which is none of .*eos_token_id"):
            await backend.generate(PROMPT, sampling, deadline=soon())


async def test_a_request_that_nobody_waits_for_is_aborted_by_its_own_id(model: Path, tmp_path: Path) -> None:
    replies: dict[str, Any] = {"generate": [(0, b"")], "abort_request": [(200, b"")]}
    async with connected(model, tmp_path, **replies) as (backend, stand_in):
        sampling = SamplingSettings(max_tokens=30, stop_token_ids=(1,), seed=0)
        with pytest.raises(TransientError, match="student/generate: no reply before the deadline"):
            await backend.generate(PROMPT, sampling, deadline=soon(0.1))
        stand_in.silent.clear()
        request = asyncio.create_task(backend.generate(PROMPT, sampling, deadline=soon()))
        await stand_in.silent.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
    assert stand_in.paths == ["/generate", "/abort_request"] * 2
    for (_, generate), (_, abort) in zip(stand_in.asked[::2], stand_in.asked[1::2], strict=True):
        assert abort == {"rid": generate["rid"]}


async def test_a_request_that_the_server_still_has_an_earlier_sending_of_is_worth_another_id(
    model: Path, tmp_path: Path
) -> None:
    refusal = {"error": {"message": "Duplicate request ID detected: 0123"}}
    async with connected(model, tmp_path, generate=[(400, json.dumps(refusal).encode())]) as (backend, _):
        with pytest.raises(TransientError, match="student/generate: HTTP 400: Duplicate request ID"):
            await backend.generate(PROMPT, SamplingSettings(max_tokens=4, stop_token_ids=(), seed=0), deadline=soon())


# Start-up.

UNKNOWN_TOKEN = (400, b'{"error": {"message": "token_ids_logprob contains out-of-vocabulary token id 512; valid"}}')


async def test_a_server_that_an_earlier_run_left_paused_is_not_waited_for(model: Path, tmp_path: Path) -> None:
    replies: dict[str, Any] = {"ready": [(503, b"")], "server_info": ok(version="0.5.23"), "generate": [(0, b"")]}
    async with connected(model, tmp_path, **replies) as (backend, stand_in):
        with pytest.raises(ConfigError, match=r"student\.backend: the server is paused.*POST /continue_generation"):
            async with backend:
                pass
    assert stand_in.paths == ["/server_info", "/ready"]


async def test_start_up_compares_vocabularies_and_notes_what_the_weights_are_called(
    model: Path, tmp_path: Path
) -> None:
    replies: dict[str, Any] = {
        "server_info": ok(version="0.5.23"),
        "generate": [(200, b"{}"), UNKNOWN_TOKEN],
        "model_info": ok(weight_version="default"),
        "tokenize": ok(tokens=[1]),  # which ends start-up
    }
    async with connected(model, tmp_path, **replies) as (backend, stand_in):
        with pytest.raises(ConfigError, match="its tokenizer gives other tokens"):
            async with backend:
                pass
    assert [body["token_ids_logprob"] for path, body in stand_in.asked if path == "/generate"] == [[511], [512]]
    assert backend._names.now().version("default") == V0


async def test_a_server_that_knows_no_readiness_is_taken_for_ready(model: Path, tmp_path: Path) -> None:
    async with connected(model, tmp_path) as (backend, stand_in):
        await check_ready(backend._server, deadline=soon())
    assert stand_in.paths == ["/ready"]


@pytest.mark.parametrize(
    ("answers", "wrong"),
    [
        ([(200, b"{}"), UNKNOWN_TOKEN], None),
        ([(200, b"{}"), (200, b"{}")], "takes token 512"),
        ([UNKNOWN_TOKEN], "refuses token 511"),
    ],
)
async def test_a_vocabulary_of_another_size_than_the_servers_is_refused(
    answers: Any, wrong: str | None, model: Path, tmp_path: Path
) -> None:
    async with connected(model, tmp_path, generate=answers) as (backend, stand_in):
        with pytest.raises(ConfigError, match=f"vocab_size=512, but the server {wrong}") if wrong else nullcontext():
            await check_vocabulary(backend._server, ServerInfo(version="0.5.14"), deadline=soon())
    asked = [body["token_ids_logprob"] for _, body in stand_in.asked]
    assert asked == [[511], [512]][: len(asked)]
    assert len({body["rid"] for _, body in stand_in.asked}) == len(asked)


async def test_a_server_that_a_token_out_of_its_vocabulary_ends_is_not_asked_one(model: Path, tmp_path: Path) -> None:
    async with connected(model, tmp_path) as (backend, stand_in):
        await check_vocabulary(backend._server, ServerInfo(version="0.5.13"), deadline=soon())
    assert not stand_in.asked


async def test_what_a_server_serves_at_temperature_1_only_is_not_asked_at_another(model: Path, tmp_path: Path) -> None:
    one, first = np.zeros(1, np.int32), np.full((1, 1), 9, np.int32)
    async with connected(model, tmp_path, generation_temperature="one") as (backend, stand_in):
        with pytest.raises(PermanentError, match=r"temperature 1 only, not at 0\.5: set sampling\.temperature=1"):
            await backend.score(PROMPT, RESPONSE, top_k=4, temperature=0.5, deadline=soon())
        with pytest.raises(PermanentError, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
            await backend.candidate_logprobs(
                PROMPT, RESPONSE, one, first, temperature=0.5, expected_version=V0, deadline=soon()
            )
        assert not stand_in.asked


# Weights.

NOT_FLUSHED = (400, recorded_bytes("update not flushed"))
FLUSH_REFUSED = (400, b"Flush cache failed.\n")
CLOSES = (-1, b"")  # the connection, instead of an answer
UPDATED = (200, recorded_bytes("update"))
CONTROL: dict[str, Any] = {
    "pause_generation": ok(status="ok", message="Generation paused successfully."),
    "continue_generation": ok(status="ok"),
    "flush_cache": [(200, b"Cache flushed.\n")],
    "update_weights_from_disk": [UPDATED],
    "update_weight_version": [(200, recorded_bytes("named"))],
    "model_info": ok(weight_version="0.1"),
}


async def update(
    model: Path, tmp_path: Path, *, version: str = "0.5.23", **replies: Any
) -> tuple[list[tuple[str, Any]], RequestError | None]:
    """What an update asks of a server of that version, and what comes of it."""
    async with connected(model, tmp_path, **{**CONTROL, **replies}) as (backend, stand_in):
        weights = SglangWeights(backend._server, WeightSettings(), ServerInfo(version=version), log_directory=tmp_path)
        try:
            await weights.update(WeightSnapshot(directory=str(model), version=V1), deadline=soon(2.0))
        except RequestError as error:
            return stand_in.asked, error
        return stand_in.asked, None


@pytest.mark.parametrize("version", ["0.5.21", "0.5.23.post1", "0.6.0.dev2+gabc", "unknown"])
async def test_servers_that_flush_while_paused_keep_their_requests(version: str, model: Path, tmp_path: Path) -> None:
    asked, error = await update(model, tmp_path, version=version)
    assert error is None
    body = {"model_path": str(model), "weight_version": "0.1", "flush_cache": True, "abort_all_requests": False}
    assert asked == [
        ("/pause_generation", {"mode": "retract"}),
        ("/update_weights_from_disk", body),
        ("/model_info", None),
        ("/continue_generation", {}),
    ]


@pytest.mark.parametrize("version", ["0.5.20", "0.5.9.post2", "0.4.10"])
async def test_older_servers_are_flushed_before_the_update_which_would_end_them(
    version: str, model: Path, tmp_path: Path
) -> None:
    flush = [FLUSH_REFUSED, (200, b"")]
    asked, error = await update(model, tmp_path, version=version, flush_cache=flush)
    assert error is None
    assert [path for path, _ in asked] == [
        "/pause_generation", "/flush_cache", "/flush_cache", "/update_weights_from_disk", "/model_info",
        "/continue_generation",
    ]  # fmt: skip
    assert asked[0][1] == {"mode": "abort"}
    assert asked[3][1]["flush_cache"] is False


async def test_weights_that_were_updated_without_a_flush_are_flushed_and_named(model: Path, tmp_path: Path) -> None:
    flush = [FLUSH_REFUSED, (200, b"")]
    asked, error = await update(model, tmp_path, update_weights_from_disk=[NOT_FLUSHED], flush_cache=flush)
    assert error is None
    assert [path for path, _ in asked][2:5] == ["/flush_cache", "/flush_cache", "/update_weight_version"]
    assert asked[4][1] == {"new_version": "0.1", "abort_all_requests": False}  # it would abort all by default


@pytest.mark.parametrize(
    ("replies", "message"),
    [
        ({"update_weights_from_disk": [(400, recorded_bytes("no such directory"))]}, "Failed to get weights iterator"),
        (
            {"update_weights_from_disk": ok(success=False, message="no loader")},
            "student/update_weights_from_disk: no loader",
        ),
        ({"model_info": ok(weight_version="0.0")}, "serves weights 0.0 after an update to 0.1"),
        ({"update_weights_from_disk": [(0, b"")]}, "no reply before the deadline"),
    ],
)
async def test_a_refused_update_is_an_error_and_the_server_goes_on(
    replies: Any, message: str, model: Path, tmp_path: Path
) -> None:
    asked, error = await update(model, tmp_path, **replies)
    assert message in str(error)
    assert asked[-1] == ("/continue_generation", {})


@pytest.mark.parametrize("path", ["pause_generation", "continue_generation"])
async def test_a_server_whose_pause_or_resumption_got_no_answer_is_told_to_go_on(
    path: str, model: Path, tmp_path: Path
) -> None:
    replies: dict[str, Any] = {path: [(0, b""), (200, b'{"status": "ok"}')]}
    asked, error = await update(model, tmp_path, **replies)
    assert isinstance(error, DeadlineExceededError)
    assert path in str(error)
    assert [path for path, _ in asked].count("/continue_generation") == (2 if path == "continue_generation" else 1)
    assert asked[-1] == ("/continue_generation", {})


async def test_an_update_that_is_cancelled_while_it_pauses_leaves_no_pause(model: Path, tmp_path: Path) -> None:
    replies: dict[str, Any] = {**CONTROL, "pause_generation": [(0, b"")]}
    async with connected(model, tmp_path, **replies) as (backend, stand_in):
        weights = SglangWeights(backend._server, WeightSettings(), ServerInfo(version="0.5.23"), log_directory=tmp_path)
        updating = asyncio.create_task(
            weights.update(WeightSnapshot(directory=str(model), version=V1), deadline=soon())
        )
        await stand_in.silent.wait()
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
    assert stand_in.paths == ["/pause_generation", "/continue_generation"]


@pytest.mark.parametrize("status", [401, 404])
async def test_a_flush_that_can_never_succeed_is_not_asked_again(status: int, model: Path, tmp_path: Path) -> None:
    async with connected(model, tmp_path, flush_cache=[(status, b"no")]) as (backend, stand_in):
        with pytest.raises(PermanentError, match=f"HTTP {status}"):
            await Control(backend._server).flush(soon(1.0))
    assert stand_in.paths == ["/flush_cache"]


@pytest.mark.parametrize("path", ["/init_weights_update_group", "/update_weights_from_distributed"])
async def test_a_part_of_a_broadcast_is_not_sent_again_over_another_connection(
    path: str, model: Path, tmp_path: Path
) -> None:
    """A server that began with it waits for a broadcast that only the first sending has."""
    calls = ("begin_weight_update", "end_weight_update", "init_weights_update_group", "destroy_weights_update_group")
    replies = {**CONTROL, **{call: ok(success=True) for call in calls}, "update_weights_from_distributed": [UPDATED]}
    async with connected(model, tmp_path, **{**replies, path[1:]: [CLOSES, UPDATED]}) as (backend, stand_in):
        info = ServerInfo(version="0.5.23")
        weights = SglangWeights(backend._server, WeightSettings(), info, log_directory=tmp_path)
        sender: Any = Sender()
        weights._transport = DistributedTransport(Control(backend._server), WeightSettings(), sender, 1, True)
        with pytest.raises(TransientError, match=path):
            await weights.update(WeightSnapshot(directory=str(model), version=V1), deadline=soon())
    assert stand_in.paths.count(path) == 1
    assert stand_in.paths[-1] == "/continue_generation"


async def test_a_student_that_was_restarted_after_an_update_is_no_student_of_this_run(
    model: Path, tmp_path: Path
) -> None:
    reply = recorded("generate")
    reply["meta_info"]["weight_versions"] = [{"version": "default", "start": 0, "end": 6}]
    body = [(200, json.dumps(reply).encode())]
    sampling = SamplingSettings(max_tokens=6, stop_token_ids=(), seed=0)
    async with connected(model, tmp_path, **CONTROL, generate=body) as (backend, _):
        info = ServerInfo(version="0.5.23")
        backend._weights = SglangWeights(backend._server, WeightSettings(), info, log_directory=tmp_path)
        backend._names.start("default")
        before = await backend.generate(PROMPT, sampling, deadline=soon())
        assert before.version_spans == (VersionSpan(0, 6, V0),)
        await backend.update_weights(WeightSnapshot(directory=str(model), version=V1), deadline=soon())
        with pytest.raises(ServerRestartedError, match=r"calls its weights 'default'.*was it restarted"):
            await backend.generate(PROMPT, sampling, deadline=soon())


async def test_a_ping_asks_the_scheduler_and_which_weights_there_are(model: Path, tmp_path: Path) -> None:
    lives = {"server_info": ok(version="0.5.23"), "ready": [(200, b"")], "model_info": ok(weight_version="default")}
    async with connected(model, tmp_path, **lives) as (backend, stand_in):
        backend._names.start("default")
        await backend.ping(deadline=soon())
        assert stand_in.paths == ["/server_info", "/ready", "/model_info"]
        stand_in.replies["/ready"] = [(503, b"")]
        with pytest.raises(TransientError, match="the server is paused, but not by this run"):
            await backend.ping(deadline=soon())
        stand_in.replies["/ready"] = [(404, b"{}")]  # older servers do not know it
        await backend.ping(deadline=soon())
        stand_in.replies["/model_info"] = ok(weight_version="0.3")
        with pytest.raises(ServerRestartedError, match=r"holds weights 0\.3 and was last given 0\.0"):
            await backend.ping(deadline=soon())
        stand_in.replies["/server_info"] = [(0, b"")]  # frozen: the process in front still answers all the others
        with pytest.raises(DeadlineExceededError):
            await backend.ping(deadline=soon(0.2))


class Sender:
    """A sending process that always succeeds."""

    async def start(self, *, deadline: float) -> int:
        return 1234

    async def stop(self) -> None: ...

    async def join(self, group: str, *, world_size: int, deadline: float) -> None: ...

    async def broadcast(self, directory: str, tensors: list[Tensor], *, deadline: float) -> None: ...


@pytest.mark.parametrize(
    ("answers", "goes_on"),
    [
        ([(400, b'{"success": false, "message": "Failed to receive weights: closed"}')], True),  # of all in one part
        (
            [(400, b'{"success": false, "message": "The full weights of the ModelRunner are partially updated."}')],
            False,
        ),
        ([UPDATED, (400, b'{"success": false, "message": "Failed to receive weights: closed"}')], False),  # of two
    ],
)
async def test_a_server_with_parts_of_two_models_stays_paused(
    answers: Any, goes_on: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(answers) > 1:
        monkeypatch.setattr("spot_async.backends.weight_transport.buckets.__defaults__", (8000,))
    calls = ("begin_weight_update", "end_weight_update", "init_weights_update_group", "destroy_weights_update_group")
    replies = {**CONTROL, **{call: ok(success=True) for call in calls}, "update_weights_from_distributed": answers}
    async with connected(model, tmp_path, **replies) as (backend, stand_in):
        info = ServerInfo(version="0.5.23")
        weights = SglangWeights(backend._server, WeightSettings(), info, log_directory=tmp_path)
        sender: Any = Sender()
        weights._transport = DistributedTransport(Control(backend._server), WeightSettings(), sender, 1, True)
        with pytest.raises(
            PermanentError, match="Failed to receive" if goes_on else "parts of two models and stays paused"
        ):
            await weights.update(WeightSnapshot(directory=str(model), version=V1), deadline=soon())
        assert ("/continue_generation" in stand_in.paths) == goes_on
        assert stand_in.paths.index("/end_weight_update") < stand_in.paths.index("/destroy_weights_update_group")
        # The next whole update mends it.
        stand_in.replies["/update_weights_from_distributed"] = [UPDATED]
        await weights.update(WeightSnapshot(directory=str(model), version=V1), deadline=soon())
        assert stand_in.paths[-1] == "/continue_generation"
        sent = [body for path, body in stand_in.asked if path == "/update_weights_from_distributed"]
        assert (sent[-1]["flush_cache"], sent[-1]["weight_version"]) == (True, "0.1")


def test_data_parallel_replicas_are_not_updated_by_broadcast(model: Path, tmp_path: Path) -> None:
    server = SglangBackend(
        SglangBackend.Settings(url="http://x"), role="student", model=str(model), run_directory=tmp_path
    )._server
    with pytest.raises(ConfigError, match=r"student\.backend\.weights\.transport=distributed: .* 4 data-parallel"):
        SglangWeights(server, WeightSettings(transport="distributed"), ServerInfo(dp_size=4), log_directory=tmp_path)


def test_a_server_of_ours_listens_on_loopback_and_names_its_first_weights() -> None:
    launch = LaunchSettings(
        python="/env/bin/python", dtype="bfloat16", tensor_parallel_size=2, memory_fraction=0.7,
        arguments=["--enable-deterministic-inference"], environment={"X": "1"},
    )  # fmt: skip
    command = sglang_command(launch, Path("/m"), 3000, sleeps=True)
    text = " ".join(command.argv)
    assert text.startswith("/env/bin/python -m sglang.launch_server --model-path /m --host 127.0.0.1 --port 3000 ")
    for part in ("--tp-size 2", "--mem-fraction-static 0.7", "--weight-version 0.0", "--enable-memory-saver"):
        assert part in text
    assert text.endswith(" --enable-deterministic-inference")  # what users add comes last
    assert command.environment["X"] == "1"
