"""What every HTTP backend shares: failures become the errors that callers act on, replies are checked."""

from __future__ import annotations

import asyncio
import contextlib
import re

import msgspec
import numpy as np
import pytest
from deadlines import soon
from faulty_proxy import Fault, FaultyProxy
from raw_server import Serve, endpoint_of, listening

from spot_async.backends.local.server import read_error
from spot_async.backends.shared.failures import error_message
from spot_async.backends.shared.http import HttpEndpoint
from spot_async.backends.shared.replies import check_candidates, check_generation, check_rows, check_scores
from spot_async.base import wire
from spot_async.base.retry import RetryPolicy
from spot_async.errors import (
    DeadlineExceededError,
    PermanentError,
    PoisonedReplyError,
    RequestError,
    ThrottledError,
    TransientError,
    VersionMismatchError,
)
from spot_async.replicas.leasing import OneService
from spot_async.stages.stage import Stage, StageLimits
from spot_async.testing.services import token_scores
from spot_async.types import Generation, SamplingSettings, VersionSpan, WeightVersion

VOCAB = 53
RESPONSE = np.array([7, 30], np.int32)


def always(status: int, headers: str, body: bytes) -> Serve:
    """Gives every request the same answer."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    return answer


@pytest.mark.parametrize(
    ("status", "headers", "kind"),
    [
        (400, "", PermanentError),
        (429, "Retry-After: 7\r\n", ThrottledError),
        (503, "Retry-After: Fri, 31 Dec 1999 23:59:59 GMT\r\n", ThrottledError),
        (500, "", TransientError),
    ],
)
async def test_a_status_decides_what_may_be_done_about_it(status: int, headers: str, kind: type[Exception]) -> None:
    async with endpoint_of(always(status, headers, b"some\nreason")) as endpoint:
        with pytest.raises(kind, match=rf"^teacher/x: HTTP {status}: some reason$") as caught:
            await endpoint.get("/x", deadline=soon())
    if isinstance(caught.value, ThrottledError):
        assert caught.value.retry_after_s == (7.0 if status == 429 else 0.0)


async def test_a_reply_that_trickles_and_one_that_hangs_are_asked_for_again_in_time() -> None:
    """The time-out is of the whole attempt: bytes that keep coming do not put it off."""
    faults = {0: Fault.SLOW, 1: Fault.HANG}
    async with (
        listening(always(200, "", b"answer")) as url,
        FaultyProxy(("127.0.0.1", int(url.rpartition(":")[2])), lambda n, path: faults.get(n), byte_s=1.0) as proxy,
        HttpEndpoint("teacher", proxy.url) as endpoint,
    ):
        stage = Stage(
            "score",
            OneService(endpoint),
            StageLimits(
                concurrency=1, timeout_s=60.0, attempt_timeout_s=0.2, retry=RetryPolicy(50), waiting_capacity=1
            ),
            jitter=lambda: 0.0,
        )
        assert await stage.ask((0,), lambda each, deadline: each.get("/x", deadline=deadline)) == b"answer"
    assert {*faults.values()} <= proxy.met.keys()
    assert stage.counters.transient >= 2


async def test_an_endpoint_that_is_not_there_is_transient_and_a_silent_one_ends_at_the_deadline() -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with endpoint_of(hang) as endpoint:
        with pytest.raises(DeadlineExceededError, match="teacher/x: no reply before the deadline"):
            await endpoint.get("/x", deadline=soon(0.05))
    async with HttpEndpoint("teacher", "http://127.0.0.1:9") as endpoint:
        with pytest.raises(TransientError, match="teacher/x"):
            await endpoint.get("/x", deadline=soon())


def generation(**changes: object) -> Generation:
    honest = {
        "token_ids": np.array([3, 4, 5], np.int32),
        "logprobs": np.array([-3.0, -4.5, -2.0], np.float32),
        "finish_reason": "stop",
        "version_spans": (VersionSpan(0, 1, WeightVersion(0, 0)), VersionSpan(1, 3, WeightVersion(0, 1))),
        "topk_ids": np.array([[1, 2]] * 3, np.int32),
        "topk_logprobs": np.array([[-0.5, -1.0]] * 3, np.float32),
    }
    return Generation(**{**honest, **changes})  # type: ignore[arg-type]


def check(reply: Generation, max_tokens: int = 8) -> Generation:
    return check_generation(
        reply, SamplingSettings(max_tokens=max_tokens, stop_token_ids=(5,), seed=1), top_k=2, vocab_size=VOCAB
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": np.array([3, 5], np.int32)}, "logprobs have shape"),
        ({"token_ids": np.zeros(0, np.int32)}, "0 tokens"),
        ({"token_ids": np.array([3, VOCAB, 5], np.int32)}, "token_ids hold a token out of the 53"),
        ({"token_ids": np.array([3, -1, 5], np.int32)}, "token_ids hold a token out of the 53"),
        ({"token_ids": np.array([3, 4, 6], np.int32)}, "finish reason 'stop' does not fit the last token 6"),
        (
            {"token_ids": np.array([3, 4, 6], np.int32), "finish_reason": "length"},
            "ends after 3 of 8 tokens, without a stop token",
        ),
        ({"token_ids": np.array([5, 4, 5], np.int32)}, "continues after stop token 5 at token 1"),
        ({"logprobs": np.array([-1, np.nan, -1], np.float32)}, "logprobs hold NaN"),
        ({"logprobs": np.array([-1, 0.1, -1], np.float32)}, "logprobs hold values above 0"),
        ({"version_spans": (VersionSpan(0, 2, WeightVersion(0, 0)),)}, "do not cover"),
        ({"version_spans": ()}, "do not cover"),
        ({"topk_ids": None}, "no top-k"),
        ({"topk_ids": np.zeros((3, 1), np.int32)}, "topk_ids have shape"),
        ({"topk_logprobs": np.array([[-1.0, -0.5]] * 3, np.float32)}, "do not descend"),
        ({"logprobs": np.array([-1, -np.inf, -1], np.float32)}, "logprobs hold minus infinity"),
        ({"topk_ids": np.array([[1, 1]] * 3, np.int32)}, "name a token twice"),
        ({"topk_logprobs": np.array([[-0.1, -0.5]] * 3, np.float32)}, "exceed 1 together"),
        ({"topk_ids": np.array([[3, 2]] * 3, np.int32)}, "contradict each other at token 0"),
        ({"logprobs": np.array([-3.0, -0.8, -2.0], np.float32)}, "contradict each other at token 1"),
    ],
)
def test_a_poisoned_generation_is_rejected(change: dict[str, object], message: str) -> None:
    check(generation())
    with pytest.raises(PoisonedReplyError, match=message):
        check(generation(**change))


def test_a_response_whose_last_allowed_token_is_a_stop_token_has_stopped() -> None:
    """SGLang, and vLLM once, look at the length first."""
    assert check(generation(finish_reason="length")).finish_reason == "stop"
    cut_off = generation(finish_reason="length", token_ids=np.array([3, 4, 6], np.int32))
    assert check(cut_off, max_tokens=3).finish_reason == "length"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": np.array([-1.0], np.float32)}, "logprobs have shape"),
        ({"entropy": np.array([np.nan, 1.0], np.float32)}, "entropy is not between"),
        ({"entropy_upper": np.array([4.1, 1.0], np.float32)}, "entropy_upper is not between 0 and log 53"),
        ({"entropy_lower": np.array([1.0, 1.5], np.float32)}, "outside its own bounds"),
        ({"valid": np.array([True], np.bool_)}, "valid have shape"),
        ({"valid": np.array([1.0, 0.0], np.float32)}, "not true or false"),
        ({"logprobs": np.array([-0.5, -1.0], np.float32)}, "contradict each other at token 0"),
        ({"tail_logprobs": np.array([-0.46], np.float32)}, "tail_logprobs have shape"),
        ({"tail_logprobs": np.array([-1, 0], np.int32)}, "tail_logprobs are int32"),
        ({"tail_logprobs": np.array([-0.46, np.nan], np.float32)}, "tail_logprobs hold NaN"),
        ({"tail_logprobs": np.array([-0.46, 0.1], np.float32)}, "tail_logprobs hold values above 0"),
        ({"tail_logprobs": np.array([-0.46, -0.6], np.float32)}, "probabilities that are not 1 together"),
        ({"tail_logprobs": np.array([-np.inf, -0.46], np.float32)}, "probabilities that are not 1 together"),
    ],
)
def test_poisoned_scores_are_rejected(change: dict[str, object], message: str) -> None:
    honest = token_scores([-1.0, -1.0], topk_logprobs=-1.0, entropy=1.0)
    check_scores(honest, RESPONSE, top_k=1, vocab_size=VOCAB)
    tailed = msgspec.structs.replace(honest, tail_logprobs=np.log1p(-np.exp(honest.topk_logprobs[:, 0])))
    check_scores(tailed, RESPONSE, top_k=1, vocab_size=VOCAB)
    with pytest.raises(PoisonedReplyError, match=message):
        check_scores(msgspec.structs.replace(honest, **change), RESPONSE, top_k=1, vocab_size=VOCAB)


def test_poisoned_rows_and_candidates_are_rejected() -> None:
    own, top = np.array([-3.0, -4.0], np.float32), np.array([[-0.5, -1.0]] * 2, np.float32)
    ids = np.array([[1, 2]] * 2, np.int32)
    check_rows(RESPONSE, own, ids, top, top_k=2, vocab_size=VOCAB)
    for change, message in [
        ((own, ids, top[:, ::-1]), "do not descend"),
        ((-own, ids, top), "logprobs hold values ab"),
    ]:
        with pytest.raises(PoisonedReplyError, match=message):
            check_rows(RESPONSE, *change, top_k=2, vocab_size=VOCAB)
    assert check_candidates(top, ids) is top
    with pytest.raises(PoisonedReplyError, match="candidate log-probabilities hold values above 0"):
        check_candidates(-top, ids)


def test_an_error_that_our_own_server_names_is_raised_and_any_other_name_is_told_by_its_status() -> None:
    def read(name: str) -> RequestError | None:
        return read_error("student", 503, wire.encode({"error": name, "message": "other weights"}))

    assert isinstance(read("VersionMismatchError"), VersionMismatchError)
    for other in ("SpotError", "NoSuchError"):
        assert type(read(other)) is ThrottledError


@pytest.mark.parametrize(
    "body",
    [
        b'{"error": {"message": "too long", "type": "BadRequest", "code": 400}}',
        b'{"error": "too long"}',
        b'{"object": "error", "message": "too long", "code": 400}',
        b'{"detail": "too long"}',
        b"too long",
    ],
)
def test_what_a_server_complains_of_is_found_in_every_shape_of_error(body: bytes) -> None:
    assert error_message(body) == "too long"


def test_an_error_of_no_known_shape_is_shown_as_it_came() -> None:
    assert error_message(b'{"error": {"code": 3}}') == '{"error": {"code": 3}}'
    assert error_message(b"\xff") == "\ufffd"
    assert error_message(b"[" * 100_000).startswith("[[[")


@pytest.mark.parametrize("waited", [False, True])  # for longer than servers keep a connection open
async def test_a_connection_that_the_server_closed_meanwhile_is_replaced_at_once(
    waited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections = 0
    if waited:
        monkeypatch.setattr("spot_async.backends.shared.http.IDLE_S", 1e-9)

    async def answer_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(b"HTTP/1.1 200 X\r\nContent-Length: 2\r\n\r\nok")  # stays open for another request
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n{}")
        writer.close()

    async with endpoint_of(answer_one) as endpoint:
        for _ in range(2):
            reply = await endpoint.post(
                "/x", b"{}", content_type="application/json", deadline=soon(), resend=not waited
            )
            assert reply == b"ok"
    assert connections == 2


async def test_a_new_connection_that_closes_without_a_reply_is_a_failed_attempt() -> None:
    connections = 0

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n{}")
        writer.close()

    async with endpoint_of(hang_up) as endpoint:
        with pytest.raises(TransientError):
            await endpoint.post("/x", b"{}", content_type="application/json", deadline=soon())
    assert connections == 1, "it is not hidden by a second sending"


async def test_many_long_replies_at_once_all_come_whole_and_wait_no_longer_than_the_deadline() -> None:
    body = bytes(range(256)) * (1 << 13)  # 2 MiB
    stuck = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 X\r\nContent-Length: %d\r\n\r\n" % len(body))
        if b"/stuck" in head:
            await stuck.wait()
        with contextlib.suppress(ConnectionError):
            writer.write(body)
            await writer.drain()
        writer.close()

    async with endpoint_of(answer) as endpoint:
        replies = await asyncio.gather(*(endpoint.get("/x", deadline=soon()) for _ in range(9)))
        assert all(reply == body for reply in replies)
        late = [endpoint.get(path, deadline=soon(0.2)) for path in ("/stuck", "/stuck", "/x")]
        outcomes = await asyncio.gather(*late, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes[:2]] == [DeadlineExceededError] * 2
        assert await endpoint.get("/x", deadline=soon()) == body  # given up requests hold no place
        stuck.set()


async def test_requests_and_their_bytes_are_counted_failed_ones_too() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        sent = re.search(r"content-length: (\d+)", head)
        await reader.readexactly(int(sent[1]) if sent else 0)
        status, body = ("503", b"busy") if "/full" in head else ("200", b"x" * 1234)
        writer.write(f"HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    async with endpoint_of(answer) as endpoint:
        await endpoint.get("/health", deadline=soon())
        await endpoint.post("/score", b"12345", content_type="text/plain", deadline=soon())
        with pytest.raises(ThrottledError):
            await endpoint.post("/full", b"123", content_type="text/plain", deadline=soon())
        traffic = endpoint.traffic
        assert (traffic.requests, traffic.sent_bytes, traffic.received_bytes) == (3, 8, 2 * 1234 + 4)


@pytest.mark.parametrize("was_used", [True, False])
async def test_an_endpoint_that_was_left_fails_as_a_lost_connection_does(was_used: bool) -> None:
    endpoint = HttpEndpoint("teacher", "http://127.0.0.1:9")
    async with endpoint:
        if was_used:
            with pytest.raises(TransientError):
                await endpoint.get("/", deadline=soon())
    with pytest.raises(TransientError, match="was closed"):
        await endpoint.get("/", deadline=soon())
