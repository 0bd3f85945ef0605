"""Runs a proxy before a server, with the faults of networks, gateways and broken servers, for tests and drills.

It speaks just enough HTTP/1.1: one request with its Content-Length and one whole reply per connection. A plan decides
which request meets which fault. Numbers are spoilt as a broken server would do it, with a digest of the reply that is
right for them. Damage on the way leaves the digest wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, Self

import msgspec


class Fault(StrEnum):
    """What happens to one request."""

    CUT = "cut"  # the reply ends in its middle
    CORRUPT = "corrupt"  # some bits of the reply are flipped
    GARBLE = "garble"  # a block of the reply is noise
    NAN = "nan"  # a number in the reply is NaN
    DUPLICATE = "duplicate"  # the reply has a row twice
    STALE = "stale"  # the reply names weights of another version
    STORM = "storm"  # 429 with Retry-After, for every request in the next while
    GATEWAY = "gateway"  # 502 with a page for people
    ERROR = "error"  # 500
    SLOW = "slow"  # the reply comes byte by byte, slowly
    RESET = "reset"  # the connection breaks
    HANG = "hang"  # the reply never comes


Plan = Callable[[int, str], Fault | str | None]  # from the number of requests before, and the path
NOT_ASKED = ("/health", "/capabilities", "/stats", "/update_weights")
GARBLED_BYTES = 64
PAGE = b"<html><body><h1>502 Bad Gateway</h1></body></html>"


def seeded(share: float, faults: list[Fault], seed: int) -> Plan:
    """Return a plan in which a `share` of the requests for a model's work meets one of the faults."""

    def plan(number: int, path: str) -> Fault | None:
        draw = random.Random(f"{seed}:{number}")
        return draw.choice(faults) if path not in NOT_ASKED and draw.random() < share else None

    return plan


