"""Decides by a request's headers who may ask one of our servers, and reads its body within limits.

A web page can make its reader's browser send requests to this machine. Such a request names the page in `Origin`, or
the page's host in `Host`, or has a content type that forms can send. None of these is answered. Nor is a request that
is meant for another process at this address (`api.INSTANCE_HEADER`). A body that is too large is refused before it is
in memory as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from spot_async.base.addresses import host_of, is_no_page
from spot_async.errors import PermanentError, RequestTooLargeError, ServerRestartedError, SpotError, ThrottledError
from spot_async.serving import api
from spot_async.serving.api import Credentials


class Refusal(Exception):
    """Why a request is refused, with the HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        error: type[SpotError] = PermanentError,
        headers: Mapping[str, str] = {},
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers  # of the answer
        self.param = param  # for APIs whose errors name the field
        self.code = code  # for APIs whose errors have one
        self.error = error  # for our own API


class Api(NamedTuple):
    """An API of the server, with bodies and errors in a form of its own."""

    prefix: str  # of all its paths
    endpoints: Mapping[str, tuple[str, ASGIApp]]  # by path: the method that it takes, and what answers
    answer: Callable[[Refusal | SpotError], Response]  # the error in its form

    def endpoint(self, method: str, path: str) -> ASGIApp:
        """Return what answers the request. Raises `Refusal` if nothing does."""
        taken, endpoint = self.endpoints.get(path.rstrip("\n/") or "/", (None, None))
        if endpoint is None:
            raise Refusal(404, f"{method} {path}: is not served; there are {', '.join(self.endpoints)}")
        if method != taken and (method, taken) != ("HEAD", "GET"):
            allowed = {"Allow": "GET, HEAD" if taken == "GET" else str(taken)}
            raise Refusal(405, f"{method} {path}: is not served; it takes {taken}", headers=allowed)
        return endpoint


