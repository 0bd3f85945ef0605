"""The engine's HTTP API: decodes requests, awaits their futures, and encodes the replies.

If a client hangs up, or its time is over, its request is aborted and gives its slot back. Torch never runs on this
event loop.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from spot_async.base import wire
from spot_async.errors import (
    DeadlineExceededError,
    PermanentError,
    RequestTooLargeError,
    SpotError,
)
from spot_async.serving import api
from spot_async.serving.api import Credentials
from spot_async.serving.engine.worker import EngineWorker
from spot_async.serving.http.replies import ClientGone, Replies, no_reply, while_connected
from spot_async.serving.http.requests import (
    MAX_BYTES,
    MAX_HELD_BYTES,
    UNREADABLE,
    Access,
    Bodies,
    OtherApi,
    RefuseStrangers,
)
from spot_async.types import Capabilities

T = TypeVar("T")


def build_app(
    worker: EngineWorker,
    capabilities: Capabilities,
    *,
    credentials: Credentials,
    is_local: bool = False,
    other_api: OtherApi | None = None,
) -> Starlette:
    """Return the server's ASGI application. `Access` decides who may ask it."""
    access = Access(credentials, is_local, other_api, instance=uuid.uuid4().hex)
    updating = asyncio.Lock()
    bodies = Bodies(MAX_BYTES, MAX_HELD_BYTES)

    async def decode(request: Request, kind: type[T]) -> T:
        async with bodies.read(request) as body:
            try:
                return wire.decode(body, kind)
            except UNREADABLE as error:
                raise PermanentError(f"{request.url.path}: cannot read the request: {error}") from error

    async def health(request: Request) -> Response:
        return _reply(api.HealthReply(version=worker.version, instance=access.instance))

    async def stats(request: Request) -> Response:
        return _reply(worker.stats())

    async def describe(request: Request) -> Response:
        return _reply(capabilities)

    def submit(kind: type[Any]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            message = await decode(request, kind)
            return await _outcome(request, worker.submit(message), message.timeout_s)

        return endpoint

    async def generate_many(request: Request) -> Response:
        return Replies(worker, (await decode(request, api.GenerateManyRequest)).requests)

    async def update_weights(request: Request) -> Response:
        if (refusal := access.refusal_of_update(request.headers)) is not None:
            return access.answer(api.UPDATE_WEIGHTS, refusal)
        message = await decode(request, api.UpdateRequest)
        directory, version = Path(message.snapshot.directory), message.snapshot.version
        async with updating:  # so that versions arrive in the order in which they were sent
            tensors = await asyncio.to_thread(worker.read_weights, directory, message.digests)
            future = worker.update_weights(tensors, version)
            return await _outcome(request, future, message.timeout_s)

    async def load_adapter(request: Request) -> Response:
        if (refusal := access.refusal_of_update(request.headers)) is not None:
            return access.answer(api.LOAD_ADAPTER, refusal)
        message = await decode(request, api.LoadRequest)
        directory, version = Path(message.snapshot.directory), message.snapshot.version
        async with updating:
            adapter = await asyncio.to_thread(worker.read_adapter, directory, version)
            return await _outcome(request, worker.load_adapter(message.name, adapter), message.timeout_s)

    async def unload_adapter(request: Request) -> Response:
        if (refusal := access.refusal_of_update(request.headers)) is not None:
            return access.answer(api.UNLOAD_ADAPTER, refusal)
        message = await decode(request, api.UnloadRequest)
        return await _outcome(request, worker.unload_adapter(message.name), message.timeout_s)

    routes = [
        Route(api.HEALTH, health),
        Route(api.STATS, stats),
        Route(api.CAPABILITIES, describe),
        Route(api.GENERATE, submit(api.GenerateRequest), methods=["POST"]),
        Route(api.GENERATE_MANY, generate_many, methods=["POST"]),
        Route(api.SCORE, submit(api.ScoreRequest), methods=["POST"]),
        Route(api.CANDIDATE_LOGPROBS, submit(api.CandidateRequest), methods=["POST"]),
        Route(api.UPDATE_WEIGHTS, update_weights, methods=["POST"]),
        Route(api.LOAD_ADAPTER, load_adapter, methods=["POST"]),
        Route(api.UNLOAD_ADAPTER, unload_adapter, methods=["POST"]),
        *([other_api.routes] if other_api is not None else []),
    ]
    guards = [Middleware(RefuseStrangers, access=access)]
    handlers: dict[Any, Any] = {SpotError: _error_reply, ClientGone: no_reply, ClientDisconnect: no_reply}
    return Starlette(routes=routes, middleware=guards, exception_handlers=handlers)


async def _outcome(request: Request, future: Future[Any], timeout_s: float) -> Response:
    """Return the future's result as a response. Cancels it when the client has gone or `timeout_s` is over."""
    try:
        async with asyncio.timeout(timeout_s):
            return _reply(await while_connected(request.receive, asyncio.wrap_future(future)))
    except TimeoutError:
        raise DeadlineExceededError(f"{request.url.path}: not answered in {timeout_s:.3g} s") from None


def _reply(message: object, status: int = 200) -> Response:
    body = wire.encode(message)
    headers = {api.DIGEST_HEADER: api.digest(body)}
    return Response(body, status_code=status, media_type=api.CONTENT_TYPE, headers=headers)


def _error_reply(request: Request, error: Exception) -> Response:
    reply = _reply(api.ErrorReply(error=type(error).__name__, message=str(error)), api.status_of(error))
    if isinstance(error, RequestTooLargeError):
        reply.headers["Connection"] = "close"  # so that the rest of the body need not be read
    return reply