@dataclass
class FaultyProxy:
    """A proxy to `upstream` (host and port of the server). Enter it; `url` is where it listens."""

    upstream: tuple[str, int]
    plan: Plan = lambda number, path: None
    storm_s: float = 0.5
    byte_s: float = 1.0  # seconds per byte of a slow reply
    met: Counter[Fault] = field(default_factory=Counter)
    requests: int = 0
    url: str = ""
    _calm_at_s: float = 0.0
    _server: asyncio.Server | None = None
    _serving: set[asyncio.Task[None]] = field(default_factory=set)  # the loop keeps only weak references to tasks

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        # The end of the proxy cancels it, which asyncio's streams would print.
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            request, path = await _read_request(reader)
            number, self.requests = self.requests, self.requests + 1
            planned = Fault.STORM if self._is_stormy and path not in NOT_ASKED else self.plan(number, path)
            fault = None if planned is None else Fault(planned)
            if fault is not None:
                self.met[fault] += 1
            await self._answer(fault, request, writer)
        writer.close()

    @property
    def _is_stormy(self) -> bool:
        return asyncio.get_running_loop().time() < self._calm_at_s

    async def _answer(self, fault: Fault | None, request: bytes, writer: asyncio.StreamWriter) -> None:
        match fault:
            case Fault.RESET:
                _reset(writer)
            case Fault.STORM:
                if not self._is_stormy:
                    self._calm_at_s = asyncio.get_running_loop().time() + self.storm_s
                await _send(writer, _reply("429 Too Many", b"slow down", {"Retry-After": f"{self.storm_s:g}"}))
            case Fault.GATEWAY:
                await _send(writer, _reply("502 Bad Gateway", PAGE, {"Content-Type": "text/html"}))
            case Fault.HANG:
                await asyncio.Event().wait()
            case Fault.ERROR:
                await _send(writer, _reply("500 Error", b"Internal Server Error", {}))
            case _:
                head, body = _split(await self._ask(request))
                await self._spoil(fault, head, body, writer)

    async def _ask(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*self.upstream)
        try:
            writer.write(request)
            return await reader.read()
        finally:
            writer.close()

    async def _spoil(self, fault: Fault | None, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        match fault:
            case Fault.CUT:
                await _send(writer, head + body[: len(body) // 2])
            case Fault.CORRUPT:
                await _send(writer, head + corrupted(body, self.requests))
            case Fault.GARBLE:
                await _send(writer, head + garbled(body, self.requests))
            case Fault.SLOW:
                for at in range(len(head + body)):
                    await _send(writer, (head + body)[at : at + 1])
                    await asyncio.sleep(self.byte_s)
            case Fault.NAN | Fault.DUPLICATE | Fault.STALE if _is_whole(head):
                status = head.split(b"\r\n", 1)[0].split(b" ", 1)[1].decode()
                kind = re.search(rb"(?i)content-type: *([^\r]+)", head)
                names = {"Content-Type": kind[1].decode()} if kind else {}
                await _send(writer, _reply(status, spoilt(fault, body), names))
            case _:
                await _send(writer, head + body)


def corrupted(body: bytes, seed: int) -> bytes:
    draw, data = random.Random(seed), bytearray(body)
    for _ in range(3):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


def garbled(body: bytes, seed: int) -> bytes:
    draw = random.Random(seed)
    at = draw.randrange(max(1, len(body) - GARBLED_BYTES))
    noise = draw.randbytes(min(GARBLED_BYTES, len(body)))
    return body[:at] + noise + body[at + len(noise) :]


def spoilt(fault: Fault, body: bytes) -> bytes:
    """Return a reply, JSON or msgpack, with a fault in what it says."""
    try:
        return json.dumps(_spoilt(fault, json.loads(body))).encode()
    except ValueError:
        return msgspec.msgpack.encode(_spoilt(fault, msgspec.msgpack.decode(body)))


def _spoilt(fault: Fault, tree: Any) -> Any:
    """Spoil the first array or list of numbers that the fault can be in."""
    done = False

    def walk(node: Any) -> Any:
        nonlocal done
        match node:
            case ["<f4", shape, bytes() as data] if not done and len(data) >= 8:
                if fault is Fault.NAN:
                    done = True
                    return ["<f4", shape, struct.pack("<f", float("nan")) + data[4:]]
                if fault is Fault.DUPLICATE:
                    done = True
                    return ["<f4", [shape[0] + 1, *shape[1:]], data + data[: len(data) // shape[0]]]
            case [float(), *rest] if not done and fault in (Fault.NAN, Fault.DUPLICATE):
                done = True
                return [None, *rest] if fault is Fault.NAN else [node[0], *node]
            case {"logprob": float()} if not done and fault is Fault.NAN:
                done = True
                return {**node, "logprob": None}
            case [{"logprob": float()}, *_] | [None, dict(), *_] if not done and fault is Fault.DUPLICATE:
                done = True
                return [node[0], *node]
            case [int(start), int(end), [int(lineage), int(step)], *rest] if fault is Fault.STALE:
                return [start, end, [lineage, step + 7], *rest]
            case str() if fault is Fault.STALE and re.fullmatch(r"\d+\.\d+", node):
                return f"{node}7"
            case list():
                return [walk(each) for each in node]
            case dict():
                return {name: walk(each) for name, each in node.items()}
        return node

    return walk(tree)


async def _read_request(reader: asyncio.StreamReader) -> tuple[bytes, str]:
    """Return the request, with a header that closes the connection after it, and its path."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    body = await reader.readexactly(int(length[1])) if length else b""
    head = re.sub(rb"(?i)\r\nconnection:[^\r]*", b"", head)
    path = head.split(b" ", 2)[1].decode()
    return head[:-4] + b"\r\nConnection: close\r\n\r\n" + body, path.partition("?")[0]


def _split(reply: bytes) -> tuple[bytes, bytes]:
    head, _, body = reply.partition(b"\r\n\r\n")
    return head + b"\r\n\r\n", body


def _is_whole(head: bytes) -> bool:
    """Whether the body is plain, and not chunked."""
    return b"chunked" not in head.lower() and b" 200 " in head


def _reply(status: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    lines = [f"{name}: {value}" for name, value in {**headers, "Content-Length": len(body)}.items()]
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "Connection: close", "", ""]).encode() + body


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
