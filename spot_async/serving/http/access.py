"""Decides who may ask one of our servers, by a request's headers, before its body is read.

A web page can make its reader's browser send requests to this machine. Such a request names the page in `Origin`, or
the page's host in `Host`, or has a content type that forms can send. None of these is answered. Nor is a request that
is meant for another process at this address (`api.INSTANCE_HEADER`).
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from starlette.responses import Response
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from spot_async.base import wire
from spot_async.base.addresses import host_of, is_loopback
from spot_async.errors import PermanentError, ServerRestartedError, SpotError
from spot_async.serving import api
from spot_async.serving.api import Credentials


class Refusal(NamedTuple):
    status: int
    message: str
    code: str | None = None  # for APIs whose errors have one
    error: type[SpotError] = PermanentError  # for our own API


class OtherApi(NamedTuple):
    """An API beside our own on the same server, with bodies and errors in a form of its own."""

    routes: Mount
    answer: Callable[[Refusal], Response]  # the refusal in its form of errors


@dataclass(frozen=True)
class Access:
    """The rules of one server."""

    credentials: Credentials
    is_local: bool  # it listens on loopback or a Unix socket, so `Host` must be a name of this machine
    other_api: OtherApi | None = None
    instance: str = ""  # names this process

    def refusal(self, method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
        """Return why a request is refused; None if it is not. `headers` are by their names in lower case."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.is_local and host and not is_loopback(host_of(host)):
            return Refusal(403, f"Host: {host} is another machine's name: ask for localhost or 127.0.0.1")
        if origin is not None and not (host and origin.partition("://")[2] == host):
            return Refusal(403, f"Origin: {origin}: requests of web pages are not answered")
        key = self.credentials.api_key
        if key is not None and not _same(headers.get("authorization", ""), f"Bearer {key}"):
            return Refusal(401, "needs the server's API key as bearer token", "invalid_api_key")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and self._other(path) is None and kind != api.CONTENT_TYPE:
            return Refusal(415, f"{path}: takes Content-Type: {api.CONTENT_TYPE} only")
        if headers.get(api.INSTANCE_HEADER.lower(), self.instance) != self.instance:
            message = "the server was restarted, and may hold other weights than the caller knows of"
            return Refusal(api.STATUS[ServerRestartedError], message, error=ServerRestartedError)
        return None

    def refusal_of_update(self, headers: Mapping[str, str]) -> Refusal | None:
        """Return why new weights are refused, although `refusal` lets the request in; None if they are not."""
        token = self.credentials.update_token
        if token is None or _same(headers.get(api.UPDATE_TOKEN_HEADER.lower(), ""), token):
            return None
        return Refusal(403, "takes new weights only from the run that has the server's update token")

    def answer(self, path: str, refusal: Refusal) -> Response:
        """Return the refusal in the form of the API that was asked."""
        if (other := self._other(path)) is not None:
            return other.answer(refusal)
        body = wire.encode(api.ErrorReply(error=refusal.error.__name__, message=refusal.message))
        headers = {api.DIGEST_HEADER: api.digest(body)}
        return Response(body, refusal.status, headers=headers, media_type=api.CONTENT_TYPE)

    def _other(self, path: str) -> OtherApi | None:
        """Return the other API, if the path is one of its own."""
        return self.other_api if self.other_api is not None and path.startswith(self.other_api.routes.path) else None


class RefuseStrangers:
    """ASGI middleware that answers the requests that `Access` refuses."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            refusal = self._access.refusal(scope["method"], scope["path"], headers)
            if refusal is not None:
                await self._access.answer(scope["path"], refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _same(shown: str, wanted: str) -> bool:
    return hmac.compare_digest(shown.encode("latin-1"), wanted.encode())
