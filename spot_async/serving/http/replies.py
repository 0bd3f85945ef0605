"""Answers for as long as the client waits, and several requests with one stream of frames (`api.frame`).

The work for a client that hangs up ends, so that it frees what it holds.

Replies come from the engine's thread one by one. Waking the event loop, and sending a part of a stream, cost more than
handling a reply. So the loop is woken only for the first reply and the last, and takes those in between with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from spot_async.base import wire
from spot_async.base.tasks import while_alive
from spot_async.errors import DeadlineExceededError, SpotError
from spot_async.serving import api
from spot_async.serving.engine.worker import EngineWorker

TOGETHER_S = 0.1  # a reply waits this long for others to be sent with it; the last one does not wait


T = TypeVar("T")


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client hangs up first, cancel it and raise `ClientDisconnect`.

    The request's body must have been read from `receive` already.
    """
    return await while_alive(work, lambda: _raise_when_gone(receive))


async def _raise_when_gone(receive: Receive) -> NoReturn:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


class Replies(Response):
    """The streamed response. A reply is sent soon after it is done, and each has its own deadline and error."""

    media_type = api.CONTENT_TYPE

    def __init__(self, worker: EngineWorker, requests: list[api.EngineRequest]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._worker = worker
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        futures = [self._worker.submit(request) for request in self._requests]
        try:
            with contextlib.suppress(ClientDisconnect):
                await while_connected(receive, self._answer(futures, send))
        finally:
            for future in futures:
                future.cancel()  # this aborts the request

    async def _answer(self, futures: list[Future[Any]], send: Send) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        due = {index: now + request.timeout_s for index, request in enumerate(self._requests)}  # of those not sent
        done: deque[int] = deque()  # replies that are done and not sent
        changed = asyncio.Event()

        def settled(index: int, future: Future[Any]) -> None:  # on the engine's thread
            done.append(index)
            if len(done) in (1, len(due)):
                loop.call_soon_threadsafe(changed.set)

        async def change(timeout_s: float) -> None:
            changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await changed.wait()

        for index, future in enumerate(futures):
            future.add_done_callback(functools.partial(settled, index))
        while due:
            if not done:
                await change(min(due.values()) - loop.time())
            if 0 < len(done) < len(due):
                await change(TOGETHER_S)
            for index in [index for index, due_s in due.items() if due_s <= loop.time()]:
                futures[index].cancel()
            ready = [done.popleft() for _ in range(len(done))]
            for index in ready:
                del due[index]
            if ready:
                frames = [api.frame(wire.encode(self._reply(index, futures[index]))) for index in ready]
                await send({"type": "http.response.body", "body": b"".join(frames), "more_body": bool(due)})

    def _reply(self, index: int, future: Future[Any]) -> api.ManyReply:
        try:
            if future.cancelled():
                late = f"{api.MANY}: not answered in {self._requests[index].timeout_s:.3g} s"
                raise DeadlineExceededError(late)
            return api.ManyReply(index=index, reply=msgspec.Raw(wire.encode(future.result())))
        except SpotError as error:
            failed = api.ErrorReply(error=type(error).__name__, message=str(error))
            return api.ManyReply(index=index, error=failed)
