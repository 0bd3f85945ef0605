"""One HTTP endpoint as backends use it: requests with absolute deadlines, failures as `spot_async.errors`.

Knows no server's dialect: a backend gives paths and bodies, and may read its server's error bodies itself.
What a request failed with decides what the caller does next, so every exception of the layers below is
turned into exactly one of the request errors here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self

import aiohttp
import httpx
import msgspec
from httpx_aiohttp import AiohttpTransport

from spot_async.errors import (
    DeadlineExceededError,
    PermanentError,
    RequestError,
    ThrottledError,
    TransientError,
)
from spot_async.types import Traffic

ERROR_EXCERPT_CHARACTERS = 300
REDACTED = "***"
CLOSED = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)  # of a connection that was there
LONG_BODY_BYTES = 1 << 20
LONG_BODIES_AT_ONCE = 2

parsed_url = functools.lru_cache(maxsize=256)(httpx.URL)  # parsing is half of making a request, and there are few

ReadError = Callable[[int, bytes], RequestError | None]


class HttpEndpoint:
    """A connection pool to one server, over TCP or a Unix socket. Enter it before use.

    The number of connections is not limited here: how much is in flight is the stages' decision. Requests go to
    httpx's transport itself: redirects and cookies, which a client adds for half of a request's time, have no
    place between an orchestrator and its servers. `verify` and `proxy` are as httpx knows them.

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
    ) -> None:
        self.name = name
        self.traffic = Traffic()
        self._read_error = read_error
        self._base_url = base_url.rstrip("/")
        authorization = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        accepted = {"Accept-Encoding": "gzip, deflate"}  # what is decoded here
        self._headers = {**accepted, **authorization, **(headers or {}), **(secret_headers or {})}
        secrets = [api_key, *(secret_headers or {}).values(), *(proxy.raw_auth or () if proxy else ())]
        self._secrets = [each.encode() if isinstance(each, str) else each for each in secrets if each]

        def session() -> aiohttp.ClientSession:
            context = self._transport.ssl_context
            connector = aiohttp.UnixConnector(uds, limit=0) if uds else aiohttp.TCPConnector(limit=0, ssl=context)
            return aiohttp.ClientSession(connector=connector)

        self._transport = AiohttpTransport(client=session, verify=verify, proxy=proxy)
        self._long_bodies = asyncio.Semaphore(LONG_BODIES_AT_ONCE)
        self._is_left = False

    async def __aenter__(self) -> Self:
        await self._transport.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_left = True
        await self._transport.__aexit__(kind, error, trace)

    async def get(self, path: str, *, deadline: float) -> bytes:
        parts: list[bytes] = []
        await self._request("GET", path, None, {}, deadline, parts.append)
        return b"".join(parts)

    async def post(self, path: str, body: bytes, *, content_type: str, deadline: float, resend: bool = True) -> bytes:
        """The reply's body. `deadline` is on the loop's clock; raises a `RequestError` for any other outcome.

        `resend=False` is for what must not reach the server twice (see `_respond`).
        """
        parts: list[bytes] = []
        await self._request("POST", path, body, {"Content-Type": content_type}, deadline, parts.append, resend=resend)
        return b"".join(parts)

    async def stream(
        self, path: str, body: bytes, sink: Callable[[bytes], None], *, content_type: str, deadline: float
    ) -> None:
        """As `post`, but hands the reply's body to `sink` part by part as it comes."""
        await self._request("POST", path, body, {"Content-Type": content_type}, deadline, sink)

    async def _request(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        deadline: float,
        sink: Callable[[bytes], None],
        *,
        resend: bool = True,
    ) -> None:
        url = parsed_url(self._base_url + path)
        # As a stream: so httpx leaves Host and Content-Length to aiohttp, which adds them faster.
        stream = httpx.ByteStream(body or b"")
        request = httpx.Request(method, url, stream=stream, headers={**self._headers, **headers})
        request.read()
        self.traffic.requests += 1
        self.traffic.sent_bytes += len(body or b"")
        try:
            async with asyncio.timeout_at(deadline):
                response = await self._respond(request, resend=resend)
                try:
                    if response.is_success:
                        encoded = "Content-Encoding" in response.headers
                        async with self._turn_of(response):
                            async for part in response.aiter_bytes() if encoded else response.aiter_raw():
                                sink(part)
                        return
                    await response.aread()
                finally:
                    self.traffic.received_bytes += response.num_bytes_downloaded
                    await response.aclose()
        except TimeoutError:
            raise DeadlineExceededError(f"{self.name}{path}: no reply before the deadline") from None
        except (httpx.HTTPError, aiohttp.ClientError, OSError) as error:
            said = self._redacted(str(error).encode()).decode()
            raise TransientError(f"{self.name}{path}: {type(error).__name__}: {said}") from None
        content = self._redacted(response.content)
        own = self._read_error(response.status_code, content) if self._read_error else None
        raise own or error_for_status(f"{self.name}{path}", response, content)

    def _redacted(self, said: bytes) -> bytes:
        for secret in self._secrets:
            said = said.replace(secret, REDACTED.encode())
        return said

    def _turn_of(self, response: httpx.Response) -> AbstractAsyncContextManager[object]:
        """Long bodies come in a few at a time: parts of dozens in one turn of the event loop would hold it up."""
        is_long = int(response.headers.get("Content-Length", 0)) > LONG_BODY_BYTES
        return self._long_bodies if is_long else contextlib.nullcontext()

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


def error_for_status(request: str, response: httpx.Response, content: bytes) -> RequestError:
    """The error of a reply that is none: 429 and 503 throttled, other 4xx permanent, the rest transient."""
    excerpt = " ".join(error_message(content).split())[:ERROR_EXCERPT_CHARACTERS]
    message = f"{request}: HTTP {response.status_code}: {excerpt}"
    if response.status_code in (429, 503):
        return ThrottledError(message, retry_after_s(response.headers.get("Retry-After")))
    if response.status_code == 408 or response.status_code >= 500:
        return TransientError(message)
    return PermanentError(message)


def error_message(body: bytes) -> str:
    """What a JSON error body says, in any of the shapes that inference servers use; else the body as text."""
    try:
        reply = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body.decode(errors="replace")
    if isinstance(reply, dict):
        error = reply.get("error", reply)
        message = error.get("message", error.get("detail")) if isinstance(error, dict) else error
        if isinstance(message, str):
            return message
    return body.decode(errors="replace")


def retry_after_s(header: str | None) -> float | None:
    """Seconds of a Retry-After header; dates and nonsense count as no advice."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None
