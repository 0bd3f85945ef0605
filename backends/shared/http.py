"""Sends HTTP requests for backends, with absolute deadlines, and turns failures into `spot_async.errors`.

It knows no server's API. A backend gives paths and bodies, and may reword its server's errors. Callers act on the class
of an error, so every exception from below becomes exactly one of the request errors (`failures.py` says which), with
what was sent and what came back.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import contextvars
import functools
import hashlib
import io
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp
import httpx
from aiohttp.client_proto import ResponseHandler

from spot_async.base.secrets import SECRETS
from spot_async.base.tasks import Opened
from spot_async.errors import Exchange, PoisonedReplyError, RequestError, ServerRestartedError, TransientError
from spot_async.types import Traffic

from .bodies import ANSWER_BYTES, ERROR_BYTES, BadBodyError, header, parts_of, stated_length
from .connection import secret_parts
from .excerpts import UNREADABLE, excerpt, shortened
from .failures import UNKNOWN_ACCESS, Access, FailedReply, classify

CLOSED = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)  # an open connection was closed
LONG_BODY_BYTES = 1 << 18
LONG_BODIES_AT_ONCE = 2
UNREAD_BYTES = 1 << 16  # buffered per connection, about; beyond this the server has to wait
IDLE_S = 4.0  # after which a connection is not used again; servers close one that waits, uvicorn after 5 seconds
READ_BYTES = 1 << 15  # read from a connection at a time; the event loop waits until it is parsed
MOST_HEADS = 16  # unread heads of replies on a connection: the reply's, and what a server may send before it
DIGEST_HEADER = "Content-Digest"  # RFC 9530
SHA_256 = re.compile(r"\bsha-256=:([A-Za-z0-9+/]{43}=):")

_was_open: contextvars.ContextVar[bool] = contextvars.ContextVar("was_open")  # the connection of this task's request

ReadError = Callable[[int, bytes], RequestError | None]


@dataclass(frozen=True)
class Route:
    """How a server is reached: by TCP, or by a Unix socket (`uds`). `verify` is aiohttp's, and `proxy` httpx's."""

    uds: str | None = None
    verify: ssl.SSLContext | bool = True
    proxy: httpx.Proxy | None = None
    access: Access = UNKNOWN_ACCESS  # what advice in errors is based on
    # Whether connections serve several requests. A second reply to one request would be taken for the next one's.
    keeps_open: bool = True


class _Question(NamedTuple):
    """A request as callers give it."""

    method: str
    path: str
    body: bytes | None = None
    content_type: str | None = None


class HttpEndpoint(Opened):
    """A connection pool to one server, over TCP or a Unix socket. Enter it before use.

    The number of connections is not limited here, because stages decide how many requests are in flight. aiohttp's
    redirects, cookies, time-outs and inflating are switched off: nobody wants the first two here, and the others are
    bounded by deadlines and `bodies.py`.

    The key, the secret headers' values and the proxy's password appear in no error. They are replaced even where the
    server repeats them.
    """

    def __init__(
        self,
        name: str,
        base_url: str,
        *,
        route: Route = Route(),
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        secret_headers: Mapping[str, str] | None = None,
        read_error: ReadError | None = None,
    ) -> None:
        proxy = route.proxy
        self.name = name
        self.traffic = Traffic()
        self._read_error = read_error
        self._access = route.access
        # A proxy may answer in the server's place, so whatever cannot be the server's own words names it.
        self.through = "" if proxy is None else f"; asked through the proxy {_place(proxy.url)}: see NO_PROXY"
        self._base_url = base_url.rstrip("/")
        self._route = route
        is_replaced = "authorization" in map(str.lower, secret_headers or {})
        authorization = {"Authorization": f"Bearer {api_key}"} if api_key and not is_replaced else {}
        accepted = {"Accept-Encoding": "gzip, deflate"}  # the encodings that `bodies.py` decodes
        # A proxy reads the password in the request itself, or if that is encrypted, in the request for a tunnel.
        password = base64.b64encode(b":".join(proxy.raw_auth)).decode() if proxy and proxy.raw_auth else None
        to_proxy = {"Proxy-Authorization": f"Basic {password}"} if password is not None else {}
        forwarded, self._of_tunnel = ({}, to_proxy) if base_url.lower().startswith("https:") else (to_proxy, {})
        self.headers = {**accepted, **forwarded, **authorization, **(headers or {}), **(secret_headers or {})}
        sent = [part for value in (secret_headers or {}).values() for part in secret_parts(value)]
        secrets = [each for each in (api_key, *sent, *(proxy.raw_auth or () if proxy else ())) if each]
        for each in secrets:
            SECRETS.learn(each)
        self._secrets = [each.encode() if isinstance(each, str) else each for each in secrets]
        self._long_bodies = asyncio.Semaphore(LONG_BODIES_AT_ONCE)
        self._has_answered = False

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        self._session = await stack.enter_async_context(_session(self._route))

    async def get(self, path: str, *, deadline: float) -> bytes:
        with io.BytesIO() as received:
            async with contextlib.AsyncExitStack() as turn:
                await self._request(_Question("GET", path), deadline, received.write, turn=turn)
                return received.getvalue()

    async def post(
        self,
        path: str,
        body: bytes,
        *,
        content_type: str,
        deadline: float,
        resend: bool = True,
        largest: int = ANSWER_BYTES,
        turn: contextlib.AsyncExitStack | None = None,
    ) -> bytes:
        """Return the reply's body. Raises a `RequestError` for any other outcome.

        `deadline` is on the loop's clock. `resend=False` is for requests that must not reach the server twice (see
        `_respond`). A reply of more than `largest` bytes is refused. Only a few long replies are read at a time, or
        they would hold up the event loop: give a `turn` to hold the reply's place in it until it has been read.
        """
        question = _Question("POST", path, body, content_type)
        # The buffer is closed in any case, because the traces of errors refer to it and live long.
        with io.BytesIO() as received:
            async with contextlib.AsyncExitStack() if turn is None else contextlib.nullcontext(turn) as held:
                await self._request(question, deadline, received.write, resend=resend, largest=largest, turn=held)
                return received.getvalue()

    async def stream(
        self, path: str, body: bytes, sink: Callable[[bytes], None], *, content_type: str, deadline: float, largest: int
    ) -> None:
        """Do as `post`, but give the reply's body to `sink` part by part as it comes."""
        await self._request(_Question("POST", path, body, content_type), deadline, sink, largest=largest)

    async def _request(
        self,
        question: _Question,
        deadline: float,
        sink: Callable[[bytes], object],
        *,
        resend: bool = True,
        largest: int = ANSWER_BYTES,
        turn: contextlib.AsyncExitStack | None = None,
    ) -> None:
        if self._session.closed:  # for example, a lost replica is being entered again; another replica may answer
            raise TransientError(f"{self.name}{question.path}: the connection to this server was closed")
        self.traffic.requests += 1
        self.traffic.sent_bytes += len(question.body or b"")
        status: int | None = None
        try:
            async with asyncio.timeout_at(deadline):
                async with await self._respond(question, resend=resend) as response:
                    status, self._has_answered = response.status, True
                    try:
                        if 200 <= status < 300:
                            return await self._receive(response, sink, largest, turn)
                        content = await _refusal(response)
                    finally:
                        self.traffic.received_bytes += response.content.total_bytes
        except (BadBodyError, TimeoutError, aiohttp.ClientError, OSError) as failure:
            raise self._failed(question, failure, status) from None
        # Before anything is made of the content: servers may repeat the key that they were sent.
        content = self._redacted(content)
        headers = {name.lower(): header(response, name) for name in response.headers}
        raise self._failed(question, FailedReply(status, content, headers), status, content)

    @contextlib.contextmanager
    def reading(self, method: str, path: str, sent: bytes | None, reply: bytes | bytearray) -> Iterator[None]:
        """Turn errors of reading a reply into request errors that name the server and have the exchange."""
        try:
            yield
        except RequestError as failure:
            raise self._failed(_Question(method, path, sent), failure, received=bytes(reply)) from None
        except UNREADABLE as failure:
            raise self._failed(_Question(method, path, sent), failure, received=bytes(reply)) from failure

    def _failed(
        self, question: _Question, failure: FailedReply | Exception, status: int | None = 200, received: bytes = b""
    ) -> RequestError:
        """Return the error of a request that failed, or whose reply cannot be read, with the exchange.

        Raise it directly. In a variable the error and its trace would refer to each other, and would keep a whole reply
        in memory until the next garbage collection.
        """
        error = self._error_of(f"{self.name}{question.path}", failure)
        error.exchange = self.exchange(question.method, question.path, question.body, status=status, received=received)
        return error

    def _error_of(self, request: str, failure: FailedReply | Exception) -> RequestError:
        if isinstance(failure, RequestError):  # some name the server already
            is_nameless = isinstance(failure, PoisonedReplyError | TransientError) and not isinstance(
                failure, ServerRestartedError
            )
            return failure.reworded(f"{request}: {failure}") if is_nameless else failure
        if isinstance(failure, BadBodyError):
            return PoisonedReplyError(f"{request}: cannot read the reply: {failure}")
        if isinstance(failure, FailedReply) and self._read_error is not None:
            own = self._read_error(failure.status, failure.body)
            if own is not None:
                return own
        found = classify(request, failure, has_answered=self._has_answered, now_s=time.time(), access=self._access)
        # Advice names headers, in which a server may send any bytes.
        words = self._redacted(f"{found}{self.through}".encode(errors="replace")).decode(errors="replace")
        return found.reworded(words)

    def exchange(
        self, method: str, path: str, body: bytes | None, *, status: int | None = 200, received: bytes = b""
    ) -> Exchange:
        """Return what people see of a failed request and its reply."""
        return Exchange(
            endpoint=self._base_url if self._route.uds is None else f"unix:{self._route.uds}",
            method=method,
            path=path,
            sent_bytes=len(body or b""),
            sent=shortened(self._redacted(body or b"")),
            status=status,
            received=excerpt(self._redacted(received[:ERROR_BYTES])),
        )

    def _redacted(self, said: bytes) -> bytes:
        return SECRETS.struck(said, self._secrets)

    async def _receive(
        self,
        response: aiohttp.ClientResponse,
        sink: Callable[[bytes], object],
        largest: int,
        turn: contextlib.AsyncExitStack | None,
    ) -> None:
        """Give the body to `sink`. Once it turns out to be long, `turn` has one of the few places for such.

        Raises `BadBodyError` if it is too large, cannot be inflated, or does not match the digest that the server
        stated.
        """
        # The digest is of the encoded body, and parts come inflated, so it is compared only if nothing was encoded.
        encoded = "Content-Encoding" in response.headers
        stated = None if encoded else _stated_digest(header(response, DIGEST_HEADER))
        digest = hashlib.sha256()
        length, received = stated_length(response), 0
        if length > largest:
            raise _too_large(largest)
        async for part in parts_of(response):
            received += len(part)
            if received > largest:
                raise _too_large(largest)
            if turn is not None and max(length, received) > LONG_BODY_BYTES:
                await turn.enter_async_context(self._long_bodies)
                turn = None
            sink(part)
            if stated is not None:
                digest.update(part)
        if stated not in (None, digest.digest()):
            raise BadBodyError("it changed on its way")

    async def _respond(self, question: _Question, *, resend: bool) -> aiohttp.ClientResponse:
        """Return the reply's head. If a connection that was open before closes instead, send the request again at once.

        Servers close idle connections, and some close one after an error. A request on such a connection fails unread,
        so it is no failed attempt. One on a new connection is. Requests with `resend=False` are not sent again. To send
        any other twice does no harm.
        """
        method, path, body, content_type = question
        send = functools.partial(
            self._session.request,
            method,
            self._base_url + path,
            data=body or None,
            headers=self.headers if content_type is None else {**self.headers, "Content-Type": content_type},
            proxy_headers=self._of_tunnel,
            allow_redirects=False,
        )
        _was_open.set(False)
        try:
            return await send()
        except CLOSED:
            if not resend or self._session.closed or not _was_open.get():
                raise
        return await send()


