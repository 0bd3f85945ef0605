"""Stands in for SGLang: answers with replies that were recorded from 0.5.23."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spot_async.backends.sglang.backend import SglangBackend
from spot_async.backends.shared.request_limits import RequestLimits
from spot_async.backends.shared.weight_transport import Tensor
from spot_async.types import Capabilities, WeightVersion

RECORDED = Path(__file__).parents[1] / "recorded" / "sglang_0.5.23" / "replies.json"
V0, V1 = WeightVersion(0, 0), WeightVersion(0, 1)
VOCAB = 512
PROMPT = np.array([263, 301, 88, 17, 402], np.int32)
RESPONSE = np.array([511, 88, 83, 300, 511], np.int32)  # 511 is the last token of the vocabulary


def recorded(name: str) -> Any:
    return json.loads(RECORDED.read_text())[name]["reply"]


def recorded_bytes(name: str) -> bytes:
    return json.dumps(recorded(name)).encode()


@dataclass
class StandIn:
    """Answers each path with the next of a list of (status, body), whose last one repeats. Notes what it was asked."""

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


@asynccontextmanager
async def connected(
    model: Path, tmp_path: Path, *, generation_temperature: Any = "request", **replies: Any
) -> AsyncIterator[tuple[SglangBackend, StandIn]]:
    """Enter a backend that has just started, and its stand-in."""
    stand_in = StandIn({f"/{path}": answers for path, answers in replies.items()})
    server = await asyncio.start_server(stand_in.serve, "127.0.0.1", 0)
    settings = SglangBackend.Settings(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    backend = SglangBackend(settings, role="student", model=str(model), run_directory=tmp_path)
    backend._capabilities = Capabilities(
        model="m", vocab_size=VOCAB, vocab_fingerprint="", max_context_tokens=100, max_top_k=VOCAB,
        exact_entropy=False, candidate_logprobs="single", weight_update=True,
        generation_temperature=generation_temperature,
    )  # fmt: skip
    backend._limits = RequestLimits("student", VOCAB, 100, VOCAB, "--context-length")
    with closing(server):
        async with backend._server:
            yield backend, stand_in


class Sender:
    """A sending process that always succeeds."""

    async def start(self, *, deadline: float) -> int:
        return 1234

    async def stop(self) -> None: ...

    async def join(self, group: str, *, world_size: int, deadline: float) -> None: ...

    async def broadcast(self, directory: str, tensors: list[Tensor], *, deadline: float) -> None: ...
