"""One of our own servers: sends it requests, and turns its replies and refusals into values and errors."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from spot_async import errors
from spot_async.base import wire
from spot_async.errors import ConfigError, PermanentError, PoisonedReplyError, RequestError
from spot_async.serving import api
from spot_async.serving.api import Credentials
from spot_async.types import WeightSnapshot

from ..shared.bodies import ANSWER_BYTES, read_aside
from ..shared.connection import proxy_for, tls_context
from ..shared.excerpts import UNREADABLE
from ..shared.failures import FailedReply, classify
from ..shared.http import HttpEndpoint, Route
from ..shared.launch import LaunchedServer
from ..shared.launch_settings import ProcessSettings
from ..shared.remote import Server
from .settings import LocalSettings, local_command

NOT_FOUND = 404

T = TypeVar("T")


class LocalServer(Server):
    """One of our own servers, asked in msgpack. An `AdapterServer`.

    It knows no backend: what refers to each other stays in memory long after its server was lost.
    """

    def __init__(self, settings: LocalSettings, *, role: str, model: str, run_directory: Path) -> None:
        section = f"{role}.backend" if settings.launch is None else f"{role}.backend.launch"
        super().__init__(settings.where, settings.assignment(role, section, Path(model), run_directory), api.HEALTH)
        self._settings = settings
        self.credentials = Credentials.of_environment() if settings.is_attached else Credentials.of_new_server()

    def _launch(self, settings: ProcessSettings) -> LaunchedServer:
        command = functools.partial(local_command, settings=self._settings, credentials=self.credentials)
        return LaunchedServer(settings, self._assignment, command, key=self.credentials.api_key)

    def connection(self, headers: Mapping[str, str]) -> HttpEndpoint:
        section, token, launched = f"{self.name}.backend", self.credentials.update_token, self._launched
        return HttpEndpoint(
            self.name,
            self.url,
            route=Route(verify=tls_context(section, None), proxy=proxy_for(section, self.url, None))
            if launched is None
            else Route(launched.uds),
            api_key=self.credentials.api_key,
            headers=headers,
            secret_headers={api.UPDATE_TOKEN_HEADER: token} if token is not None else None,
            read_error=functools.partial(read_error, self.name),
        )

    def _decoded(self, reply: bytes, kind: type[T]) -> T:
        return wire.decode(reply, kind)

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
        async with contextlib.AsyncExitStack() as turn:
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
            await self.post(api.LOAD_ADAPTER, request, api.VersionReply, lambda reply: reply, deadline, resend=False)
        except PermanentError as error:
            if error.exchange is None or error.exchange.status != NOT_FOUND:
                raise
            raise ConfigError(
                f"{self.section}: the server takes no adapters: start it with this version of spot-async"
            ) from None

    async def unload(self, name: str, *, deadline: float) -> None:
        request = api.UnloadRequest(name=name, timeout_s=time_left(deadline))
        await self.post(api.UNLOAD_ADAPTER, request, api.VersionReply, lambda reply: reply, deadline, resend=False)

    def has_lost(self, refusal: PermanentError) -> bool:
        """Return no: our own server says `ServerRestartedError`."""
        return False


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
