"""A remote inference server that talks JSON, either running already or started by us.

It knows no server's API. A backend has a `RemoteServer` and gives it paths, bodies, and functions that read replies.
Large replies do not hold up the event loop (`stepwise.py`). Every failure is one of `spot_async.errors`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

import msgspec
import pydantic
from pydantic import Field

from spot_async.config import NonNegativeFloat, OneOrMore, Place, PositiveInt, as_list, backend_section
from spot_async.errors import ConfigError, PoisonedReplyError, RequestError, ServerRestartedError, TransientError
from spot_async.models.files import ModelFiles, read_model
from spot_async.spending.account import Account
from spot_async.spending.prices import Size
from spot_async.types import Traffic

from .connection import (
    Url,
    access,
    address_of,
    check_different,
    check_headers,
    check_proxy,
    proxy_for,
    read_secret,
    tls_context,
)
from .failures import UNREADABLE, classify
from .http import HttpEndpoint, ReadError, with_exchange
from .launch import LaunchedServer, LaunchSettings, MakeCommand, check_installed, check_together
from .metering import Meter, MeteredSettings
from .stepwise import LARGE_REPLY_BYTES, StepRunner, Steps, read_aside, run_at_once

T = TypeVar("T")


class AttachedSettings(MeteredSettings):
    """The settings of remote servers that are already running, for any API."""

    url: OneOrMore[Url] | None = Field(
        None, description="address of a running server, such as http://10.0.0.5:8000; a list for several"
    )
    served_model: str | None = Field(None, description="model name in requests; default: the only model that it serves")
    api_key_env: str | None = Field(
        None, description="environment variable with the server's key; default under launch: a random one"
    )
    headers: dict[str, str] = Field({}, description="further request headers; no secrets here")
    secret_headers: dict[str, str] = Field(
        {}, description="request headers, each with the environment variable that holds its value"
    )
    proxy: str | None = Field(None, description="proxy's URL; default: that of HTTPS_PROXY or HTTP_PROXY")
    ca_certificates: str | None = Field(
        None, description="file of the certificates to trust; default: SSL_CERT_FILE, else the usual ones"
    )
    top_k: PositiveInt | None = Field(
        None, description="log-probabilities asked for at each scored position; more tighten entropy bounds"
    )
    logprob_noise_nats: NonNegativeFloat | None = Field(
        None,
        description=("99.9 % of log-probabilities differ by less between two computations of a row; default: measured"),
    )

    @property
    def where(self) -> str | LaunchSettings:
        """Where the only server is: its address, or how to start it. Raises `ConfigError` if there are several."""
        return _only(as_list(self.url))

    @property
    def is_attached(self) -> bool:
        """Whether the servers were already running, so that they may hold any weights."""
        return self.url is not None

    def servers(self) -> Sequence[Self]:
        return self.numbered([{"url": url} for url in as_list(self.url)])

    @property
    def place(self) -> Place | None:
        where = self.where
        return Place(f"url={where}", address_of(where), is_attached=True) if isinstance(where, str) else None

    def check_machine(self, section: str) -> None:
        for variable in filter(None, [self.api_key_env, *self.secret_headers.values()]):
            read_secret(section, variable)

    @pydantic.field_validator("url")
    @classmethod
    def _check_urls(cls, url: str | list[str] | None) -> str | list[str] | None:
        check_different(as_list(url))
        return url

    _check_proxy = pydantic.field_validator("proxy")(check_proxy)
    _check_headers = pydantic.field_validator("headers")(check_headers)


class RemoteSettings(AttachedSettings):
    """The settings of remote servers that are running, or that we start."""

    PACKAGE: ClassVar[str | None] = None  # module that a started server's interpreter must be able to import

    launch: OneOrMore[LaunchSettings] | None = Field(
        None, description="a server to start; a list for several; exclusive with url"
    )

    @property
    def where(self) -> str | LaunchSettings:
        places: list[str | LaunchSettings] = [*as_list(self.url), *as_list(self.launch)]
        return _only(places)

    def servers(self) -> Sequence[Self]:
        return self.numbered([{"launch": each} for each in as_list(self.launch)]) if self.launch else super().servers()

    @property
    def place(self) -> Place | None:
        where = self.where
        if isinstance(where, str):
            return super().place
        return Place(f"launch.port={where.port}", f"{where.address}:{where.port}") if where.port is not None else None

    @property
    def runs_here(self) -> bool:
        return super().runs_here and not (isinstance(self.where, LaunchSettings) and self.where.is_elsewhere)

    def check_machine(self, section: str) -> None:
        super().check_machine(section)
        for key, each in self._launches():
            each.check_machine(f"{section}.{key}")

    def check_installed(self, section: str) -> None:
        for key, each in self._launches():
            if self.PACKAGE is not None:
                check_installed(each, f"{section}.{key}", self.PACKAGE)

    def _launches(self) -> Iterator[tuple[str, LaunchSettings]]:
        """Yield each server to start, with its key."""
        for number, each in enumerate(as_list(self.launch)):
            yield f"launch.{number}" if isinstance(self.launch, list) else "launch", each

    @pydantic.field_validator("launch")
    @classmethod
    def _check_launches(
        cls, launch: LaunchSettings | list[LaunchSettings] | None
    ) -> LaunchSettings | list[LaunchSettings] | None:
        servers = [server for each in as_list(launch) for server in each.servers()]
        check_together(servers)
        return servers if len(servers) > 1 else launch

    @pydantic.model_validator(mode="after")
    def _check_place(self) -> Self:
        if (self.url is None) == (self.launch is None):
            raise ValueError("give exactly one of url (a running server) and launch (one to start)")
        return self


def _only(places: Sequence[T]) -> T:
    if len(places) != 1:
        raise ConfigError(f"url, launch: {len(places)} servers in place of one: give one, or each its own settings")
    return places[0]


class RemoteServer:
    """One server: the connection to it, and its process if we started it. Enter it before use."""

    def __init__(
        self,
        settings: AttachedSettings,
        *,
        role: str,
        model: str,
        run_directory: Path,
        make_command: MakeCommand | None = None,
        ready_path: str = "/health",
        read_error: ReadError | None = None,
        reads: Path | None = None,
    ) -> None:
        self.settings = settings
        self.role = role  # for configuration keys
        self.name = settings.server_name(role)  # for messages and logs, which tell a role's servers apart
        self._where = settings.where
        self.files: ModelFiles = read_model(role, model)
        self.endpoint: HttpEndpoint
        self.meter = Meter(role, self.name, settings.open_account(role))
        self._run_directory = run_directory
        self._make_command = make_command
        self._ready_path = ready_path
        self._read_error = read_error
        self._reads = reads  # directory of ours that a server to start must see
        self._launched: LaunchedServer | None = None
        self._steps = StepRunner()
        self._exit_stack: contextlib.AsyncExitStack

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            if not isinstance(self._where, str):
                self._launched = await stack.enter_async_context(self._launch(self._where))
            self.endpoint = await stack.enter_async_context(self.connection({}))
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
        return isinstance(self._where, LaunchSettings) and self._where.is_elsewhere

    async def watch(self) -> None:
        """Run for as long as the server does, or for ever if we did not start it."""
        if self._launched is not None:
            await self._launched.watch()
        else:
            await asyncio.get_running_loop().create_future()

    async def alongside(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, which asks a server that nobody watches yet. If our server ends, raise that."""
        return await (work if self._launched is None else self._launched.alongside(work))

    async def get(self, path: str, kind: type[T], *, deadline: float) -> T:
        reply = await self.endpoint.get(path, deadline=deadline)
        with self._naming("GET", path, None, reply):
            return _decoder(kind)(reply)

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
        """Send a request and return its JSON reply as `kind`."""
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
        """Send a request and return what `decode` makes of the reply. A large reply is decoded in a thread.

        `decode` raises a `RequestError`, or one of `failures.UNREADABLE` for a reply that cannot be read.
        """
        sent = msgspec.json.encode(body)
        with self.endpoint.turn() as turn:
            reply = await self.meter.post(
                self.endpoint, path, sent, deadline=deadline, resend=resend, size=size, turn=turn
            )
            with self._naming("POST", path, sent, reply):
                return await read_aside(reply, decode)

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
        sent = msgspec.json.encode(body)
        with self.endpoint.turn() as turn:
            reply = await self.meter.post(
                self.endpoint, path, sent, deadline=deadline, resend=True, size=size, turn=turn
            )
            with self._naming("POST", path, sent, reply):
                if len(reply) > LARGE_REPLY_BYTES:
                    return await self._steps.run(decode(reply))
                return run_at_once(decode(reply))

    @contextlib.contextmanager
    def _naming(self, method: str, path: str, sent: bytes | None, reply: bytes) -> Iterator[None]:
        """Turn errors of reading a reply into request errors that name the server and have the exchange."""
        try:
            yield
        except RequestError as failure:  # some name the server already
            nameless = isinstance(failure, PoisonedReplyError | TransientError) and not isinstance(
                failure, ServerRestartedError
            )
            raise with_exchange(
                failure.reworded(f"{self.name}{path}: {failure}") if nameless else failure,
                self.endpoint.exchange(method, path, sent, received=reply),
            ) from None
        except UNREADABLE as failure:
            unreadable = classify(f"{self.name}{path}", failure)
            raise with_exchange(
                unreadable.reworded(f"{unreadable}{self.endpoint.through}"),
                self.endpoint.exchange(method, path, sent, received=reply),
            ) from failure

    def _launch(self, launch: LaunchSettings) -> LaunchedServer:
        if self._make_command is None:
            raise ConfigError(f"{self.role}.backend.launch: {self.settings.kind} starts no server; give its url")
        return LaunchedServer(
            launch,
            role=self.role,
            name=self.name,
            model=self.files.directory,
            log_path=self._run_directory / "logs" / f"{self.name}.log",
            make_command=self._make_command,
            key=self._configured_key,
            cores=self.settings.cores,
            reads=self._reads,
        )

    @property
    def _configured_key(self) -> str | None:
        variable = self.settings.api_key_env
        return read_secret(f"{self.role}.backend", variable) if variable is not None else None

    def connection(self, headers: Mapping[str, str]) -> HttpEndpoint:
        """Return a connection pool to the server, to be entered, with these headers besides those of the settings."""
        settings, section, launched = self.settings, f"{self.role}.backend", self._launched
        url = self.url
        return HttpEndpoint(
            self.name,
            url,
            uds=launched.uds if launched is not None else None,
            api_key=launched.key if launched is not None else self._configured_key,
            headers={**settings.headers, **headers},
            secret_headers={name: read_secret(section, each) for name, each in settings.secret_headers.items()},
            read_error=self._read_error,
            verify=tls_context(self.role, settings.ca_certificates),
            proxy=proxy_for(self.role, url, settings.proxy) if launched is None else None,
            access=access(section, url, settings.api_key_env, settings.secret_headers),
        )


class RemoteBackend:
    """A base class with what backends pass on from their server unchanged."""

    _server: RemoteServer

    @property
    def traffic(self) -> Traffic:
        return self._server.endpoint.traffic

    @property
    def account(self) -> Account:
        return self._server.meter.account

    @account.setter
    def account(self, shared: Account) -> None:
        self._server.meter.account = shared


def _decoder(kind: type[T]) -> Callable[[bytes], T]:
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind)
    return decoder.decode
