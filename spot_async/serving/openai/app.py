"""The routes under `/v1`: OpenAI's completions and models, over the same engine as the server's own API.

It reads requests, awaits the engine, and writes replies. What a completion means is in `completion.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from spot_async.base.tasks import both
from spot_async.errors import SpotError
from spot_async.serving.api import GenerateRequest, ScoreRequest, status_of
from spot_async.serving.engine.worker import EngineWorker
from spot_async.serving.http.replies import while_connected
from spot_async.serving.http.requests import MIB, Api, Bodies, Refusal
from spot_async.serving.openai.completion import Plan, ServedModel, read_request

COMPLETIONS = "/completions"
MODELS = "/models"
PREFIX = "/v1"
# Of one body, and of all together that have not been decoded yet. JSON grows up to 25 times as Python objects.
MAX_BYTES, MAX_HELD_BYTES = 8 * MIB, 128 * MIB
JSON = "application/json"
_HEADERS = {503: {"Retry-After": "1"}}

T = TypeVar("T")


def openai_v1(worker: EngineWorker, model: ServedModel, *, max_completions: int) -> Api:
    """Return the routes under `/v1`. More than `max_completions` at a time are refused with 503."""
    names = {"id": model.name, "object": "model", "created": int(time.time()), "owned_by": "spot-async"}
    listed = {**names, "root": model.directory, "max_model_len": model.max_context_tokens}

    async def models(scope: Scope, receive: Receive, send: Send) -> None:
        await _reply({"object": "list", "data": [listed]})(scope, receive, send)

    endpoints: dict[str, tuple[str, ASGIApp]] = {
        PREFIX + COMPLETIONS: ("POST", _Completions(worker, model, max_completions)),
        PREFIX + MODELS: ("GET", models),
    }
    return Api(PREFIX, endpoints, _answer)


class _Completions:
    """Answers completion requests, each with one JSON object. Ends their work when the client hangs up."""

    def __init__(self, worker: EngineWorker, model: ServedModel, places: int) -> None:
        self._worker = worker
        self._model = model
        self._places = places
        self._free = asyncio.Semaphore(places)
        self._bodies = Bodies(MAX_BYTES, MAX_HELD_BYTES)
        self._texts = ThreadPoolExecutor(1, "texts")  # only one thread, to leave the engine its core

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.AsyncExitStack() as until_sent:
            async with self._bodies.read(Request(scope, receive)) as body:
                asked = read_request(body)
                self._model.check(asked)
                read = functools.partial(self._model.read, asked.only_prompt, asked)
                if self._free.locked():
                    busy = f"{self._places} completions are being worked on: try again later"
                    raise Refusal(503, busy, code="server_overloaded")
                await until_sent.enter_async_context(self._free)
                prompt = await while_connected(receive, self._in_thread(read))
            plan = Plan(asked, prompt, self._model)
            reply = await while_connected(receive, self._answer(plan))
            await reply(scope, receive, send)

    async def _answer(self, plan: Plan) -> Response:
        scores, sampled = await both(self._asked(plan.scoring), self._asked(plan.generation))
        return await self._in_thread(lambda: _reply(plan.reply(scores, sampled)))

    async def _asked(self, request: ScoreRequest | GenerateRequest | None) -> Any:
        return None if request is None else await asyncio.wrap_future(self._worker.submit(request))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Return the result of work on texts, which would hold up the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._texts, work)


def _reply(message: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(message), status, headers=_HEADERS.get(status), media_type=JSON)


def _answer(error: Refusal | SpotError) -> Response:
    if isinstance(error, SpotError):
        error = Refusal(status_of(error), str(error))
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    fields = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return _reply({"error": fields}, error.status)
