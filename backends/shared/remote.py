"""One inference server, either running already or started by us. Those of others talk JSON (`RemoteServer`).

It knows no server's API. A backend has a `RemoteServer` and gives it paths, bodies, and functions that read replies.
Large replies do not hold up the event loop (`bodies.py`). Every failure is one of `spot_async.errors`.

Requests that the model works for have a size, and are charged to the role's account. The account decides when such a
request may leave, and what it cost (`spot_async.spending`).
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from spot_async.base.retry import QUESTION_TIMEOUT_S, RetryPolicy
from spot_async.base.tasks import Opened, gather, sent_again
from spot_async.config import backend_section
from spot_async.errors import ConfigError, RequestError
from spot_async.models.files import ModelFiles, read_model
from spot_async.spending.prices import Size
from spot_async.spending.rate_limit import RateLimiter
from spot_async.types import Traffic

from .bodies import (
    LARGE_REPLY_BYTES,
    Steps,
    largest_reply_bytes,
    read_aside,
    run_at_once,
    run_in_turn,
)
from .connection import proxy_for
from .http import HttpEndpoint, ReadError, Route
from .launch import Assignment, LaunchedServer, MakeCommand
from .launch_settings import ProcessSettings
from .settings import AttachedSettings

JSON = "application/json"

T = TypeVar("T")
THROTTLED_ONLY = RetryPolicy(attempts=1)  # throttled requests have no limit but the deadline


async def gather_some(requests: Iterable[Callable[[], Coroutine[Any, Any, T]]], places: asyncio.Semaphore) -> list[T]:
    """Do as `gather`, with as many at a time as there are places."""

    async def in_place(request: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with places:
            return await request()

    return await gather(in_place(each) for each in requests)


async def when_free(ask: Callable[[], Awaitable[T]], deadline: float) -> T:
    """Return what `ask` gives once the server no longer throttles. Raises other failures at once.

    For requests outside of stages. `failures.py` says which are throttled.
    """
    return await sent_again(ask, THROTTLED_ONLY, deadline, jitter=random.random, what="start")


def _never_left(error: BaseException | None) -> bool:
    """Return whether there was no connection to send the request over, so that no model can have worked for it."""
    while error is not None and not isinstance(error, aiohttp.ClientConnectorError):
        error = error.__cause__ or error.__context__
    return error is not None


@dataclass(frozen=True)
class ServerKind:
    """What one kind of server has of its own."""

    make_command: MakeCommand | None = None  # None: we start none
    ready_path: str = "/health"
    read_error: ReadError | None = None


class Server(Opened, abc.ABC):
    """One server: the connection to it, and its process if we started it. Enter it before use."""

    def __init__(self, where: str | ProcessSettings, assignment: Assignment, ready_path: str = "/health") -> None:
        self.role = assignment.role  # for configuration keys
        self.name = assignment.name  # for messages and logs, which tell a role's servers apart
        self.endpoint: HttpEndpoint
        self._where = where
        self._assignment = assignment
        self._ready_path = ready_path
        self._launched: LaunchedServer | None = None
        self._is_starting = False

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Inside, a request that is throttled waits and is sent again, as a stage's would be.

        Each has a deadline of its own, since waits, or a slow server, may take longer than the one for all of them.
        """
        self._is_starting = True
        try:
            yield
        finally:
            self._is_starting = False

    async def _patiently(self, ask: Callable[[float], Awaitable[T]], deadline: float) -> T:
        if not self._is_starting:
            return await ask(deadline)
        own_deadline = max(deadline, asyncio.get_running_loop().time() + QUESTION_TIMEOUT_S)
        return await when_free(lambda: ask(own_deadline), own_deadline)

    @abc.abstractmethod
    def _launch(self, settings: ProcessSettings) -> LaunchedServer:
        """Return the server's process, to be entered."""

    @abc.abstractmethod
    def connection(self, headers: Mapping[str, str]) -> HttpEndpoint:
        """Return a connection pool to the server, to be entered, with these headers besides those of the settings."""

    @abc.abstractmethod
    def _decoded(self, reply: bytes, kind: type[T]) -> T:
        """Return a reply's body as `kind`. Raises one of `failures.UNREADABLE`."""

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        if not isinstance(self._where, str):
            self._launched = await stack.enter_async_context(self._launch(self._where))
        self.endpoint = await stack.enter_async_context(self.connection({}))
        if self._launched is not None:
            await self._launched.until_ready(self.ask_whether_ready)

    @property
    def section(self) -> str:
        """The settings' place in the configuration, for errors."""
        return backend_section(self.role, self.name)

    @property
    def url(self) -> str:
        """The server's address. Of one that we start it is known once we have."""
        return self._launched.url if self._launched is not None else str(self._where)

    @property
    def is_elsewhere(self) -> bool:
        """Whether we start the server, and by a prefix."""
        return isinstance(self._where, ProcessSettings) and self._where.is_elsewhere

    async def watch(self) -> None:
        """Run for as long as the server does, or for ever if we did not start it."""
        if self._launched is not None:
            await self._launched.watch()
        else:
            await asyncio.get_running_loop().create_future()

    async def ask_whether_ready(self, deadline: float) -> None:
        """Raise a `RequestError` unless the process that answers HTTP does so."""
        await self.endpoint.get(self._ready_path, deadline=deadline)

    async def alongside(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, which asks a server that nobody watches yet. If our server ends, raise that."""
        return await (work if self._launched is None else self._launched.alongside(work))

    async def get(self, path: str, kind: type[T], *, deadline: float) -> T:
        reply = await self._patiently(lambda deadline: self.endpoint.get(path, deadline=deadline), deadline)
        with self.endpoint.reading("GET", path, None, reply):
            return self._decoded(reply, kind)


class RemoteServer(Server):
    """A server of others, asked in JSON."""

    def __init__(
        self,
        settings: AttachedSettings,
        *,
        role: str,
        model: str,
        run_directory: Path,
        kind: ServerKind = ServerKind(),
    ) -> None:
        self.settings = settings
        self.files: ModelFiles = read_model(role, model)
        assignment = settings.assignment(role, f"{role}.backend.launch", self.files.directory, run_directory)
        super().__init__(settings.where, assignment, kind.ready_path)
        self.account = settings.open_account(role) if settings.account is None else settings.account
        self._own_rate_limit = RateLimiter()  # has no limits of its own, only the pauses that this server asked for
        self._kind = kind
        self._reading = asyncio.Lock()  # of a large reply

    async def post(
        self,
        path: str,
        body: object,
        kind: type[T],
        *,
        deadline: float,
        resend: bool = True,
    ) -> T:
        """Send a request and return its JSON reply as `kind`."""
        decode = functools.partial(self._decoded, kind=kind)
        return await self.ask(path, body, decode, deadline=deadline, resend=resend)

    def _decoded(self, reply: bytes, kind: type[T]) -> T:
        return msgspec.json.decode(reply, type=kind)

    async def ask(
        self,
        path: str,
        body: object,
        decode: Callable[[bytes], T],
        *,
        deadline: float,
        resend: bool = True,
        size: Size | None = None,
    ) -> T:
        """Send a request and return what `decode` makes of the reply. A large reply is decoded in a thread.

        `decode` raises a `RequestError`, or one of `failures.UNREADABLE` for a reply that cannot be read.
        """
        return await self._asked(path, body, lambda reply: read_aside(reply, decode), deadline, resend, size)

    async def ask_in_steps(
        self,
        path: str,
        body: object,
        decode: Callable[[bytes], Steps[T]],
        *,
        deadline: float,
        size: Size | None = None,
    ) -> T:
        """Do as `ask`, but read a large reply on the event loop, one step of one reply in each turn."""

        async def read(reply: bytes) -> T:
            steps = decode(reply)
            return await run_in_turn(self._reading, steps) if len(reply) > LARGE_REPLY_BYTES else run_at_once(steps)

        return await self._asked(path, body, read, deadline, True, size)

    async def _asked(
        self,
        path: str,
        body: object,
        read: Callable[[bytes], Awaitable[T]],
        deadline: float,
        resend: bool,
        size: Size | None,
    ) -> T:
        sent = msgspec.json.encode(body)

        async def once(deadline: float) -> T:
            async with contextlib.AsyncExitStack() as turn:
                ask = functools.partial(
                    self.endpoint.post, path, sent, content_type=JSON, deadline=deadline, resend=resend, turn=turn
                )
                reply = await ask() if size is None else await self._charged(ask, sent, size, deadline)
                with self.endpoint.reading("POST", path, sent, reply):
                    return await read(reply)

        return await self._patiently(once, deadline)

    async def _charged(self, ask: Callable[..., Awaitable[bytes]], sent: bytes, size: Size, deadline: float) -> bytes:
        """Send a request that the model works for, in its turn, and charge it.

        If it costs money, it is not sent again here: whoever asked for it may send it again, and is charged again.
        """
        limit = self.account.rate_limit if self.account.is_limited else self._own_rate_limit
        again = {"resend": False} if self.account.is_metered else {}
        async with self.account.request(self.name, size, limit, deadline) as charge:
            charge.sent(sent)
            try:
                reply = await ask(largest=largest_reply_bytes(size.counted.tokens, size.logprobs), **again)
            except RequestError as error:
                charge.was_sent = not _never_left(error)
                raise
            used = charge.answered(reply)
        traffic = self.endpoint.traffic
        traffic.prompt_tokens += used.prompt_tokens
        traffic.cached_tokens += used.cached_tokens
        traffic.completion_tokens += used.completion_tokens
        return reply

    def _launch(self, settings: ProcessSettings) -> LaunchedServer:
        if self._kind.make_command is None:
            raise ConfigError(f"{self.role}.backend.launch: {self.settings.kind} starts no server; give its url")
        return LaunchedServer(settings, self._assignment, self._kind.make_command, key=self._configured_key)

    @property
    def _configured_key(self) -> str | None:
        return self.settings.api_key(f"{self.role}.backend")

    def connection(self, headers: Mapping[str, str]) -> HttpEndpoint:
        section, url, launched = f"{self.role}.backend", self.url, self._launched
        if launched is None:
            route, key = Route(proxy=proxy_for(section, url, self.settings.proxy)), self._configured_key
        else:
            route, key = Route(uds=launched.uds), launched.key
        return self.settings.endpoint(
            self.name, section, url, route=route, api_key=key, headers=headers, read_error=self._kind.read_error
        )


class RemoteBackend(Opened):
    """A base class with what backends pass on from their server unchanged."""

    _server: Server

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        await stack.enter_async_context(self._server)

    async def watch(self) -> None:
        await self._server.watch()

    @property
    def traffic(self) -> Traffic:
        return self._server.endpoint.traffic
