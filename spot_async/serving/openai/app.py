"""The routes under `/v1`: OpenAI's completions and models, over the same engine as the server's own API.

It reads requests, awaits the engine, and writes replies. What a completion means is in `completion.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from spot_async.base.tasks import gather
from spot_async.errors import SpotError
from spot_async.serving.api import GenerateRequest, ScoreRequest, status_of
from spot_async.serving.engine.worker import EngineWorker
from spot_async.serving.http.access import OtherApi, Refusal
from spot_async.serving.http.bodies import MIB, Bodies
from spot_async.serving.http.replies import ClientGone, no_reply, while_connected
from spot_async.serving.openai.completion import (
    Answer,
    ApiError,
    CompletionRequest,
    Plan,
    Prompt,
    ServedModel,
    read_request,
)

COMPLETIONS = "/completions"
MODELS = "/models"
PREFIX = "/v1"
# Of one body, and of all together that have not been decoded yet. JSON grows up to 25 times as Python objects.
MAX_BYTES, MAX_HELD_BYTES = 8 * MIB, 128 * MIB
JSON = "application/json"
_HEADERS = {
    413: {"Connection": "close"},  # so that the rest of the body need not be read
    503: {"Retry-After": "1"},
}

T = TypeVar("T")


def openai_v1(worker: EngineWorker, model: ServedModel, *, max_completions: int) -> OtherApi:
    """Return the routes under `/v1`. More than `max_completions` choices at a time are refused with 503."""
    names = {"id": model.name, "object": "model", "created": int(time.time()), "owned_by": "spot-async"}
    listed = {**names, "root": model.directory, "max_model_len": model.max_context_tokens}

    async def models(request: Request) -> Response:
        return _reply({"object": "list", "data": [listed]})

    routes = [
        Route(MODELS, models),
        Route(COMPLETIONS, _Completions(worker, model, max_completions), methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {
        ApiError: _error_reply,
        SpotError: _error_reply,
        HTTPException: _no_route,
        ClientGone: no_reply,
        ClientDisconnect: no_reply,
    }
    mount = Mount(PREFIX, app=Starlette(routes=routes, exception_handlers=handlers))
    return OtherApi(mount, _refused)


class _Completions:
    """Answers completion requests, each with one JSON object. Ends their work when the client hangs up."""

    def __init__(self, worker: EngineWorker, model: ServedModel, places: int) -> None:
        self._worker = worker
        self._model = model
        self._places = places
        self._taken = 0
        self._bodies = Bodies(MAX_BYTES, MAX_HELD_BYTES)
        self._texts = ThreadPoolExecutor(1, "texts")  # only one thread, to leave the engine its core

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.ExitStack() as until_sent:
            async with self._bodies.read(Request(scope, receive)) as body:
                asked = read_request(body)
                self._model.check(asked)
                given = asked.prompts
                until_sent.enter_context(self._hold(len(given)))
                prompts = await while_connected(receive, self._read(given, asked))
            plan = Plan(asked, prompts, self._model)
            for needed in plan.requests():
                self._worker.limits.check(needed)
            reply = await while_connected(receive, self._answer(plan))
            await reply(scope, receive, send)

    @contextlib.contextmanager
    def _hold(self, choices: int) -> Iterator[None]:
        """Hold places for so many choices. Raises `ApiError` if there is no room."""
        if choices > self._places:
            message = f"prompt: {choices} choices are asked for; this server works on {self._places} at most"
            raise ApiError(400, message, param="prompt")
        if self._taken + choices > self._places:
            busy = f"{self._taken} of {self._places} choices are being worked on: try again later"
            raise ApiError(503, busy, code="server_overloaded")
        self._taken += choices
        try:
            yield
        finally:
            self._taken -= choices

    async def _answer(self, plan: Plan) -> Response:
        async def answer(index: int) -> Answer:
            return await self._asked(plan.scoring(index)), await self._asked(plan.generation(index))

        answers = await gather(answer(index) for index in plan.choices)
        return await self._in_thread(lambda: _reply(plan.reply(answers)))

    async def _asked(self, request: ScoreRequest | GenerateRequest | None) -> Any:
        return None if request is None else await asyncio.wrap_future(self._worker.submit(request))

    async def _read(self, given: list[str | list[int]], asked: CompletionRequest) -> list[Prompt]:
        """Read prompts one by one, so that requests take turns, and one that is given up stops."""
        return [await self._in_thread(functools.partial(self._model.read, each, asked)) for each in given]

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Return the result of work on texts, which would hold up the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._texts, work)


def _refused(refusal: Refusal) -> Response:
    return _error_response(ApiError(refusal.status, refusal.message, code=refusal.code))


def _reply(message: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(message), status, headers=_HEADERS.get(status), media_type=JSON)


def _error_response(error: ApiError) -> Response:
    return _reply(error.body(), error.status)


def _error_reply(request: Request, error: Exception) -> Response:
    return _error_response(error if isinstance(error, ApiError) else ApiError(status_of(error), str(error)))


def _no_route(request: Request, error: HTTPException) -> Response:
    served = f"{PREFIX}{COMPLETIONS} and {PREFIX}{MODELS}"
    message = f"{request.method} {request.url.path}: is not served; of OpenAI's API there are {served}"
    return _error_response(ApiError(error.status_code, message))
