"""Answers the local engine's requests with made-up replies, on a Unix socket. It computes nothing.

    python benchmarks/stub_server.py SOCKET

It is for measuring clients, and knows just enough HTTP/1.1 for them: keep-alive and Content-Length.
"""

from __future__ import annotations

import asyncio
import functools
import sys

import msgspec
import numpy as np

from spot_async.base import wire
from spot_async.serving import api
from spot_async.types import Generation, IntArray, SamplingSettings, TokenScores, VersionSpan, WeightVersion

TOKENS = 8
TOP_K = 16
FIRST_TOKEN = 20  # past the special tokens of the shipped tokenizer
VERSION = WeightVersion(0, 0)
MANY = api.MANY.encode()


def generation(sampling: SamplingSettings) -> Generation:
    """Return a response of `TOKENS` tokens with an end token last, or of all that may be sampled if that is less."""
    if sampling.max_tokens > TOKENS:
        return _generation(TOKENS, sampling.stop_token_ids[0])
    return _generation(sampling.max_tokens, None)


@functools.cache
def _generation(tokens: int, end_token_id: int | None) -> Generation:
    token_ids = np.full(tokens, FIRST_TOKEN, np.int32)
    if end_token_id is not None:
        token_ids[-1] = end_token_id
    return Generation(
        token_ids=token_ids,
        logprobs=np.full(tokens, -1.0, np.float32),
        finish_reason="length" if end_token_id is None else "stop",
        version_spans=(VersionSpan(0, tokens, VERSION),),
    )


def scores(response_ids: IntArray) -> TokenScores:
    tokens = len(response_ids)
    entropy = np.linspace(0.1, 1.0, tokens, dtype=np.float32)
    return TokenScores(
        logprobs=np.where(response_ids == FIRST_TOKEN, -1.0, -2.0 - TOP_K).astype(np.float32),
        topk_ids=np.tile(np.arange(FIRST_TOKEN, FIRST_TOKEN + TOP_K, dtype=np.int32), (tokens, 1)),
        topk_logprobs=np.tile(-1.0 - np.arange(TOP_K, dtype=np.float32), (tokens, 1)),
        entropy=entropy,
        entropy_lower=entropy,
        entropy_upper=entropy,
        version=VERSION,
    )


def answer(request: api.EngineRequest) -> bytes:
    match request:
        case api.GenerateRequest():
            return wire.encode(generation(request.sampling))
        case api.ScoreRequest():
            return wire.encode(scores(request.response_ids))
        case api.CandidateRequest():
            logprobs = np.full(request.candidate_ids.shape, -3.0, np.float32)
            return wire.encode(api.CandidateReply(logprobs=logprobs, version=VERSION))


def answer_many(body: bytes) -> bytes:
    replies = map(answer, wire.decode(body, api.ManyRequest).requests)
    return b"".join(
        api.frame(wire.encode(api.ManyReply(index=index, reply=msgspec.Raw(reply))))
        for index, reply in enumerate(replies)
    )


class Connection(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end].lower()
            length = int(head[head.index(b"content-length:") + 15 :].split(b"\r\n", 1)[0])
            start = end + 4
            if len(self._received) < start + length:
                return
            path, body = self._received.split(b" ", 2)[1], self._received[start : start + length]
            self._received = self._received[start + length :]
            reply = answer_many(body) if path == MANY else answer(wire.decode(body, api.EngineRequest))
            header = f"HTTP/1.1 200 OK\r\ncontent-type: {api.CONTENT_TYPE}\r\ncontent-length: {len(reply)}\r\n\r\n"
            self._transport.write(header.encode() + reply)  # type: ignore[attr-defined]


async def main(path: str) -> None:
    server = await asyncio.get_running_loop().create_unix_server(Connection, path, backlog=4096)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
