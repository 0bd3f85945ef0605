"""What our HTTP servers bear from a connection: how long it may wait, how much it may send, how many there may be.

uvicorn bounds none of this. Whoever has not sent a whole head of a request, or does not take an answer, waits in a
`Room` as at the nodes' gate, and `patience_s` at most.

A body that nobody wants is read and dropped, up to a bound. If it were left unread, the system would answer what still
comes with a reset, and a client that sends first and reads afterwards would not see why it was refused.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from spot_async.base.connection_room import Room

BACKLOG = 4096
GRACEFUL_S = 1
HEAD_BYTES, MOST_HEADERS = 1 << 16, 1000  # of a request; chunks may bring more headers behind its body
REQUEST_BYTES = 1 << 27  # of its body with all that frames it, read or dropped


def tcp_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens there. Raises OSError, for example for a taken port."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def http_config(app: ASGIApp, *, places: int, patience_s: int, **more: Any) -> uvicorn.Config:
    """Return what a server is made of that has `places` for connections that wait, and as many for other ones.

    Further requests are answered 503. `more` is uvicorn's.
    """
    protocol: Any = functools.partial(HttpConnection, room=Room[HttpConnection](places), patience_s=patience_s)
    return uvicorn.Config(
        app,
        http=protocol,
        lifespan="off",
        ws="none",
        proxy_headers=False,  # nobody asks who asked
        backlog=min(BACKLOG, places),  # asyncio accepts so many before it looks at one
        limit_concurrency=2 * places,
        timeout_keep_alive=patience_s,
        timeout_graceful_shutdown=GRACEFUL_S,
        **more,
    )


class HttpServer(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or []:
            each.listen(BACKLOG)  # asyncio has made this the number that it accepts at a time


class HttpConnection(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *given: Any, room: Room[HttpConnection], patience_s: int, **named: Any) -> None:
        super().__init__(*given, **named)
        self._room = room
        self._patience_s = patience_s
        self._deadline: asyncio.TimerHandle | None = None
        self._received_bytes = 0  # of this head, or of what follows it
        self._is_unreadable = False

    @property
    def _has_rest(self) -> bool:
        """Whether more of a request may come that was answered, or cannot be read."""
        return self._is_unreadable or (self.cycle is not None and self.cycle.more_body)

    def _weigh(self) -> None:
        """Begin or end to wait for the client, as things stand now."""
        self._stop_waiting()
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering and not self.flow.write_paused and not self.transport.is_closing():
            return
        self._deadline = self.loop.call_later(self._patience_s, self.transport.abort)
        if (dropped := self._room.enter(self, self.client[0] if self.client else "")) is not None:
            dropped.transport.abort()

    def _stop_waiting(self) -> None:
        self._room.leave(self)
        if self._deadline is not None:
            self._deadline.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        in_steps: Any = _ClosingInSteps(transport, self._close)
        super().connection_made(in_steps)
        self._weigh()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received_bytes += len(data)
        if not self.transport.is_closing():
            super().data_received(data)
        if self._has_rest:
            if self._received_bytes > REQUEST_BYTES:
                self.transport.abort()
        elif self._received_bytes > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"A request's head has more than {HEAD_BYTES} bytes.")

    def send_400_response(self, msg: str) -> None:
        self._is_unreadable = True
        super().send_400_response(msg)

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) == MOST_HEADERS:
            raise ValueError(f"more than {MOST_HEADERS} headers")  # answered 400
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._received_bytes = 0
        super().on_headers_complete()
        self._weigh()

    def on_message_complete(self) -> None:
        self._received_bytes = 0
        super().on_message_complete()
        self.cycle.more_body = False  # also of a body that was dropped

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._weigh()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._weigh()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._weigh()

    def _close(self, transport: asyncio.Transport) -> None:
        """Close by steps (RFC 9112, 9.6): end our side, and drop what still comes until the client ends its own."""
        self._weigh()
        if not self._has_rest:
            transport.close()
            return
        self.flow.resume_reading()
        with suppress(OSError):  # the client has gone, as reading will show
            transport.write_eof()


class _ClosingInSteps:
    """A transport of which the protocol itself says how it closes."""

    def __init__(self, transport: Any, close: Callable[[Any], None]) -> None:
        self._transport = transport
        self._close = close
        self._closes = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._closes:
            self._transport.write(data)

    def is_closing(self) -> bool:
        return self._closes or self._transport.is_closing()

    def close(self) -> None:
        if not self.is_closing():
            self._closes = True
            self._close(self._transport)