def _place(url: httpx.URL) -> str:
    return f"{url.host}:{url.port or {'http': 80, 'https': 443}[url.scheme]}"


def _session(route: Route) -> aiohttp.ClientSession:
    kept: dict[str, Any] = {"keepalive_timeout": IDLE_S} if route.keeps_open else {"force_close": True}
    if route.uds:
        connector: aiohttp.BaseConnector = aiohttp.UnixConnector(route.uds, limit=0, **kept)
    else:
        connector = aiohttp.TCPConnector(limit=0, ssl=route.verify, **kept)
    connector._factory = functools.partial(_Connection, asyncio.get_running_loop())  # type: ignore[assignment]
    return aiohttp.ClientSession(
        connector=connector,
        proxy=None if route.proxy is None else str(route.proxy.url),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(),
        auto_decompress=False,
        read_bufsize=UNREAD_BYTES,
    )


def _stated_digest(said: str) -> bytes | None:
    """Return the SHA-256 that a server states for its reply; None if it states none."""
    stated = SHA_256.search(said)
    return base64.b64decode(stated[1]) if stated else None


def _too_large(largest: int) -> BadBodyError:
    return BadBodyError(f"it is larger than the {largest:,} bytes that an answer to this request may have")


async def _refusal(response: aiohttp.ClientResponse) -> bytes:
    """Return the beginning of a refusal's body, up to where it is damaged. The status alone would be enough."""
    content = bytearray()
    try:
        async for part in parts_of(response):
            content += part
            if len(content) >= ERROR_BYTES:
                break
    except BadBodyError:
        pass
    return bytes(content[:ERROR_BYTES])


class _Connection(ResponseHandler):
    """A connection that is aborted if the server sends replies that nobody asked for, such as endless `100 Continue`.

    aiohttp would parse and keep them all, even on a connection that waits for its next request.
    """

    _has_served = False

    def set_response_params(self, **params: Any) -> None:
        """Prepare for a reply. The task that sends its request calls this, and learns whether there was one before."""
        _was_open.set(self._has_served)
        self._has_served = True
        super().set_response_params(**params)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # asyncio's transport without TLS reads 256 KiB at a time, which takes 0.2 s in chunks of one byte.
        if hasattr(transport, "max_size"):
            transport.max_size = READ_BYTES

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if len(self._buffer) > MOST_HEADS and self.transport is not None:
            self._buffer.clear()
            self.set_exception(aiohttp.ClientPayloadError("the server sent more replies than it was sent requests"))
            self.transport.abort()
