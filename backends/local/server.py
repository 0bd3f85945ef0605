"""Starts our own server as a child process, or finds one that is running. `backend.py` makes the requests to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Self

import pydantic
from pydantic import Field

from spot_async.base.addresses import LOOPBACK
from spot_async.base.processes.child import ChildProcess
from spot_async.base.processes.gpus import torch_has_gpus
from spot_async.base.processes.private_directory import private_directory
from spot_async.base.tasks import Opened, while_alive
from spot_async.config import BackendSettings, OneOrMore, Place, PositiveFloat, PositiveInt, Section, as_list
from spot_async.errors import ConfigError, ProcessDiedError
from spot_async.serving.api import Credentials
from spot_async.serving.settings import EngineSettings

from ..shared.connection import Url, address_of, check_different
from ..shared.launch import Ask, Assignment, Command, Doorway, LaunchedServer, check_installed, is_free
from ..shared.launch_settings import ProcessSettings

READY_MESSAGE_BYTES = 256
PACKAGE = "spot_async"


class LocalLaunch(ProcessSettings):
    """The settings of a server of ours to start on the far side of a prefix."""

    python: str = Field(
        "", description="interpreter of an environment with spot-async, where the server runs; default: as the run's"
    )

    @property
    def interpreter(self) -> str | None:
        return super().interpreter if self.python else sys.executable

    @pydantic.model_validator(mode="after")
    def _check_prefix(self) -> Self:
        if not self.is_elsewhere:
            raise ValueError("prefix: required here, or resources: without launch the server starts on this machine")
        return self


class LocalWeights(Section):
    """How new weights reach the servers of a student."""

    transport: Literal["disk", "adapter"] = Field(
        "disk",
        description="disk: servers read the published directory; adapter: they read the adapter alone (needs "
        "`training.lora`)",
    )


class LocalSettings(EngineSettings, BackendSettings):
    """The settings of one or several of our own servers."""

    kind: str = "local"
    replicas: PositiveInt = Field(1, description="servers to start, all alike")
    port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="loopback port, with $SPOT_ASYNC_API_KEY or a random key; default: a private Unix socket",
    )
    url: OneOrMore[Url] | None = Field(
        None,
        description="address of a running `spot-async serve`, such as http://10.0.0.5:8000; a list for several; "
        "its key is $SPOT_ASYNC_API_KEY",
    )
    launch: OneOrMore[LocalLaunch] | None = Field(
        None, description="where a server is started if not on this machine; a list for several"
    )
    start_timeout_s: PositiveFloat = Field(600.0, description="longest time that loading the model may take")
    weights: LocalWeights = Field(LocalWeights(), description="how new weights reach a student's server")

    @property
    def takes_adapters(self) -> bool:
        return self.weights.transport == "adapter"

    @property
    def where(self) -> str | LocalLaunch | None:
        """Where the only server is, or is started; None: on this machine."""
        places: list[str | LocalLaunch] = [*as_list(self.url), *as_list(self.launch)]
        return places[0] if places else None

    def servers(self) -> Sequence[Self]:
        if isinstance(self.launch, list):
            return self.numbered([{"launch": each} for each in self.launch])
        if self.url is not None:
            return self.numbered([{"url": url} for url in as_list(self.url)])
        return self.numbered([{"replicas": 1}] * self.replicas)

    @property
    def place(self) -> Place | None:
        if isinstance(self.url, str):
            return Place(f"url={self.url}", address_of(self.url), is_attached=True)
        if isinstance(where := self.where, LocalLaunch):
            return Place(f"launch.port={where.port}", f"{where.address}:{where.port}") if where.port else None
        return Place(f"port={self.port}", f"127.0.0.1:{self.port}") if self.port is not None else None

    @property
    def runs_here(self) -> bool:
        return self.where is None

    def check_machine(self, section: str) -> None:
        for key, each in self._launches():
            each.check_machine(f"{section}.{key}")
        if self.launch is not None:
            return
        if self.device.startswith("cuda") and not torch_has_gpus():
            raise ConfigError(
                f"{section}.device={self.device}: the torch installed here was built without CUDA: set it to cpu, or "
                "install torch from an index with CUDA builds"
            )
        if self.port is not None and not is_free(self.port):
            raise ConfigError(f"{section}.port={self.port}: in use by another process: choose another")

    def check_installed(self, section: str) -> None:
        for key, each in self._launches():
            check_installed(each, f"{section}.{key}", PACKAGE)

    def _launches(self) -> Iterator[tuple[str, LocalLaunch]]:
        """Yield each place to start a server in, with its key."""
        for number, each in enumerate(as_list(self.launch)):
            yield f"launch.{number}" if isinstance(self.launch, list) else "launch", each

    @pydantic.field_validator("url")
    @classmethod
    def _check_urls(cls, url: str | list[str] | None) -> str | list[str] | None:
        check_different(as_list(url))
        return url

    @pydantic.model_validator(mode="after")
    def _check_places(self) -> Self:
        if self.port is not None and self.replicas > 1:
            raise ValueError(
                f"port={self.port}: one port for {self.replicas} servers (replicas): remove it, for private sockets"
            )
        if self.launch is not None and self.port is not None:
            raise ValueError(f"port={self.port}: with launch it is launch.port")
        if self.replicas > 1 and (len(as_list(self.launch)) > 1 or any(each.port for each in as_list(self.launch))):
            raise ValueError(f"replicas={self.replicas}: with several launches, or a launch.port, each is one server")
        if self.device.startswith("cuda"):
            for each in as_list(self.launch):
                each.check_gpus_of_ray(1)
        if self.url is not None:
            for name in ("replicas", "port", "launch", *EngineSettings.model_fields):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name}: says how a server is started, but that at url runs already: remove one")
        return self


class Address(NamedTuple):
    """Where a server listens, and the credentials that it requires."""

    url: str
    credentials: Credentials
    uds: str | None = None


class LocalServer(Opened):
    """One server. Entering starts it, if we start it, and returns once it answers. Leaving ends it."""

    def __init__(self, settings: LocalSettings, assignment: Assignment) -> None:
        self._settings = settings
        self._name = assignment.name
        self._assignment = assignment
        self._child: ChildProcess | LaunchedServer | None = None
        self.address: Address

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        """Start the server and wait for it. Raises `ProcessDiedError` if it ends, or is not ready in time."""
        if len(self._settings.servers()) > 1:
            raise ConfigError(f"{self._name}: several servers in place of one: give each its own settings")
        where = self._settings.where
        if isinstance(where, str):
            self.address = Address(where, Credentials.of_environment())
        else:
            self.address = await (self._start(stack) if where is None else self._launch(where, stack))

    async def watch(self) -> None:
        """Run for as long as the server does, or for ever if we did not start it."""
        if self._child is not None:
            await self._child.watch()
        else:
            await asyncio.get_running_loop().create_future()

    async def until_ready(self, ask: Ask) -> None:
        """Wait until a launched server answers. Others do so already."""
        if isinstance(self._child, LaunchedServer):
            await self._child.until_ready(ask)

    async def _launch(self, launch: LocalLaunch, stack: contextlib.AsyncExitStack) -> Address:
        credentials = Credentials.of_new_server()

        def make_command(launch: LocalLaunch, model: Path, doorway: Doorway) -> Command:
            listen = ["--host", doorway.host, "--port", str(doorway.port)]
            return Command(
                [launch.python, "-m", "spot_async.serving", str(model), *listen, *self._arguments()],
                {"OMP_NUM_THREADS": str(self._settings.threads), **credentials.environment},
                PACKAGE,
            )

        self._child = launched = await stack.enter_async_context(
            LaunchedServer(launch, self._assignment, make_command, key=credentials.api_key)
        )
        return Address(launched.url, credentials)

    async def _start(self, stack: contextlib.AsyncExitStack) -> Address:
        directory = stack.enter_context(private_directory("spot-async-"))
        uds = None if self._settings.port else str(directory / "http")
        listen = ["--uds", uds] if uds else ["--port", str(self._settings.port)]
        credentials = Credentials.of_new_server()
        notifications = stack.enter_context(_notification_socket(directory / "ready"))
        self._child = child = await ChildProcess.start(
            self._name,
            [sys.executable, "-m", "spot_async.serving", str(self._assignment.model), *listen, *self._arguments()],
            log_path=self._assignment.log_path,
            environment={
                "NOTIFY_SOCKET": str(directory / "ready"),
                "OMP_NUM_THREADS": str(self._settings.threads),
                **credentials.environment,
            },
            cores=self._assignment.cores,
        )
        stack.push_async_callback(child.stop)
        await self._ready(child, notifications)
        url = "http://localhost" if uds else f"http://{LOOPBACK}:{self._settings.port}"
        return Address(url, credentials, uds)

    def _arguments(self) -> list[str]:
        given = {name: getattr(self._settings, name) for name in EngineSettings.model_fields}
        return [
            text
            for name, value in given.items()
            if value is not None
            for text in (f"--{name.replace('_', '-')}", str(value))
        ]

    async def _ready(self, child: ChildProcess, notifications: socket.socket) -> None:
        """Wait until the child says that it is ready."""
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                notified = asyncio.get_running_loop().sock_recv(notifications, READY_MESSAGE_BYTES)
                await while_alive(notified, child.watch)
        except TimeoutError:
            raise ProcessDiedError(
                f"{self._name} (pid {child.pid}) was not ready after {self._settings.start_timeout_s:g} s: raise "
                f"start_timeout_s or see the log: {self._assignment.log_path}"
            ) from None


@contextlib.contextmanager
def _notification_socket(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.setblocking(False)
        listener.bind(str(path))
        yield listener
