"""One HTTP endpoint as backends use it: requests with absolute deadlines, failures as `spot_async.errors`.

Knows no server's dialect: a backend gives paths and bodies, and may put its server's errors into its own words.
What a request failed with decides what the caller does next, so every exception of the layers below is
turned into exactly one of the request errors (`failures.py` says which), with what was sent and what came back.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import io
import re
import ssl
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

import aiohttp
import httpx
from aiohttp.client_proto import ResponseHandler
from httpx_aiohttp import AiohttpTransport

from spot_async.errors import Exchange, PoisonedReplyError, RequestError, TransientError
from spot_async.types import Traffic

from .advice import Access
from .bodies import ANSWER_BYTES, ERROR_BYTES, BadBodyError, Turn, parts_of, stated_length
from .connection import secret_parts
from .exchange import excerpt, shortened
from .failures import UNKNOWN_ACCESS, FailedReply, classify

REDACTED = "***"
CLOSED = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)  # a connection that had been made was closed
LONG_BODY_BYTES = 1 << 18
LONG_BODIES_AT_ONCE = 2
UNREAD_BYTES = 1 << 16  # of a connection, about: then the server has to wait
READ_BYTES = 1 << 15  # of a connection at a time, all of which is parsed before the loop goes on
MOST_HEADS = 16  # of replies that nobody has read: one, and what a server may say before it
DIGEST_HEADER = "Content-Digest"  # RFC 9530
SHA_256 = re.compile(r"\bsha-256=:([A-Za-z0-9+/]{43}=):")

parsed_url = functools.lru_cache(maxsize=256)(httpx.URL)  # parsing is half of making a request, and there are few

ReadError = Callable[[int, bytes], RequestError | None]


class HttpEndpoint:
    """A connection pool to one server, over TCP or a Unix socket. Enter it before use.

    The number of connections is not limited here: how much is in flight is the stages' decision. Requests go to
    httpx's transport itself: redirects and cookies, which a client adds for half of a request's time, have no
    place between an orchestrator and its servers. `verify` and `proxy` are as httpx knows them, `access` is what advice
    in errors goes by.

    The key, the secret headers' values and the proxy's password appear in no error: a server that repeats
    them in what it says finds them replaced.
    """

    def __init__(
        self,
        name: str,
        base_url: str,
        *,
        uds: str | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        secret_headers: Mapping[str, str] | None = None,
        read_error: ReadError | None = None,
        verify: ssl.SSLContext | bool = True,
        proxy: httpx.Proxy | None = None,
        access: Access = UNKNOWN_ACCESS,
    ) -> None:
        self.name = name
        self.traffic = Traffic()
        self._read_error = read_error
        self._access = access
        self._base_url = base_url.rstrip("/")
        self._uds = uds
        is_replaced = "authorization" in map(str.lower, secret_headers or {})
        authorization = {"Authorization": f"Bearer {api_key}"} if api_key and not is_replaced else {}
        accepted = {"Accept-Encoding": "gzip, deflate"}  # what is decoded here
        self._headers = {**accepted, **authorization, **(headers or {}), **(secret_headers or {})}
        sent = [part for value in (secret_headers or {}).values() for part in secret_parts(value)]
        secrets = [api_key, *sent, *(proxy.raw_auth or () if proxy else ())]
        self._secrets = [each.encode() if isinstance(each, str) else each for each in secrets if each]

        def session() -> aiohttp.ClientSession:
            context = self._transport.ssl_context
            connector = aiohttp.UnixConnector(uds, limit=0) if uds else aiohttp.TCPConnector(limit=0, ssl=context)
            make: type[ResponseHandler] = _Connection
            connector._factory = functools.partial(make, asyncio.get_running_loop())
            no_cookies = aiohttp.DummyCookieJar()
            return aiohttp.ClientSession(connector=connector, cookie_jar=no_cookies, read_bufsize=UNREAD_BYTES)

        self._transport = AiohttpTransport(client=session, verify=verify, proxy=proxy)
        self._long_bodies = asyncio.Semaphore(LONG_BODIES_AT_ONCE)
        self._is_left = False
        self._has_answered = False

    async def __aenter__(self) -> Self:
        await self._transport.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_left = True
        await self._transport.__aexit__(kind, error, trace)

    def turn(self) -> Turn:
        """For a long reply: a few at a time come in and are read, so many in one turn of the loop would hold it up."""
        return Turn(self._long_bodies)

    async def get(self, path: str, *, deadline: float) -> bytes:
        with io.BytesIO() as received, self.turn() as turn:
            await self._request("GET", path, None, {}, deadline, received.write, turn=turn)
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
        turn: Turn | None = None,
    ) -> bytes:
        """The reply's body. `deadline` is on the loop's clock; raises a `RequestError` for any other outcome.

        `resend=False` is for what must not reach the server twice (see `_respond`). A reply of more than `largest`
        bytes is refused. Give a `turn` to hold it until a long reply has been read.
        """
        headers = {"Content-Type": content_type}
        # Closed whatever happens: the traces of errors, which hold what is here, live for long.
        with io.BytesIO() as received, self.turn() if turn is None else contextlib.nullcontext(turn) as held:
            await self._request(
                "POST", path, body, headers, deadline, received.write, resend=resend, largest=largest, turn=held
            )
            return received.getvalue()

    async def stream(
        self, path: str, body: bytes, sink: Callable[[bytes], None], *, content_type: str, deadline: float, largest: int
    ) -> None:
        """Like `post`, but hands the reply's body to `sink` part by part as it comes."""
        await self._request("POST", path, body, {"Content-Type": content_type}, deadline, sink, largest=largest)

    async def _request(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        deadline: float,
        sink: Callable[[bytes], object],
        *,
        resend: bool = True,
        largest: int = ANSWER_BYTES,
        turn: Turn | None = None,
    ) -> None:
        if self._is_left:  # by a replica's supervisor, for example: another replica may answer
            raise TransientError(f"{self.name}{path}: the connection to this server was closed")
        url = parsed_url(self._base_url + path)
        # As a stream: so httpx leaves Host and Content-Length to aiohttp, which adds them faster.
        stream = httpx.ByteStream(body or b"")
        request = httpx.Request(method, url, stream=stream, headers={**self._headers, **headers})
        request.read()
        self.traffic.requests += 1
        self.traffic.sent_bytes += len(body or b"")
        status: int | None = None
        try:
            async with asyncio.timeout_at(deadline):
                response = await self._respond(request, resend=resend)
                status, self._has_answered = response.status_code, True
                try:
                    if response.is_success:
                        return await self._receive(response, sink, largest, turn)
                    content = await _refusal(response)
                finally:
                    self.traffic.received_bytes += response.num_bytes_downloaded
                    await response.aclose()
        except BadBodyError as failure:
            poisoned = f"{self.name}{path}: cannot read the reply: {failure}"
            raise with_exchange(
                PoisonedReplyError(poisoned), self.exchange(method, path, body, status=status)
            ) from None
        except (TimeoutError, httpx.HTTPError, aiohttp.ClientError, OSError) as failure:
            found = classify(f"{self.name}{path}", failure, has_answered=self._has_answered, access=self._access)
            words = self._redacted(str(found).encode()).decode()
            raise with_exchange(found.reworded(words), self.exchange(method, path, body, status=status)) from None
        content = self._redacted(content)
        reply = FailedReply(response.status_code, content, dict(response.headers))
        own = self._read_error(reply.status, content) if self._read_error else None
        raise with_exchange(
            own or classify(f"{self.name}{path}", reply, now_s=time.time(), access=self._access),
            self.exchange(method, path, body, status=status, received=content),
        )

    def exchange(
        self, method: str, path: str, body: bytes | None, *, status: int | None = 200, received: bytes = b""
    ) -> Exchange:
        """What people see of a request that failed, and of its reply."""
        return Exchange(
            endpoint=self._base_url if self._uds is None else f"unix:{self._uds}",
            method=method,
            path=path,
            sent_bytes=len(body or b""),
            sent=shortened(self._redacted(body or b"")),
            status=status,
            received=excerpt(self._redacted(received[:ERROR_BYTES])),
        )

    def _redacted(self, said: bytes) -> bytes:
        for secret in self._secrets:
            said = said.replace(secret, REDACTED.encode())
        return said

    async def _receive(
        self, response: httpx.Response, sink: Callable[[bytes], object], largest: int, turn: Turn | None
    ) -> None:
        """Hand the body to `sink`. Raises `BadBodyError` for one that is too large, cannot be inflated, or is not what
        the server stated of it."""
        encoded = "Content-Encoding" in response.headers
        stated = None if encoded else _stated_digest(response.headers.get(DIGEST_HEADER))
        digest = hashlib.sha256()
        length, received = stated_length(response), 0
        if length > largest:
            raise _too_large(largest)
        if turn is not None and length > LONG_BODY_BYTES:
            await turn.take()
        async for part in parts_of(response):
            received += len(part)
            if received > largest:
                raise _too_large(largest)
            if turn is not None and received > LONG_BODY_BYTES:
                await turn.take()
            sink(part)
            if stated is not None:
                digest.update(part)
        if stated not in (None, digest.digest()):
            raise BadBodyError("it changed on its way")

    async def _respond(self, request: httpx.Request, *, resend: bool) -> httpx.Response:
        """The reply's head. Where the server closed the connection instead, the request goes out once more at once.

        Servers close idle connections, and some close one after an error: a request on it then fails unread.
        Asking twice does no harm, but where `resend` is False: nothing else that is sent adds to what was sent before.
        """
        try:
            response: httpx.Response = await self._transport.handle_async_request(request)
        except httpx.HTTPError as error:
            was_refused = isinstance(error.__cause__, aiohttp.ClientConnectorError)
            if not resend or self._is_left or was_refused or not isinstance(error.__cause__, CLOSED):
                raise
            response = await self._transport.handle_async_request(request)
        return response