@dataclass(frozen=True)
class Access:
    """The rules of one server."""

    credentials: Credentials
    is_local: bool  # `Host` must be an address or a name of this machine
    other_api: Api | None = None
    instance: str = ""  # names this process

    def refusal(self, method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
        """Return why a request is refused; None if it is not. `headers` are by their names in lower case."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.is_local and host and not is_no_page(host_of(host)):
            own = socket.gethostname()
            return Refusal(403, f"Host: {host} is another machine's name: ask for localhost, an address or {own}")
        if origin is not None and not (host and origin.partition("://")[2] == host):
            return Refusal(403, f"Origin: {origin}: requests of web pages are not answered")
        key = self.credentials.api_key
        if key is not None and not _same(headers.get("authorization", ""), f"Bearer {key}"):
            return Refusal(401, "needs the server's API key as bearer token", code="invalid_api_key")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and self.other(path) is None and kind != api.CONTENT_TYPE:
            return Refusal(415, f"{path}: takes Content-Type: {api.CONTENT_TYPE} only")
        if headers.get(api.INSTANCE_HEADER.lower(), self.instance) != self.instance:
            message = "the server was restarted, and may hold other weights than the caller knows of"
            return Refusal(api.STATUS[ServerRestartedError], message, error=ServerRestartedError)
        return None

    def check_update(self, headers: Mapping[str, str]) -> None:
        """Raise `Refusal` for new weights from a stranger, whose request `refusal` lets in."""
        token = self.credentials.update_token
        if token is not None and not _same(headers.get(api.UPDATE_TOKEN_HEADER.lower(), ""), token):
            raise Refusal(403, "takes new weights only from the run that has the server's update token")

    def other(self, path: str) -> Api | None:
        """Return the other API, if the path is one of its own."""
        return self.other_api if self.other_api is not None and path.startswith(self.other_api.prefix) else None


class App:
    """A server's ASGI application: who may ask, which endpoint answers, and what becomes of its errors."""

    def __init__(self, access: Access, own_api: Api) -> None:
        self._access = access
        self._own_api = own_api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        asked = self._access.other(path) or self._own_api
        try:
            if (refusal := self._access.refusal(method, path, headers)) is not None:
                raise refusal
            await asked.endpoint(method, path)(scope, receive, send)
        except (Refusal, SpotError) as error:
            response = asked.answer(error)
            if isinstance(error, Refusal):
                response.headers.update(error.headers)
            if isinstance(error, RequestTooLargeError):
                response.headers["Connection"] = "close"
            await response(scope, receive, send)
        except ClientDisconnect:
            return  # there is nobody left to answer


def _same(shown: str, wanted: str) -> bool:
    return hmac.compare_digest(shown.encode("latin-1"), wanted.encode())


MIB = 1 << 20
# Limits of one of our own messages, with many prompts or candidates, and of all that have not been decoded yet.
MAX_BYTES, MAX_HELD_BYTES = 64 * MIB, 256 * MIB
LARGE_SHARE = 1 / 8  # bodies above this share of the limit are large, and are decoded one at a time
LONGEST_S = 300.0  # that a body may take
SAFE_S = 5.0  # so long it is given up for no other
OTHERS_TURN_S = 0.02  # all other requests have their turn this long before a large body, which may take half a second

# What decoding raises for a body that is not a request. RecursionError: it is nested too deep.
UNREADABLE = (msgspec.DecodeError, ValueError, TypeError, RecursionError)


class _Reading:
    """A body that is on its way."""

    def __init__(self, began_s: float, limit: asyncio.Timeout) -> None:
        self.began_s = began_s
        self.limit = limit
        self.body = bytearray()
        self.held_bytes = 0


class Bodies:
    """Counts the bytes of bodies being read, and hands out large bodies one at a time.

    A body that comes slowly, or never whole, must not keep others out: where there is no room for another one, that
    which has been on its way for longest is given up.
    """

    def __init__(self, max_bytes: int, max_held_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0
        self._coming: list[_Reading] = []  # the oldest first
        self._large = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[memoryview]:
        """Read the request's body. Its bytes count until the `with` block ends.

        Raises `RequestTooLargeError` if it is too large, and `ThrottledError` if all bodies together are or if it comes
        too slowly.
        """
        max_bytes = self._max_bytes
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > max_bytes:
            raise _too_large(max_bytes)
        now_s = asyncio.get_running_loop().time()
        reading = _Reading(now_s, asyncio.timeout_at(now_s + LONGEST_S))
        try:
            await self._read(request, reading)
            if len(reading.body) < LARGE_SHARE * max_bytes:
                yield memoryview(reading.body)
            else:
                async with self._large:
                    await asyncio.sleep(OTHERS_TURN_S)
                    yield memoryview(reading.body)
        finally:
            self._held_bytes -= reading.held_bytes

    async def _read(self, request: Request, reading: _Reading) -> None:
        self._coming.append(reading)
        try:
            async with reading.limit:
                async for part in request.stream():
                    if len(reading.body) + len(part) > self._max_bytes:
                        raise _too_large(self._max_bytes)
                    self._make_room(len(part), reading)
                    reading.body += part
                    reading.held_bytes += len(part)
                    self._held_bytes += len(part)
        except TimeoutError:
            raise ThrottledError("the request's body came too slowly: try again later") from None
        finally:
            self._coming.remove(reading)

    def _make_room(self, size: int, reading: _Reading) -> None:
        """Make room for a part of one body. Raises `ThrottledError` if there is none to be had."""
        now_s = asyncio.get_running_loop().time()
        for other in self._coming:
            if self._held_bytes + size <= self._max_held_bytes:
                return
            if other is not reading and other.held_bytes and now_s - other.began_s > SAFE_S:
                self._held_bytes -= other.held_bytes
                other.held_bytes = 0
                other.body.clear()
                other.limit.reschedule(now_s)
        if self._held_bytes + size > self._max_held_bytes:
            raise ThrottledError("the bodies of other requests take all the room there is: try again later")


def _too_large(max_bytes: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"the request has more than {max_bytes // MIB} MiB: send fewer prompts at a time")
