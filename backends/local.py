"""The embedded backend: our own server as a supervised child process, spoken to like any remote one.

Entering starts the child and waits for its word that it is ready; leaving ends it and removes its socket.
Everything about inference happens in the child (`spot_async.serving`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import numpy as np
from pydantic import Field

from spot_async import errors, wire
from spot_async.config import Place, PluginSettings, PositiveFloat
from spot_async.errors import (
    ConfigError,
    PermanentError,
    PoisonedReplyError,
    ProcessDiedError,
    RequestError,
    TransientError,
)
from spot_async.processes import ChildProcess
from spot_async.serving import api
from spot_async.serving.settings import EngineSettings
from spot_async.types import (
    Capabilities,
    FloatArray,
    Generation,
    IntArray,
    SamplingSettings,
    TokenScores,
    Traffic,
    WeightSnapshot,
    WeightVersion,
)

from .coalescing import Coalescer, Outcome
from .failures import UNREADABLE, classify
from .http import HttpEndpoint
from .replies import check_candidates, check_generation, check_scores

SOCKET_PATH_BYTES = 100  # the operating systems' limits are 104 to 108
READY_MESSAGE_BYTES = 256
LARGE_REPLY_BYTES = 1 << 20  # reading more than this would hold up the event loop

T = TypeVar("T")


class LocalBackend:
    """A `Generator`, `Scorer`, `CandidateScorer` and `WeightSink` around one child process."""

    class Settings(PluginSettings, EngineSettings):
        kind: str = "local"
        port: int | None = Field(None, ge=1, le=65535, description="loopback port; default: a private Unix socket")
        start_timeout_s: PositiveFloat = Field(600.0, description="longest time loading the model may take")

        @property
        def place(self) -> Place | None:
            return Place(f"port={self.port}", f"127.0.0.1:{self.port}") if self.port is not None else None

    def __init__(self, settings: Settings, *, role: str, model: str, run_directory: Path) -> None:
        self._settings = settings
        self._role = role
        self._model = model
        self._log_path = run_directory / "logs" / f"{role}.log"
        self._child: ChildProcess
        self._endpoint: HttpEndpoint
        self._capabilities: Capabilities
        self._exit_stack: contextlib.AsyncExitStack
        self._coalescer = Coalescer(self._generate_many)

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            directory = stack.enter_context(_private_directory())
            uds = None if self._settings.port else str(directory / "http")
            notifications = stack.enter_context(_notification_socket(directory / "ready"))
            self._child = await ChildProcess.start(
                self._role,
                [sys.executable, "-m", "spot_async.serving", self._model, *self._arguments(uds)],
                log_path=self._log_path,
                environment={
                    "NOTIFY_SOCKET": str(directory / "ready"),
                    "OMP_NUM_THREADS": str(self._settings.threads),
                },
            )
            stack.push_async_callback(self._child.stop)
            await self._ready(notifications)
            base_url = "http://localhost" if uds else f"http://127.0.0.1:{self._settings.port}"
            key = os.environ.get("SPOT_ASYNC_API_KEY")
            self._endpoint = HttpEndpoint(self._role, base_url, uds=uds, api_key=key, read_error=self._read_error)
            await stack.enter_async_context(self._endpoint)
            deadline = asyncio.get_running_loop().time() + self._settings.start_timeout_s
            self._capabilities = await self.capabilities(deadline=deadline)
            self._exit_stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exit_stack.__aexit__(kind, error, trace)

    async def watch(self) -> None:
        """Run for as long as the child lives; raise `ProcessDiedError` when it ends by itself."""
        await self._child.watch()

    @property
    def traffic(self) -> Traffic:
        return self._endpoint.traffic

    async def capabilities(self, *, deadline: float) -> Capabilities:
        return self._decode(await self._endpoint.get(api.CAPABILITIES, deadline=deadline), Capabilities)

    async def stats(self, *, deadline: float) -> api.Stats:
        """The server's counters and the CPU seconds it has used."""
        return self._decode(await self._endpoint.get(api.STATS, deadline=deadline), api.Stats)

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling: SamplingSettings,
        *,
        top_k: int = 0,
        session: str | None = None,
        deadline: float,
    ) -> Generation:
        request = api.GenerateRequest(
            prompt_ids=prompt_ids, sampling=sampling, top_k=top_k, timeout_s=_time_left(deadline)
        )
        if session is not None:
            return await self._coalescer.ask(session, request, deadline)
        return await self._generate(request, deadline)

    async def _generate(self, request: api.GenerateRequest, deadline: float) -> Generation:
        check = functools.partial(self._check_generation, request)
        return await self._post(api.GENERATE, request, Generation, check, deadline)

    async def _generate_many(
        self, requests: Sequence[api.GenerateRequest], on_reply: Callable[[int, Outcome], None], deadline: float
    ) -> None:
        """A `coalescing.Send`."""
        if len(requests) == 1:
            on_reply(0, await self._generate(requests[0], deadline))
            return
        received = bytearray()
        answered: set[int] = set()
        body = wire.encode(api.GenerateManyRequest(requests=list(requests)))

        def failed(error: RequestError, received: bytes) -> RequestError:
            error.exchange = self._endpoint.exchange("POST", api.GENERATE_MANY, body, received=received)
            return error

        def read(part: bytes) -> None:
            received.extend(part)
            for frame in _take_frames(received):
                try:
                    reply = self._decode(frame, api.GenerateReply)
                    if not 0 <= reply.index < len(requests):
                        raise PoisonedReplyError(f"{self._role}: replied to request {reply.index} of {len(requests)}")
                except PoisonedReplyError as error:
                    raise failed(error, frame) from None
                answered.add(reply.index)
                outcome = self._outcome(requests[reply.index], reply)
                on_reply(reply.index, failed(outcome, frame) if isinstance(outcome, RequestError) else outcome)

        await self._endpoint.stream(api.GENERATE_MANY, body, read, content_type=api.CONTENT_TYPE, deadline=deadline)
        if len(answered) < len(requests):
            ended = f"{self._role}: the server ended after {len(answered)} of {len(requests)} replies"
            raise failed(TransientError(ended), bytes(received))

    def _outcome(self, request: api.GenerateRequest, reply: api.GenerateReply) -> Outcome:
        try:
            if reply.generation is None:
                return self._error(reply.error) or TransientError(f"{self._role}: {reply.error}")
            with self._naming(api.GENERATE):
                return self._check_generation(request, reply.generation)
        except RequestError as error:
            return error

    def _check_generation(self, request: api.GenerateRequest, reply: Generation) -> Generation:
        return check_generation(reply, request.sampling, top_k=request.top_k, vocab_size=self._capabilities.vocab_size)

    async def score(
        self, prompt_ids: IntArray, response_ids: IntArray, *, top_k: int, temperature: float, deadline: float
    ) -> TokenScores:
        request = api.ScoreRequest(
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            top_k=top_k,
            temperature=temperature,
            timeout_s=_time_left(deadline),
        )
        return await self._post(
            api.SCORE,
            request,
            TokenScores,
            lambda reply: check_scores(reply, response_ids, top_k=top_k, vocab_size=self._capabilities.vocab_size),
            deadline,
        )

    async def candidate_logprobs(
        self,
        prompt_ids: IntArray,
        response_ids: IntArray,
        positions: IntArray,
        candidate_ids: IntArray,
        *,
        temperature: float,
        expected_version: WeightVersion,
        deadline: float,
    ) -> FloatArray:
        if not candidate_ids.size:
            return np.zeros(candidate_ids.shape, np.float32)
        request = api.CandidateRequest(
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            positions=positions,
            candidate_ids=candidate_ids,
            temperature=temperature,
            expected_version=expected_version,
            timeout_s=_time_left(deadline),
        )

        def check(reply: api.CandidateReply) -> api.CandidateReply:
            if reply.version != expected_version:
                raise PoisonedReplyError(f"of weights {reply.version} where {expected_version} were asked for")
            check_candidates(reply.logprobs, candidate_ids)
            return reply

        return (await self._post(api.CANDIDATE_LOGPROBS, request, api.CandidateReply, check, deadline)).logprobs

    async def update_weights(self, snapshot: WeightSnapshot, *, deadline: float) -> None:
        request = api.UpdateRequest(snapshot=snapshot, timeout_s=_time_left(deadline))

        def check(reply: api.VersionReply) -> api.VersionReply:
            if reply.version != snapshot.version:
                raise PoisonedReplyError(f"holds weights {reply.version} after an update to {snapshot.version}")
            return reply

        await self._post(api.UPDATE_WEIGHTS, request, api.VersionReply, check, deadline)

    def _arguments(self, uds: str | None) -> list[str]:
        listen = ["--uds", uds] if uds else ["--port", str(self._settings.port)]
        given = {name: getattr(self._settings, name) for name in EngineSettings.model_fields}
        return listen + [
            text
            for name, value in given.items()
            if value is not None
            for text in (f"--{name.replace('_', '-')}", str(value))
        ]

    async def _ready(self, notifications: socket.socket) -> None:
        """Wait for the child's word; raises `ProcessDiedError` when it ends or takes too long instead."""
        try:
            async with asyncio.timeout(self._settings.start_timeout_s), asyncio.TaskGroup() as group:
                watcher = group.create_task(self._child.watch())
                await asyncio.get_running_loop().sock_recv(notifications, READY_MESSAGE_BYTES)
                watcher.cancel()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # the watcher's
        except TimeoutError:
            raise ProcessDiedError(
                f"{self._role} (pid {self._child.pid}) was not ready after {self._settings.start_timeout_s:g} s: raise "
                f"start_timeout_s or see the log: {self._log_path}"
            ) from None

    async def _post(
        self, path: str, request: msgspec.Struct, kind: type[T], check: Callable[[T], T], deadline: float
    ) -> T:
        """What `check` returns of the reply; a large one is read beside the event loop."""
        sent = wire.encode(request)
        body = await self._endpoint.post(path, sent, content_type=api.CONTENT_TYPE, deadline=deadline)

        def read() -> T:
            reply = self._decode(body, kind)
            with self._naming(path):
                return check(reply)

        try:
            return await asyncio.to_thread(read) if len(body) > LARGE_REPLY_BYTES else read()
        except RequestError as error:
            error.exchange = self._endpoint.exchange("POST", path, sent, received=body)
            raise

    def _decode(self, body: bytes, kind: type[T]) -> T:
        try:
            return wire.decode(body, kind)
        except UNREADABLE as error:
            raise classify(self._role, error) from error

    def _read_error(self, status: int, body: bytes) -> RequestError | None:
        """The error class that the server named; None when the body is not the server's own."""
        try:
            reply = wire.decode(body, api.ErrorReply)
        except UNREADABLE:
            return None
        return self._error(reply) or (PermanentError(f"{self._role}: {reply.message}") if status < 500 else None)

    def _error(self, reply: api.ErrorReply | None) -> RequestError | None:
        """What the server named; None when that is no request's error."""
        kind: Any = getattr(errors, reply.error, None) if reply is not None else None
        if reply is None or not (isinstance(kind, type) and issubclass(kind, RequestError)):
            return None
        return kind(f"{self._role}: {reply.message}")

    @contextlib.contextmanager
    def _naming(self, path: str) -> Iterator[None]:
        try:
            yield
        except PoisonedReplyError as error:
            raise PoisonedReplyError(f"{self._role}{path}: {error}") from None


def _take_frames(received: bytearray) -> Iterator[bytes]:
    """Cut whole frames off the front of what was received."""
    header = api.FRAME_HEADER
    while len(received) >= header.size:
        end = header.size + header.unpack_from(received)[0]
        if len(received) < end:
            return
        yield bytes(received[header.size : end])
        del received[:end]


def _time_left(deadline: float) -> float:
    return max(0.0, deadline - asyncio.get_running_loop().time())


@contextlib.contextmanager
def _private_directory() -> Iterator[Path]:
    """A new directory that only this user can enter, with a path short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="spot-async-"))
    try:
        if len(os.fsencode(path)) + len("/ready") > SOCKET_PATH_BYTES:
            raise ConfigError(f"{path} is too long for a socket's path: set TMPDIR to a shorter directory")
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _notification_socket(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.setblocking(False)
        listener.bind(str(path))
        yield listener
