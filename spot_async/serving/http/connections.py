"""What our HTTP servers bear from a connection: how long it may wait, how much it may send, how many there may be.

uvicorn bounds none of this. Whoever has not sent the head of a request, or does not take an answer, waits in a `Room`
as at the nodes' gate, and `patience_s` at most.

A body that nobody wants is dropped before its connection is closed. The system would else meet what still comes with a
reset, and a client that sends first and reads afterwards would not see why it was refused.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from typing import Any

import structlog
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from spot_async.base.connection_room import Room
from spot_async.base.processes.resources import is_out_of_files

BACKLOG = 4096
GRACEFUL_S = 1
HEAD_BYTES, MOST_HEADERS = 1 << 16, 1000  # of a request; chunks may bring more headers behind its body
BODY_BYTES = 1 << 27  # of a request, with all that frames it: read or dropped


def tcp_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens there. Raises OSError, for example for a taken port."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


class HttpServer(uvicorn.Server):
    def __init__(self, app: ASGIApp, *, places: int, patience_s: int, **more: Any) -> None:
        """Have `places` for connections that wait, and as many for others, beyond which requests are answered 503.

        `more` is uvicorn's.
        """
        protocol: Any = functools.partial(_Connection, room=Room[_Connection](places), patience_s=patience_s)
        config = uvicorn.Config(
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
        super().__init__(config)
        config.load()  # here its failures are the caller's

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(_tell)
        await super().startup(sockets)
        for each in sockets or []:
            each.listen(BACKLOG)  # asyncio has made this the number that it accepts at a time


def _tell(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if is_out_of_files(error := context.get("exception")):  # asyncio accepts again in a second
        structlog.get_logger().warning("connections wait", reason=str(error))
    else:
        loop.default_exception_handler(context)


class _Connection(HttpToolsProtocol):
    def __init__(self, *given: Any, room: Room[_Connection], patience_s: int, **named: Any) -> None:
        super().__init__(*given, **named)
        self._room = room
        self._patience_s = patience_s
        self._deadline: asyncio.TimerHandle | None = None
        self._received_bytes = 0  # of this head, or of what follows it
        self._closes = False  # once the rest of the request is dropped

    @property
    def _has_rest(self) -> bool:
        """Whether more of the request's body may come."""
        return self.cycle is not None and self.cycle.more_body

    def close(self, transport: asyncio.Transport) -> None:
        """Close as soon as the client may hear what it was told."""
        waits_for_leave = self.expect_100_continue and not self._received_bytes
        if self._has_rest and not waits_for_leave:
            self._closes = True
        else:
            transport.close()

    def _weigh(self) -> None:
        """Begin or end to wait for the client, as things stand now."""
        self._stop_waiting()
        if self.flow.write_paused or self.cycle is None or self.cycle.response_complete:
            self._deadline = self.loop.call_later(self._patience_s, self.transport.abort)
            if (dropped := self._room.enter(self, self.client[0] if self.client else "")) is not None:
                dropped.transport.abort()

    def _stop_waiting(self) -> None:
        self._room.leave(self)
        if self._deadline is not None:
            self._deadline.cancel()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_ClosedBy(self, transport))  # type: ignore[arg-type]
        self._weigh()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received_bytes += len(data)
        super().data_received(data)
        if self._received_bytes > (BODY_BYTES if self._has_rest else HEAD_BYTES):
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:
            self.cycle.more_body = False  # nothing more of it can be read
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
        if self._closes:
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._weigh()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._weigh()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._weigh()


class _ClosedBy:
    """A transport that its protocol closes."""

    def __init__(self, protocol: _Connection, transport: asyncio.Transport) -> None:
        self._protocol = protocol
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        self._protocol.close(self._transport)
