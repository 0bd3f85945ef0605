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

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import request_response

from spot_async.base import wire
from spot_async.errors import DeadlineExceededError, PermanentError, SpotError
from spot_async.serving import api
from spot_async.serving.api import Credentials
from spot_async.serving.engine.worker import EngineWorker
from spot_async.serving.http.replies import Replies, while_connected
from spot_async.serving.http.requests import (
    MAX_BYTES,
    MAX_HELD_BYTES,
    UNREADABLE,
    Access,
    Api,
    App,
    Bodies,
    Refusal,
)
from spot_async.types import Capabilities

T = TypeVar("T")


def build_app(
    worker: EngineWorker,
    capabilities: Capabilities,
    *,
    credentials: Credentials,
    is_local: bool = False,
    other_api: Api | None = None,
) -> App:
    """Return the server's ASGI application. `Access` decides who may ask it."""
    access = Access(credentials, is_local, other_api, instance=uuid.uuid4().hex)
    updating = asyncio.Lock()
    bodies = Bodies(MAX_BYTES, MAX_HELD_BYTES)

    async def decode(request: Request, kind: type[T]) -> T:
        async with bodies.read(request) as body:
            try:
                return wire.decode(body, kind)
            except UNREADABLE as error:
                raise PermanentError(f"{request.scope['path']}: cannot read the request: {error}") from error

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

    async def many(request: Request) -> Response:
        return Replies(worker, (await decode(request, api.ManyRequest)).requests)

    async def update_weights(request: Request) -> Response:
        access.check_update(request.headers)
        message = await decode(request, api.UpdateRequest)
        directory, version = Path(message.snapshot.directory), message.snapshot.version
        async with updating:  # so that versions arrive in the order in which they were sent
            tensors = await asyncio.to_thread(worker.parameters.read, directory, message.digests)
            future = worker.update_weights(tensors, version)
            return await _outcome(request, future, message.timeout_s)

    async def load_adapter(request: Request) -> Response:
        access.check_update(request.headers)
        message = await decode(request, api.LoadRequest)
        directory, version = Path(message.snapshot.directory), message.snapshot.version
        async with updating:
            adapter = await asyncio.to_thread(worker.adapters.read, directory, version)
            return await _outcome(request, worker.load_adapter(message.name, adapter), message.timeout_s)

    async def unload_adapter(request: Request) -> Response:
        access.check_update(request.headers)
        message = await decode(request, api.UnloadRequest)
        return await _outcome(request, worker.unload_adapter(message.name), message.timeout_s)

    endpoints = {
        api.HEALTH: ("GET", request_response(health)),
        api.STATS: ("GET", request_response(stats)),
        api.CAPABILITIES: ("GET", request_response(describe)),
        api.GENERATE: ("POST", request_response(submit(api.GenerateRequest))),
        api.SCORE: ("POST", request_response(submit(api.ScoreRequest))),
        api.CANDIDATE_LOGPROBS: ("POST", request_response(submit(api.CandidateRequest))),
        api.MANY: ("POST", request_response(many)),
        api.UPDATE_WEIGHTS: ("POST", request_response(update_weights)),
        api.LOAD_ADAPTER: ("POST", request_response(load_adapter)),
        api.UNLOAD_ADAPTER: ("POST", request_response(unload_adapter)),
    }
    return App(access, Api("/", endpoints, _answer))


async def _outcome(request: Request, future: Future[Any], timeout_s: float) -> Response:
    """Return the future's result as a response. Cancels it when the client has gone or `timeout_s` is over."""
    try:
        async with asyncio.timeout(timeout_s):
            return _reply(await while_connected(request.receive, asyncio.wrap_future(future)))
    except TimeoutError:
        raise DeadlineExceededError(f"{request.scope['path']}: not answered in {timeout_s:.3g} s") from None


def _reply(message: object, status: int = 200) -> Response:
    body = wire.encode(message)
    headers = {api.DIGEST_HEADER: api.digest(body)}
    return Response(body, status_code=status, media_type=api.CONTENT_TYPE, headers=headers)


def _answer(error: Refusal | SpotError) -> Response:
    status, kind = (error.status, error.error) if isinstance(error, Refusal) else (api.status_of(error), type(error))
    return _reply(api.ErrorReply(error=kind.__name__, message=str(error)), status)
