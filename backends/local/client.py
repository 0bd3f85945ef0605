"""Sends requests to one of our own servers, and turns its replies and refusals into values and errors."""

from __future__ import annotations

import asyncio
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from spot_async import errors
from spot_async.base import wire
from spot_async.errors import ConfigError, PermanentError, PoisonedReplyError, RequestError
from spot_async.serving import api
from spot_async.types import WeightSnapshot

from ..shared.bodies import ANSWER_BYTES, largest_reply_bytes, read_aside
from ..shared.connection import proxy_for
from ..shared.excerpts import UNREADABLE
from ..shared.failures import FailedReply, classify
from ..shared.http import HttpEndpoint, Route
from .server import Address

NOT_FOUND = 404

T = TypeVar("T")


class LocalClient:
    """The client of one server. It asks over `endpoint`, which is there once the server is. An `AdapterServer`.

    It knows no backend: what refers to each other stays in memory long after its server was lost.
    """

    def __init__(self, name: str, section: str) -> None:
        self.name = name
        self._section = section  # the settings' place in the configuration, for errors
        self.endpoint: HttpEndpoint

    def connection(self, address: Address, headers: Mapping[str, str], *, by_proxy: bool) -> HttpEndpoint:
        """Return a connection pool to the server, to be entered. `by_proxy`: the environment's proxy may be used."""
        token = address.credentials.update_token
        return HttpEndpoint(
            self.name,
            address.url,
            route=Route(address.uds, proxy=proxy_for(f"{self.name}.backend", address.url, None) if by_proxy else None),
            api_key=address.credentials.api_key,
            headers=headers,
            secret_headers={api.UPDATE_TOKEN_HEADER: token} if token is not None else None,
            read_error=functools.partial(read_error, self.name),
        )

    async def get(self, path: str, kind: type[T], *, deadline: float) -> T:
        return await get(self.endpoint, path, kind, deadline=deadline)

    async def post(
        self,
        path: str,
        request: msgspec.Struct,
        kind: type[T],
        check: Callable[[T], T],
        deadline: float,
        largest: int = ANSWER_BYTES,
        *,
        resend: bool = True,
    ) -> T:
        """Send a request and return what `check` makes of its reply. A large reply is read and checked in a thread."""
        sent = wire.encode(request)
        with self.endpoint.turn() as turn:
            reply = await self.endpoint.post(
                path,
                sent,
                content_type=api.CONTENT_TYPE,
                deadline=deadline,
                resend=resend,
                largest=largest,
                turn=turn,
            )
            with self.endpoint.reading("POST", path, sent, reply):
                return await read_aside(reply, lambda body: check(wire.decode(body, kind)))

    async def load(self, name: str, adapter: WeightSnapshot, *, deadline: float) -> None:
        request = api.LoadRequest(name=name, snapshot=adapter, timeout_s=time_left(deadline))
        try:
            await self.post(api.LOAD_ADAPTER, request, api.VersionReply, _as_it_is, deadline, resend=False)
        except PermanentError as error:
            if error.exchange is None or error.exchange.status != NOT_FOUND:
                raise
            raise ConfigError(
                f"{self._section}: the server takes no adapters: start it with this version of spot-async"
            ) from None

    async def unload(self, name: str, *, deadline: float) -> None:
        request = api.UnloadRequest(name=name, timeout_s=time_left(deadline))
        await self.post(api.UNLOAD_ADAPTER, request, api.VersionReply, _as_it_is, deadline, resend=False)

    def has_lost(self, refusal: PermanentError) -> bool:
        """Return no: our own server says `ServerRestartedError`."""
        return False


async def get(endpoint: HttpEndpoint, path: str, kind: type[T], *, deadline: float) -> T:
    reply = await endpoint.get(path, deadline=deadline)
    with endpoint.reading("GET", path, None, reply):
        return wire.decode(reply, kind)


def _as_it_is(reply: T) -> T:
    return reply


def read_error(name: str, status: int, body: bytes) -> RequestError | None:
    """Return the error that the server named. None if the body is not the server's own, but a proxy's.

    With the name given, this is a `http.ReadError`.
    """
    try:
        reply = wire.decode(body, api.ErrorReply)
    except UNREADABLE:
        return None
    said = FailedReply(status, reply.message.encode())
    return error_of(name, reply) or classify(name, said).reworded(f"{name}: {reply.message}")


def error_of(name: str, reply: api.ErrorReply | None) -> RequestError | None:
    """Return the error that the server named; None if it is not a `RequestError`."""
    kind: Any = getattr(errors, reply.error, None) if reply is not None else None
    if reply is None or not (isinstance(kind, type) and issubclass(kind, RequestError)):
        return None
    return kind(f"{name}: {reply.message}")


def largest_generation(request: api.GenerateRequest) -> int:
    """Return how many bytes the reply can have."""
    tokens = request.sampling.max_tokens
    return largest_reply_bytes(tokens, tokens * (1 + request.top_k))


def take_frames(received: bytearray) -> Iterator[bytes]:
    """Cut whole frames off the front of `received` and yield them."""
    header = api.FRAME_HEADER
    while len(received) >= header.size:
        length, checksum = header.unpack_from(received)
        end = header.size + length
        if len(received) < end:
            return
        frame = bytes(memoryview(received)[header.size : end])
        if zlib.crc32(frame) != checksum:
            raise PoisonedReplyError("a reply changed on its way")
        yield frame
        del received[:end]


def time_left(deadline: float) -> float:
    """Return the seconds until a deadline on the running loop's clock."""
    return max(0.0, deadline - asyncio.get_running_loop().time())
