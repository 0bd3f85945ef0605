"""Bounds on the memory and time of a reply: endless bodies, refusals and heads, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from deadlines import soon

from spot_async.backends.shared.bodies import ANSWER_BYTES, ERROR_BYTES, STEP_BYTES, largest_reply_bytes
from spot_async.backends.shared.http import LONG_BODY_BYTES, HttpEndpoint
from spot_async.errors import PermanentError, PoisonedReplyError, RequestError, TransientError
from spot_async.spending.prices import read_usage

MIB = 1 << 20
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def endpoint_to(answer: Answer) -> AsyncIterator[HttpEndpoint]:
    """A server that reads a request and then does what `answer` says, as often as it is asked."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await answer(writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with contextlib.closing(server):
        async with HttpEndpoint("teacher", f"http://127.0.0.1:{port}") as endpoint:
            yield endpoint


@functools.cache
def packed(encoding: str, size: int) -> bytes:
    """`size` bytes of nothing, about a thousandth of that long."""
    packer = zlib.compressobj(9, zlib.DEFLATED, {"gzip": 31, "deflate": 15, "raw deflate": -15}[encoding])
    return b"".join(packer.compress(bytes(MIB)) for _ in range(size // MIB)) + packer.flush()


def inflating(size: int, *encodings: str) -> Answer:
    """A reply of `packed` bytes, which are made when it is asked for: every worker collects this file."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        said = ", ".join(encoding.removeprefix("raw ") for encoding in encodings)
        await reply(packed(encodings[0], size), f"Content-Encoding: {said}")(writer)

    return answer


def reply(body: bytes, *headers: str, status: int = 200) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *headers, "", ""]
        writer.write("\r\n".join(lines).encode() + body)
        await writer.drain()

    return answer


async def without_end(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
        await writer.drain()


@pytest.mark.parametrize(
    "answer",
    [
        inflating(256 * MIB, "gzip"),
        pytest.param(inflating(256 * MIB, "deflate"), marks=pytest.mark.long),
        inflating(256 * MIB, "raw deflate"),
        inflating(MIB, "gzip", "gzip"),
        without_end,
    ],
    ids=["gzip", "deflate", "raw deflate", "gzip in gzip", "plain"],
)
async def test_a_reply_takes_no_more_memory_than_an_answer_may(answer: Answer) -> None:
    async with endpoint_to(answer) as endpoint:
        tracemalloc.start()
        try:
            with pytest.raises(PoisonedReplyError, match="teacher/x: cannot read the reply: ") as caught:
                await endpoint.get("/x", deadline=soon())
            assert tracemalloc.get_traced_memory()[1] < 2 * ANSWER_BYTES + 4 * MIB
        finally:
            tracemalloc.stop()
    assert caught.value.exchange is not None
    assert caught.value.exchange.status == 200


@pytest.mark.parametrize("encoding", ["gzip", "identity"])
async def test_of_a_refusal_only_the_head_is_read(encoding: str) -> None:
    said = b"too long a prompt" + bytes(ERROR_BYTES)
    body = zlib.compress(said + bytes(64 * MIB), 1, 31) if encoding == "gzip" else said + bytes(8 * MIB)
    async with endpoint_to(reply(body, f"Content-Encoding: {encoding}", status=400)) as endpoint:
        with pytest.raises(PermanentError, match="HTTP 400: too long a prompt"):
            await endpoint.get("/x", deadline=soon())
        assert endpoint.traffic.received_bytes < MIB  # what is not needed is not waited for


async def test_a_long_reply_is_inflated_in_steps_between_which_others_have_their_turn() -> None:
    turns, in_one_turn, here = 0, 0, (0, 0)

    def sink(part: bytes) -> None:
        nonlocal in_one_turn, here
        assert len(part) <= STEP_BYTES
        here = (turns, here[1] + 1 if turns == here[0] else 1)
        in_one_turn = max(in_one_turn, here[1])

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    body = packed("gzip", 16 * MIB)
    async with endpoint_to(reply(body, "Content-Encoding: gzip")) as endpoint, asyncio.TaskGroup() as group:
        counting = group.create_task(count())
        await endpoint.stream("/x", b"", sink, content_type="x", deadline=soon(), largest=16 * MIB)
        counting.cancel()
    assert turns > 16
    assert in_one_turn <= 2  # the rest of one step, and another


async def test_compressed_replies_come_whole_and_cut_ones_are_none() -> None:
    said = b"hello " * 100_000
    for encoding, bits in (("gzip", 31), ("deflate", 15), ("deflate", -15)):
        packer = zlib.compressobj(1, zlib.DEFLATED, bits)
        body = packer.compress(said) + packer.flush()
        async with endpoint_to(reply(body, f"Content-Encoding: {encoding}")) as endpoint:
            assert await endpoint.get("/x", deadline=soon()) == said
        async with endpoint_to(reply(body[:-20], f"Content-Encoding: {encoding}")) as endpoint:
            with pytest.raises(PoisonedReplyError, match=f"its {encoding} ends in the middle"):
                await endpoint.get("/x", deadline=soon())
    async with endpoint_to(reply(said, "Content-Encoding: gzip")) as endpoint:
        with pytest.raises(PoisonedReplyError, match="it is no gzip"):
            await endpoint.get("/x", deadline=soon())
    async with endpoint_to(reply(b"", "Content-Encoding: gzip")) as endpoint:
        assert await endpoint.get("/x", deadline=soon()) == b""


@pytest.mark.parametrize(("digits", "is_read"), [("0" * 4999 + "2", True), ("1" * 5000, False), ("-1", False)])
async def test_a_content_length_that_is_no_number_of_bytes_is_the_servers_failure(digits: str, is_read: bool) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 200 X\r\nContent-Length: {digits}\r\n\r\nok".encode())

    async with endpoint_to(answer) as endpoint:
        if is_read:
            assert await endpoint.get("/x", deadline=soon()) == b"ok"
        else:
            with pytest.raises(RequestError, match="teacher/x"):
                await endpoint.get("/x", deadline=soon())


async def test_a_header_on_two_lines_is_read_as_one() -> None:
    twice = reply(zlib.compress(b"said", 1, 31), "Content-Encoding: gzip", "Content-Encoding: gzip")
    async with endpoint_to(twice) as endpoint:
        with pytest.raises(PoisonedReplyError, match="its Content-Encoding 'gzip, gzip' was not asked for"):
            await endpoint.get("/x", deadline=soon())


async def test_a_reply_that_was_refused_is_let_go_at_once() -> None:
    """Without a collection, which a run has few of: an error and the trace that holds the reply hold each other."""
    async with endpoint_to(without_end) as endpoint:
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(2):
                with contextlib.suppress(PoisonedReplyError):
                    await endpoint.get("/x", deadline=soon())
            assert tracemalloc.get_traced_memory()[0] < ANSWER_BYTES
        finally:
            tracemalloc.stop()
            gc.enable()


async def test_replies_that_nobody_asked_for_close_the_connection() -> None:
    """Whether they come before the answer, or to a connection that waits for its next request."""
    closed = asyncio.Event()

    async def flood(writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(CONTINUE * 1000)
                await writer.drain()
        except ConnectionError:
            closed.set()
            raise

    async def answer_first(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 X\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()
        await asyncio.sleep(0.05)  # else it comes with the answer
        await flood(writer)

    async with endpoint_to(flood) as endpoint:
        with pytest.raises(TransientError, match="more replies than it was sent requests"):
            await endpoint.get("/x", deadline=soon())
        await closed.wait()
    closed.clear()
    async with endpoint_to(answer_first) as endpoint:
        assert await endpoint.get("/x", deadline=soon()) == b"ok"
        await closed.wait()


async def test_a_few_informational_heads_before_an_answer_are_passed_over() -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        hints = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
        writer.write(CONTINUE + 3 * hints + b"HTTP/1.1 200 X\r\nContent-Length: 2\r\n\r\nok")

    async with endpoint_to(answer) as endpoint:
        for _ in range(2):
            assert await endpoint.get("/x", deadline=soon()) == b"ok"


async def test_cookies_are_neither_kept_nor_sent() -> None:
    heads = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                heads.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(b"HTTP/1.1 200 X\r\nSet-Cookie: a=b\r\nContent-Length: 2\r\n\r\nok")
        writer.close()

    server = await asyncio.start_server(serve, "localhost", 0)
    port = server.sockets[0].getsockname()[1]
    with contextlib.closing(server):
        async with HttpEndpoint("teacher", f"http://localhost:{port}") as endpoint:
            for _ in range(2):
                await endpoint.get("/x", deadline=soon())
    assert len(heads) == 2
    assert not any(b"cookie" in head.lower() for head in heads)


async def test_only_a_few_long_replies_are_held_at_once_until_they_are_read() -> None:
    """Also where their length is not known before."""
    body, held = bytes(2 * LONG_BODY_BYTES), asyncio.Queue[asyncio.Event]()
    async with endpoint_to(reply(zlib.compress(body, 1, 31), "Content-Encoding: gzip")) as endpoint:

        async def ask() -> None:
            async with contextlib.AsyncExitStack() as turn:
                assert await endpoint.post("/x", b"", content_type="x", deadline=soon(), turn=turn) == body
                is_read = asyncio.Event()
                held.put_nowait(is_read)
                await is_read.wait()

        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(ask())
            first = await held.get()
            for number in range(4):
                second = await held.get()
                for _ in range(3):  # whoever could have got a place meanwhile
                    with pytest.raises(PoisonedReplyError):
                        await endpoint.post("/x", b"", content_type="x", deadline=soon(), largest=1)
                assert held.empty(), number
                first.set()
                first = second
            first.set()


def test_a_long_score_may_have_three_times_what_vllm_writes_of_it() -> None:
    tokens, top_k, bytes_a_token = 4608, 16, 1380  # benchmarks/README.md
    assert largest_reply_bytes(tokens, tokens * (top_k + 1)) > 3 * tokens * bytes_a_token


def test_a_count_of_tokens_that_is_none_is_not_believed() -> None:
    assert read_usage(b'{"prompt_tokens": %s}' % (b"1" * 5000)) is None
    stated = read_usage(b'{"prompt_tokens": 12, "completion_tokens": %s}' % (b"9" * 40))
    assert stated is not None
    assert (stated.prompt_tokens, stated.completion_tokens) == (12, 0)
