"""The routes under `/v1`: OpenAI's completions and models, over the same engine as the server's own API.

It reads requests, awaits the engine, and writes replies or streams of events. What a request means is in
`completion.py`, and what its reply looks like is in `api.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from spot_async.base.tasks import gather
from spot_async.errors import SpotError
from spot_async.serving.api import GenerateRequest, status_of
from spot_async.serving.engine.requests import Tokens
from spot_async.serving.engine.worker import EngineWorker
from spot_async.serving.http.bodies import MAX_HELD_JSON_BYTES, MAX_JSON_BYTES, Bodies
from spot_async.serving.http.disconnect import ClientGone, no_reply, while_connected
from spot_async.serving.openai import api as openai_api
from spot_async.serving.openai.api import ApiError, Choice, Completion, CompletionRequest, Usage
from spot_async.serving.openai.completion import (
    Plan,
    Prompt,
    ServedModel,
    check_served,
    joined,
    needs_tokenizer,
    prompts_of,
    read_prompt,
)
from spot_async.types import FinishReason, Generation, TokenScores

JSON = "application/json"
_HEADERS = {
    413: {"Connection": "close"},  # so that the rest of the body need not be read
    503: {"Retry-After": "1"},
}
DONE = b"[DONE]"

NUMBERS_OF_A_MOMENT = 1 << 14  # so many numbers are written in about 10 ms

Emit = Callable[[Choice], Awaitable[None]]


def openai_routes(worker: EngineWorker, model: ServedModel, *, max_completions: int) -> Mount:
    """Return the routes under `/v1`. More than `max_completions` choices at a time are refused with 503."""
    created = int(time.time())
    listed = openai_api.Model(
        id=model.name, created=created, root=model.directory, max_model_len=model.max_context_tokens
    )
    room = _Room(max_completions)
    bodies = Bodies(MAX_JSON_BYTES, MAX_HELD_JSON_BYTES)
    tokenizing = ThreadPoolExecutor(1, "tokenizer")  # only one thread, to leave the engine its core

    async def models(request: Request) -> Response:
        return _reply(openai_api.ModelList(data=[listed]))

    async def one_model(request: Request) -> Response:
        if request.path_params["name"] != model.name:
            message = f"the model `{request.path_params['name']}` does not exist; this server has `{model.name}`"
            raise ApiError(404, message, param="model", code="model_not_found")
        return _reply(listed)

    async def completions(request: Request) -> Response:
        async with bodies.read(request) as body:
            asked = openai_api.read_completion_request(body)
            check_served(asked, model)
            given = prompts_of(asked)
            with room.hold(len(given) * asked.samples):
                prompts = await while_connected(request.receive, read_prompts(given, asked))
        plan = Plan(asked, prompts, model)
        for needed in plan.requests():
            worker.limits.check(needed)
        answer = _Answer(worker, plan, model.name)
        return _CompletionResponse(answer, room)

    async def read_prompts(given: list[str | list[int]], asked: CompletionRequest) -> list[Prompt]:
        """Tokenize texts in a thread, one by one, so that requests take turns and one that is given up stops."""
        loop = asyncio.get_running_loop()
        return [
            await loop.run_in_executor(tokenizing, read_prompt, each, asked, model)
            if needs_tokenizer(each, asked)
            else read_prompt(each, asked, model)
            for each in given
        ]

    routes = [
        Route(openai_api.MODELS, models),
        Route(f"{openai_api.MODELS}/{{name:path}}", one_model),
        Route(openai_api.COMPLETIONS, completions, methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {
        ApiError: _error_reply,
        SpotError: _error_reply,
        HTTPException: _no_route,
        ClientGone: no_reply,
        ClientDisconnect: no_reply,
    }
    return Mount(openai_api.PREFIX, app=Starlette(routes=routes, exception_handlers=handlers))


class _Room:
    """Limits how many choices are worked on at a time."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._taken = 0

    @contextlib.contextmanager
    def hold(self, choices: int) -> Iterator[None]:
        """Hold places for so many choices. Raises `ApiError` if there is no room."""
        if choices > self._places:
            message = f"n: of all prompts, {choices} choices are asked for; this server works on {self._places} at most"
            raise ApiError(400, message, param="n")
        if self._taken + choices > self._places:
            busy = f"{self._taken} of {self._places} choices are being worked on: try again later"
            raise ApiError(503, busy, code="server_overloaded")
        self._taken += choices
        try:
            yield
        finally:
            self._taken -= choices


