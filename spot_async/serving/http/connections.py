"""What our HTTP servers bear from a connection: how long it may wait, how much it may send, how many there may be.

uvicorn bounds none of this. Whoever has not sent the whole of a request, or does not take an answer, waits in a `Room`
as at the nodes' gate: `patience_s` at most for a head, and between two parts of a body.

A body that is not wanted is dropped before its connection is closed. The system would else meet what still comes with a
reset, and a client that sends first and reads afterwards would not see why it was refused.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from typing import Any

import structlog
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from spot_async.base.connection_room import BACKLOG, Room
from spot_async.base.processes.resources import is_out_of_files

GRACEFUL_S = 1
HEAD_BYTES, MOST_HEADERS = 1 << 16, 1000  # of a request; chunks may bring more headers behind its body
BODY_BYTES = 1 << 27  # of a request, with all that frames it: read or dropped


class HttpServer(uvicorn.Server):
    def __init__(self, app: ASGIApp, *, places: int, patience_s: int, **more: Any) -> None:
        """Have `places` for connections that wait, and as many for others, beyond which requests are answered 503.

        `more` is uvicorn's.
        """
        protocol: Any = functools.partial(_Connection, room=Room[_Connection](places))
        config = uvicorn.Config(
            _dropping_bodies(app),
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


def _dropping_bodies(app: ASGIApp) -> ASGIApp:
    """Return the app with answers that end, and so may close the connection, once the request has come to its end."""

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        comes = all(name != b"expect" for name, _ in scope["headers"])  # else the client waits for leave to send more

        async def received() -> Message:
            nonlocal comes
            message = await receive()
            comes = message.get("more_body", False)
            return message

        async def sent(message: Message) -> None:
            if comes and message["type"] == "http.response.body" and not message.get("more_body"):
                await send({**message, "more_body": True})
                message = {"type": "http.response.body"}
                while comes:
                    await received()
            await send(message)

        await app(scope, received, sent)

    return answered


class _Connection(HttpToolsProtocol):
    def __init__(self, *given: Any, room: Room[_Connection], **named: Any) -> None:
        super().__init__(*given, **named)
        self._room = room
        self._deadline: asyncio.TimerHandle | None = None
        self._received_bytes = 0  # of a request

    def _weigh(self) -> None:
        """Begin or end to wait for the client, as things stand now."""
        self._stop_waiting()
        asked = self.cycle
        if asked is None or asked.more_body or asked.response_complete or self.flow.write_paused:
            self._deadline = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)
            if (dropped := self._room.enter(self, self.client[0] if self.client else "")) is not None:
                dropped.transport.abort()

    def _stop_waiting(self) -> None:
        self._room.leave(self)
        if self._deadline is not None:
            self._deadline.cancel()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._weigh()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received_bytes += len(data)
        super().data_received(data)
        asked = self.cycle
        if self._received_bytes > (BODY_BYTES if asked is not None and asked.more_body else HEAD_BYTES):
            self.transport.abort()
        elif asked is not None and not asked.response_complete:  # a head gets no more time for what has come of it
            self._weigh()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) == MOST_HEADERS:
            raise ValueError(f"more than {MOST_HEADERS} headers")  # answered 400
        super().on_header(name, value)

    def on_message_complete(self) -> None:
        self._received_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._weigh()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._weigh()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._weigh()
