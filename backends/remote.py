"""A remote inference server as its adapter uses it: attached to or started, spoken to in JSON.

Knows no server's dialect. Adapters compose it: they give paths and bodies, and a function that reads a reply.
Replies are read beside the event loop when they are large. Every failure is one of `spot_async.errors`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
import msgspec
import pydantic
from pydantic import Field

from spot_async.config import NonNegativeFloat, Place, PluginSettings, PositiveFloat, PositiveInt
from spot_async.errors import ConfigError, DeadlineExceededError, PoisonedReplyError, RequestError, TransientError
from spot_async.model_files import ModelFiles, read_model
from spot_async.spending.account import Account, Charge
from spot_async.spending.prices import Prices, Size
from spot_async.spending.rate_limit import RateLimiter
from spot_async.types import Traffic

from .connection import address_of, check_headers, check_proxy, check_url, proxy_for, read_secret, tls_context
from .http import HttpEndpoint, ReadError
from .launch import LaunchedServer, LaunchSettings, MakeCommand
from .stepwise import StepRunner, Steps, run_at_once

LARGE_REPLY_BYTES = 1 << 18  # reading more than this would hold up the event loop

T = TypeVar("T")


class RemoteSettings(PluginSettings):
    """What every remote server is told by, whatever its dialect."""

    url: str | None = Field(None, description="of a server that runs already, such as http://10.0.0.5:8000")
    launch: LaunchSettings | None = Field(None, description="a server to start; exclusive with url")
    served_model: str | None = Field(None, description="model name that requests carry; default: the one it serves")
    api_key_env: str | None = Field(None, description="environment variable with the server's key")
    headers: dict[str, str] = Field({}, description="further request headers; no secrets here")
    secret_headers: dict[str, str] = Field({}, description="request headers whose values are environment variables")
    proxy: str | None = Field(None, description="proxy's URL; default: that of HTTPS_PROXY or HTTP_PROXY")
    ca_certificates: str | None = Field(
        None, description="file of the certificates to trust; default: SSL_CERT_FILE, else the usual ones"
    )
    top_k: PositiveInt | None = Field(
        None, description="log-probabilities asked for at each scored position; more tighten entropy bounds"
    )
    logprob_noise_nats: NonNegativeFloat | None = Field(
        None, description="difference between two computations of the same row; default: measured at start-up"
    )

    requests_per_minute: PositiveFloat | None = Field(
        None, description="sent at most, by all stages and servers of the role together"
    )
    tokens_per_minute: PositiveFloat | None = Field(
        None,
        description="of prompts and responses together, likewise; a response counts as its limit until it is there",
    )
    prices: Prices | None = Field(None, description="what requests cost, for the ledger, the estimate and the budget")
    budget: PositiveFloat | None = Field(
        None, description="money that the run may spend here; it ends cleanly before a request that might cost more"
    )
    token_budget: PositiveInt | None = Field(None, description="the same in tokens, of prompts and responses together")

    @pydantic.model_validator(mode="after")
    def _check_place(self) -> Self:
        if (self.url is None) == (self.launch is None):
            raise ValueError("give exactly one of url (a running server) and launch (one to start)")
        return self

    @pydantic.model_validator(mode="after")
    def _check_budget(self) -> Self:
        if self.budget is not None and self.prices is None:
            raise ValueError(f"budget={self.budget:g} needs prices: without them nothing is known to cost anything")
        return self

    def open_account(self, role: str) -> Account:
        return Account(
            role,
            prices=self.prices,
            budget=self.budget,
            token_budget=self.token_budget,
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
        )

    @property
    def place(self) -> Place | None:
        if self.url is not None:
            return Place(f"url={self.url}", address_of(self.url), is_attached=True)
        port = self.launch.port if self.launch is not None else None
        return Place(f"launch.port={port}", f"127.0.0.1:{port}") if port is not None else None

    def check_machine(self, section: str) -> None:
        for variable in filter(None, [self.api_key_env, *self.secret_headers.values()]):
            read_secret(section, variable)
        if self.launch is not None:
            self.launch.check_machine(f"{section}.launch")

    _check_url = pydantic.field_validator("url")(check_url)
    _check_proxy = pydantic.field_validator("proxy")(check_proxy)
    _check_headers = pydantic.field_validator("headers")(check_headers)


class RemoteServer:
    """The connection, and the process if we started it. Enter it before use."""

    def __init__(
        self,
        settings: RemoteSettings,
        *,
        role: str,
        model: str,
        run_directory: Path,
        make_command: MakeCommand | None = None,
        ready_path: str = "/health",
        read_error: ReadError | None = None,
    ) -> None:
        self.settings = settings
        self.role = role
        self.files: ModelFiles = read_model(role, model)
        self.endpoint: HttpEndpoint
        self.account = settings.open_account(role)
        self._own_rate_limit = RateLimiter()
        self._run_directory = run_directory
        self._make_command = make_command
        self._ready_path = ready_path
        self._read_error = read_error
        self._launched: LaunchedServer | None = None
        self._steps = StepRunner()
        self._exit_stack: contextlib.AsyncExitStack
        self._address: str  # the endpoint's, for the ledger

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            url = self.settings.url
            if url is None:
                self._launched = await stack.enter_async_context(self._launch())
                url = self._launched.url
            self._address = address_of(url)
            self.endpoint = await stack.enter_async_context(self._connection(url))
            if self._launched is not None:
                await self._launched.until_ready(
                    lambda deadline: self.endpoint.get(self._ready_path, deadline=deadline)
                )
            self._exit_stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exit_stack.__aexit__(kind, error, trace)

    async def watch(self) -> None:
        """Run for as long as the server does, when we started it; for ever when we did not."""
        if self._launched is not None:
            await self._launched.watch()
        else:
            await asyncio.get_running_loop().create_future()

    async def alongside(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of what a server is asked before anybody watches it: one of ours that ends of it says why."""
        return await (work if self._launched is None else self._launched.alongside(work))

    async def get(self, path: str, kind: type[T], *, deadline: float) -> T:
        return self.read(path, await self.endpoint.get(path, deadline=deadline), _decoder(kind))

    @property
    def rate_limit(self) -> RateLimiter:
        """That of the account; where it has none, this server's own, which only knows when it asked to wait."""
        return self.account.rate_limit if self.account.is_limited else self._own_rate_limit

    async def post(
        self,
        path: str,
        body: object,
        kind: type[T],
        *,
        deadline: float,
        resend: bool = True,
        size: Size | None = None,
    ) -> T:
        """A JSON reply, decoded as `kind`."""
        return await self.ask(path, body, _decoder(kind), deadline=deadline, resend=resend, size=size)

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
        """What `decode` makes of the reply. It runs in a thread for a large one, and raises `PoisonedReplyError`,
        or one of msgspec's errors, for a reply that cannot be read."""
        reply = await self._send(path, msgspec.json.encode(body), size, deadline=deadline, resend=resend)
        if len(reply) > LARGE_REPLY_BYTES:
            return await asyncio.to_thread(self.read, path, reply, decode)
        return self.read(path, reply, decode)

    async def ask_in_steps(
        self,
        path: str,
        body: object,
        decode: Callable[[bytes], Steps[T]],
        *,
        deadline: float,
        size: Size | None = None,
    ) -> T:
        """As `ask`, but a large reply is read on the loop, one step of all those under way a turn (see `stepwise`)."""
        reply = await self._send(path, msgspec.json.encode(body), size, deadline=deadline)
        with self._naming(path):
            if len(reply) > LARGE_REPLY_BYTES:
                return await self._steps.run(decode(reply))
            return run_at_once(decode(reply))

    async def _send(self, path: str, body: bytes, size: Size | None, *, deadline: float, resend: bool = True) -> bytes:
        """The reply's body. A request of a stated `size` is one that the model works for: it waits for its turn and is
        charged to the account. One that costs money is sent again by nobody but who asked, who is charged again."""
        if size is None:
            return await self.endpoint.post(
                path, body, content_type="application/json", deadline=deadline, resend=resend
            )
        resend = resend and not self.account.is_metered
        async with self._charged(size, deadline) as charge:
            charge.sent(body)
            reply = await self.endpoint.post(
                path, body, content_type="application/json", deadline=deadline, resend=resend
            )
            used = charge.answered(reply)
        traffic = self.endpoint.traffic
        traffic.prompt_tokens += used.prompt_tokens
        traffic.cached_tokens += used.cached_tokens
        traffic.completion_tokens += used.completion_tokens
        return reply

    @contextlib.asynccontextmanager
    async def _charged(self, size: Size, deadline: float) -> AsyncIterator[Charge]:
        try:
            async with (
                asyncio.timeout_at(deadline) as turn,
                self.account.request(self._address, size, self.rate_limit) as charge,
            ):
                turn.reschedule(None)  # it is the endpoint's own from here on
                try:
                    yield charge
                except RequestError as error:
                    charge.was_sent = not _never_left(error)
                    raise
        except TimeoutError:
            raise DeadlineExceededError(
                f"{self.role}: no turn before the deadline: raise {self.role}.backend.requests_per_minute or "
                "tokens_per_minute as far as the endpoint allows, or lower the concurrency of its stages"
            ) from None

    def read(self, path: str, reply: bytes, decode: Callable[[bytes], T]) -> T:
        with self._naming(path):
            return decode(reply)

    @contextlib.contextmanager
    def _naming(self, path: str) -> Iterator[None]:
        try:
            yield
        except (PoisonedReplyError, TransientError) as error:
            raise type(error)(f"{self.role}{path}: {error}") from None
        except (msgspec.DecodeError, ValueError, TypeError, KeyError, IndexError) as error:
            raise PoisonedReplyError(f"{self.role}{path}: cannot read the reply: {error}") from error

    def _launch(self) -> LaunchedServer:
        launch = self.settings.launch
        if launch is None or self._make_command is None:
            raise ConfigError(f"{self.role}.backend.launch: {self.settings.kind} starts no server; give its url")
        return LaunchedServer(
            launch,
            role=self.role,
            model=self.files.directory,
            log_path=self._run_directory / "logs" / f"{self.role}.log",
            make_command=self._make_command,
        )

    def _connection(self, url: str) -> HttpEndpoint:
        settings, section = self.settings, f"{self.role}.backend"
        return HttpEndpoint(
            self.role,
            url,
            api_key=read_secret(section, settings.api_key_env) if settings.api_key_env is not None else None,
            headers=settings.headers,
            secret_headers={name: read_secret(section, each) for name, each in settings.secret_headers.items()},
            read_error=self._read_error,
            verify=tls_context(self.role, settings.ca_certificates),
            proxy=proxy_for(self.role, url, settings.proxy),
        )


class RemoteBackend:
    """What adapters tell of their server as it is."""

    _server: RemoteServer

    @property
    def traffic(self) -> Traffic:
        return self._server.endpoint.traffic

    @property
    def account(self) -> Account:
        return self._server.account

    @account.setter
    def account(self, shared: Account) -> None:
        self._server.account = shared


def _decoder(kind: type[T]) -> Callable[[bytes], T]:
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind)
    return decoder.decode


def _never_left(error: BaseException | None) -> bool:
    """Whether there was no connection to send the request over: nobody can have worked for it."""
    while error is not None and not isinstance(error, aiohttp.ClientConnectorError):
        error = error.__cause__ or error.__context__
    return error is not None