def with_exchange(error: RequestError, exchange: Exchange) -> RequestError:
    """The error, which carries the exchange from now on.

    Raise it as it is returned: in a variable, it and its trace would hold each other, and a reply, until a collection.
    """
    error.exchange = exchange
    return error


def _stated_digest(header: str | None) -> bytes | None:
    """The SHA-256 that a server states of its reply; None where it states none."""
    stated = SHA_256.search(header or "")
    return base64.b64decode(stated[1]) if stated else None


def _too_large(largest: int) -> BadBodyError:
    return BadBodyError(f"it is larger than the {largest:,} bytes that an answer to this request may have")


async def _refusal(response: httpx.Response) -> bytes:
    """The head of a refusal's body, as far as it is what its headers say: the status tells enough."""
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
    """One on which a server cannot go on with replies that nobody asked for, such as `100 Continue` for ever.

    aiohttp parses and keeps them all, of a connection that waits for its next request too.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if hasattr(transport, "max_size"):  # asyncio's own, without TLS: 256 KiB, of which chunks of a byte take 0.2 s
            transport.max_size = READ_BYTES

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if len(self._buffer) > MOST_HEADS and self.transport is not None:
            self._buffer.clear()
            self.set_exception(aiohttp.ClientPayloadError("the server sent more replies than it was sent requests"))
            self.transport.abort()
