"""A server that costs next to nothing: answers every path with a reply made beforehand, on a Unix socket.

    python benchmarks/stub_server.py SOCKET

For measuring clients. Understands just enough HTTP/1.1 for them: keep-alive and Content-Length.
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from spot_async import wire
from spot_async.serving import api
from spot_async.types import Generation, TokenScores, VersionSpan, WeightVersion

TOKENS = 8
TOP_K = 16
VERSION = WeightVersion(0, 0)


def generation(tokens: int = TOKENS) -> Generation:
    return Generation(
        token_ids=np.arange(2, 2 + tokens, dtype=np.int32),
        logprobs=np.full(tokens, -1.0, np.float32),
        finish_reason="length",
        version_spans=(VersionSpan(0, tokens, VERSION),),
    )


def scores(tokens: int = TOKENS) -> TokenScores:
    return TokenScores(
        logprobs=np.full(tokens, -1.0, np.float32),
        topk_ids=np.tile(np.arange(TOP_K, dtype=np.int32), (tokens, 1)),
        topk_logprobs=np.tile(-1.0 - np.arange(TOP_K, dtype=np.float32), (tokens, 1)),
        entropy=np.linspace(0.1, 1.0, tokens, dtype=np.float32),
        entropy_lower=np.linspace(0.1, 1.0, tokens, dtype=np.float32),
        entropy_upper=np.linspace(0.1, 1.0, tokens, dtype=np.float32),
        version=VERSION,
    )


def _response(message: object) -> bytes:
    body = wire.encode(message)
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {api.CONTENT_TYPE}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class _Connection(asyncio.Protocol):
    replies: dict[bytes, bytes]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end].lower()
            start = head.find(b"content-length:")
            length = int(head[start + 15 :].split(b"\r\n", 1)[0]) if start >= 0 else 0
            if len(self._received) < end + 4 + length:
                return
            path = self._received.split(b" ", 2)[1]
            self._received = self._received[end + 4 + length :]
            self._transport.write(self.replies[path])  # type: ignore[attr-defined]


async def main(path: str) -> None:
    _Connection.replies = {
        api.GENERATE.encode(): _response(generation()),
        api.SCORE.encode(): _response(scores()),
    }
    server = await asyncio.get_running_loop().create_unix_server(_Connection, path, backlog=4096)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