class _Answer:
    """Gets the choices of one request from the engine."""

    def __init__(self, worker: EngineWorker, plan: Plan, model_name: str) -> None:
        self.plan = plan
        self._worker = worker
        self._id = f"cmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model_name = model_name
        self._writers = [plan.writer(index) for index in range(plan.choices)]

    async def work(self, emit: Emit) -> None:
        """Emit the parts of all choices as they come. The parts of one choice come in order."""
        await gather(self._prompt(number, emit) for number in range(len(self.plan.prompts)))

    def reply(self, choices: list[Choice], **more: Any) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model_name, choices=choices, **more)

    @property
    def usage(self) -> Usage:
        read = sum(len(prompt.token_ids) for prompt in self.plan.prompts)
        written = sum(writer.tokens for writer in self._writers)
        return Usage(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)

    async def _prompt(self, number: int, emit: Emit) -> None:
        scoring = self.plan.scoring(self.plan.prompts[number])
        scores = await asyncio.wrap_future(self._worker.submit(scoring)) if scoring is not None else None
        samples = self.plan.asked.samples

        async def choice(index: int) -> None:
            writer = self._writers[index]
            if self.plan.asked.echo:
                await emit(await _written(writer.echo, scores))
            if not self.plan.asked.token_budget:
                return
            live = bool(self.plan.asked.stream or self.plan.asked.stop_strings)
            async with contextlib.aclosing(_sampled(self._worker, self.plan.generation(index), live=live)) as parts:
                async for tokens, finish_reason in parts:
                    await emit(await _written(writer.push, tokens, finish_reason))
                    if writer.stopped:
                        return

        await gather(choice(index) for index in range(number * samples, (number + 1) * samples))


async def _written(write: Callable[..., Choice], scored: Tokens | TokenScores | None, *rest: Any) -> Choice:
    """Return `write(scored, *rest)`. Runs it in a thread if it would hold up the event loop."""
    ids = scored.topk_ids if scored is not None else None
    if ids is None or ids.size < NUMBERS_OF_A_MOMENT:
        return write(scored, *rest)
    return await asyncio.to_thread(write, scored, *rest)


async def _sampled(
    worker: EngineWorker, request: GenerateRequest, *, live: bool
) -> AsyncGenerator[tuple[Tokens, FinishReason | None], None]:
    """Yield a response's tokens: as they are sampled if `live`, else all at once. Closing this early aborts it."""
    loop = asyncio.get_running_loop()
    sampled: asyncio.Queue[Tokens | None] = asyncio.Queue()

    def put(tokens: Tokens | None) -> None:
        loop.call_soon_threadsafe(sampled.put_nowait, tokens)

    future = worker.submit(request, on_tokens=put if live else None)
    future.add_done_callback(lambda _: put(None))
    seen = 0
    try:
        while (tokens := await sampled.get()) is not None:
            seen += len(tokens.token_ids)
            yield tokens, None
        whole: Generation = future.result()
        rest = Tokens(whole.token_ids, whole.logprobs, whole.topk_ids, whole.topk_logprobs).part(slice(seen, None))
        yield rest, whole.finish_reason
    finally:
        future.cancel()


class _CompletionResponse(Response):
    """Sends one JSON object, or an event per part if the request streams. Ends when the client hangs up."""

    def __init__(self, answer: _Answer, room: _Room) -> None:
        super().__init__()
        self._answer = answer
        self._room = room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._room.hold(self._answer.plan.choices), contextlib.suppress(ClientGone):
            if self._answer.plan.asked.stream:
                await while_connected(receive, self._send_events(send))
            else:
                reply = await while_connected(receive, self._whole())
                await reply(scope, receive, send)

    async def _whole(self) -> Response:
        parts: list[list[Choice]] = [[] for _ in range(self._answer.plan.choices)]

        async def collect(choice: Choice) -> None:
            parts[choice.index].append(choice)

        await self._answer.work(collect)
        return _reply(self._answer.reply([joined(each) for each in parts], usage=self._answer.usage))

    async def _send_events(self, send: Send) -> None:
        usage: dict[str, Any] = {"usage": None} if self._answer.plan.asked.include_usage else {}

        one_at_a_time = asyncio.Lock()

        async def event(data: bytes) -> None:
            async with one_at_a_time:
                await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})
                await asyncio.sleep(0)  # `send` may not yield, and a hang-up must be noticed before more is sent

        async def send_part(choice: Choice) -> None:
            if choice.text or choice.logprobs or choice.finish_reason or choice.token_ids or choice.prompt_token_ids:
                await event(msgspec.json.encode(self._answer.reply([choice], **usage)))

        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await self._answer.work(send_part)
            if usage:
                await event(msgspec.json.encode(self._answer.reply([], usage=self._answer.usage)))
        except SpotError as error:
            await event(_api_error(error).body())
        await event(DONE)
        await send({"type": "http.response.body", "body": b""})


def refused(status: int, message: str, *, code: str | None = None) -> Response:
    """Return the reply to a request that `Access` refuses."""
    return _error_response(ApiError(status, message, code=code))


def _reply(message: object) -> Response:
    return Response(msgspec.json.encode(message), media_type=JSON)


def _error_response(error: ApiError) -> Response:
    return Response(error.body(), status_code=error.status, media_type=JSON, headers=_HEADERS.get(error.status))


def _api_error(error: Exception) -> ApiError:
    return error if isinstance(error, ApiError) else ApiError(status_of(error), str(error))


def _error_reply(request: Request, error: Exception) -> Response:
    return _error_response(_api_error(error))


def _no_route(request: Request, error: HTTPException) -> Response:
    served = f"{openai_api.PREFIX}{openai_api.COMPLETIONS} and {openai_api.PREFIX}{openai_api.MODELS}"
    message = f"{request.method} {request.url.path}: is not served; of OpenAI's API there are {served}"
    return _error_response(ApiError(error.status_code, message))
