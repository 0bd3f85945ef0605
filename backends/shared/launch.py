"""Starts inference servers as child processes, in their own Python environment.

A backend turns `LaunchSettings` into a command line. Here the command becomes a child process, here or on the far side
of a prefix. We wait until it is ready, explain a failure by its log, and stop it with everything that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from spot_async.base.addresses import LOOPBACK
from spot_async.base.processes.child import LOG_SEARCH_BYTES, ChildProcess
from spot_async.base.processes.exits import SAFE_PATH
from spot_async.base.processes.far_side import FarPlace
from spot_async.base.processes.last_words import error_in, headline, readable
from spot_async.base.processes.private_directory import private_directory, short_temporary_directory
from spot_async.base.retry import START_TIMEOUT_S
from spot_async.base.tasks import Opened, while_alive
from spot_async.errors import ConfigError, ProcessDiedError, RequestError, TransientError
from spot_async.serving.api import new_secret

from .far_side import FarSide
from .launch_settings import ProcessSettings

LOG_LINES = 10  # lines shown from the end of a failed server's log
LOG_ERRORS = 3  # messages shown of exceptions above those lines
ASK_TIMEOUT_S = 10.0
ASK_INTERVAL_S = 0.25
LAST_REPLY_S = 10.0  # longest time between a crashing server's last reply and its end; SGLang takes five seconds
# These ports are below those of outgoing connections. Otherwise a connection to a server that does not listen yet might
# get that very port as its own end, be connected to itself, and keep the server from listening.
FREE_PORTS = range(20_000, 32_768)
NO_SUCH_MODULE = 3
# Prints what an environment has of a package, as JSON: see `Installed`. Exits with 3 if there is no such module.
INSTALLED_CODE = """
import importlib.metadata as metadata, importlib.util, json, sys
spec = importlib.util.find_spec(sys.argv[1])
if spec is None or spec.origin is None:
    sys.exit(3)
names = metadata.packages_distributions().get(sys.argv[1], [])
nccl = [each.version for each in metadata.distributions() if (each.name or "").startswith("nvidia-nccl-cu")]
print(json.dumps({
    "version": metadata.version(names[0]) if names else "unknown",
    "is_named_so": any(True for _ in metadata.distributions(name=sys.argv[1])),
    "nccl": nccl[0] if nccl else None,
}))
"""


T = TypeVar("T")


class Installed(msgspec.Struct, frozen=True):
    """What an environment has of a package."""

    version: str  # of the distribution that the module belongs to
    is_named_so: bool  # whether there is a distribution of the module's very name
    nccl: str | None  # NCCL's version there; None if torch brings its own, or has none


def check_installed(settings: ProcessSettings, section: str, package: str | None) -> Installed | None:
    """Check that the server is installed, as `BackendSettings.check_installed`, and return what there is of it.

    Nothing is known yet of a node that Ray is to choose.
    """
    settings.check_interpreter(section)
    if package is None or (settings.resources and not settings.prefix):
        return None
    try:
        return installed(settings.far_side, package)
    except ConfigError as error:
        raise ConfigError(str(error).replace("launch", section, 1)) from None


@dataclass(frozen=True)
class Command:
    """What starts a server: its whole command line, with the settings' own arguments.

    Devices and the settings' environment variables are added to `environment` later. `make_command` may be slow,
    because it runs in a thread. It raises `ConfigError` with keys that begin with `launch`.
    """

    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    package: str | None = None  # module that the interpreter must be able to import; None: not checked
    uds: str | None = None  # Unix socket to listen on; None: the doorway's port
    is_ours: bool = False  # it is of this package and this environment, and ends with us by itself
    files: Mapping[str, str] = field(default_factory=dict, repr=False)  # of secrets, by name in the doorway's directory


@dataclass(frozen=True)
class Doorway:
    """How a server can be reached. On a port only its key protects it, because every user can connect to that."""

    port: int
    directory: Path  # private, for a socket, or for a file of secrets that a command line would show to all users
    key: str = field(repr=False)
    host: str = LOOPBACK  # with the port

    @property
    def uds(self) -> str:
        """The path of a Unix socket, to use in place of the port if the server can."""
        return str(self.directory / "http")


@dataclass(frozen=True)
class Assignment:
    """What a server is started for."""

    role: str
    section: str  # the key of what starts it, for errors: `student.backend.launch`
    name: str  # for messages, which tell a role's servers apart
    model: Path
    log_path: Path
    reads: Path | None = None  # directory of ours that the server must see
    cores: frozenset[int] | None = None  # that it has to itself; None: it shares them
    start_timeout_s: float = START_TIMEOUT_S


MakeCommand = Callable[[Any, Path, Doorway], Command]  # given the kind's own settings, and the model's directory
Ask = Callable[[float], Awaitable[object]]  # given a deadline; raises a `RequestError` while the server is not ready


class LaunchedServer(Opened):
    """A server as our child process. Entering starts it; `until_ready` waits until it answers; leaving ends it."""

    def __init__(
        self, settings: ProcessSettings, assignment: Assignment, make_command: MakeCommand, *, key: str | None = None
    ) -> None:
        self._settings = settings
        self._name = assignment.name
        self._assignment = assignment
        self._make_command = make_command
        self._child: ChildProcess
        self.key = key or new_secret()  # the user's key, or one that only this object knows
        self.url: str
        self.uds: str | None

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        """Start the server. Raises `ConfigError` for an interpreter, package or port that cannot be used."""
        section = self._assignment.section
        if self._settings.resources and not self._settings.prefix:
            raise ConfigError(f"{section}.resources: this command places no servers: train, eval and check do")
        self._settings.check_machine(section)
        self._settings.check_interpreter(section)
        try:
            command, port = await self._start(stack)
        except ConfigError as error:
            raise type(error)(str(error).replace("launch", section, 1)) from None
        self.uds = command.uds
        self.url = f"http://{self._settings.address}:{port}" if command.uds is None else "http://localhost"
        stack.push_async_callback(self._child.stop)

    async def _start(self, stack: contextlib.AsyncExitStack) -> tuple[Command, int]:
        settings = self._settings
        if settings.is_elsewhere:
            directory, port = Path("/tmp") / f"spot-server-{new_secret()[:16]}", await asyncio.to_thread(self._far_port)
        else:
            directory = stack.enter_context(private_directory("spot-server-"))
            port = free_port() if settings.port is None else check_port(settings.port)
        command = await asyncio.to_thread(self._command, Doorway(port, directory, self.key, settings.host))
        environment, far = {**settings.passed_environment("launch"), **command.environment}, None
        if settings.is_elsewhere:
            far = FarPlace(
                settings.prefix,
                settings.interpreter or "",
                directory=directory if command.files else None,
                files=command.files,
            )
        else:
            for name, text in command.files.items():
                (directory / name).touch(mode=0o600)
                (directory / name).write_text(text, encoding="utf-8")
        log_path, cores = self._assignment.log_path, self._assignment.cores
        if command.is_ours:
            self._child = await ChildProcess.start(
                self._name, command.argv, log_path=log_path, environment=environment, cores=cores
            )
            return command, port
        # Servers put sockets of their own there, whose paths may not be long either.
        short = {"TMPDIR": short_temporary_directory()} if far is None else {}
        self._child = await ChildProcess.start_foreign(
            self._name,
            command.argv,
            log_path=log_path,
            environment={**short, **environment},
            cores=cores,
            secrets=[self.key, *settings.passed_secrets],
            far=far,
        )
        return command, port

    def _far_port(self) -> int:
        """Return a port that is free on the far side, which must also have what the server needs."""
        settings = self._settings
        ports = random.SystemRandom().sample(FREE_PORTS, 16) if settings.port is None else [settings.port]
        model, reads = self._assignment.model.absolute(), self._assignment.reads
        written = reads.absolute() if reads is not None else None
        return settings.far_side.place(
            settings.host, ports, is_given=settings.port is not None, model=model, written=written
        )

    def _command(self, doorway: Doorway) -> Command:
        """Return the command with its whole environment. Runs the interpreter, so call it in a thread."""
        settings = self._settings.model_copy(update={"python": self._settings.interpreter})
        command = self._make_command(settings, self._assignment.model.absolute(), doorway)
        if command.package is not None:
            version = installed(self._settings.far_side, command.package).version
            structlog.get_logger().info("starting", process=self._name, package=command.package, version=version)
        safe_path = SAFE_PATH if "-m" in command.argv[:2] else {}  # a script may need the modules beside it
        return replace(command, environment={**safe_path, **command.environment, **settings.variables})

    async def watch(self) -> None:
        """Run for as long as the server lives. Raises `ProcessDiedError` when it ends, with the log's last lines."""
        try:
            await self._child.watch()
        except ProcessDiedError as error:
            self._explain(error)
            raise

    async def alongside(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, which asks the server something. If that ends the server, raise its end."""
        try:
            return await while_alive(work, self.watch)
        except TransientError:  # a crashing server may still reply before it ends, so wait for that
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_REPLY_S):
                    await self.watch()
            raise

    async def until_ready(self, ask: Ask) -> None:
        """Wait until the server answers. Raises `ProcessDiedError` if it ends instead, or takes too long."""
        last: RequestError | None = None

        async def answered() -> None:
            nonlocal last
            while True:
                try:
                    await ask(asyncio.get_running_loop().time() + ASK_TIMEOUT_S)
                    return
                except RequestError as error:
                    last = error
                await asyncio.sleep(ASK_INTERVAL_S)

        try:
            async with asyncio.timeout(self._assignment.start_timeout_s):
                await self.alongside(answered())
        except TimeoutError:
            given = self._assignment
            late = ProcessDiedError(
                f"{self._name} (pid {self._child.pid}) was not ready after {given.start_timeout_s:g} s "
                f"({last}): raise {given.role}.serving.recovery_timeout_s or see the log: {given.log_path}"
            )
            self._explain(late)
            raise late from None

    def _explain(self, error: ProcessDiedError) -> None:
        """Add the end of the log, and exceptions from further above: a cause often stands there."""
        lines = readable(self._child.log_tail(LOG_SEARCH_BYTES))
        said = dict.fromkeys(found for line in lines[:-LOG_LINES] if (found := error_in(line)) is not None)
        errors = [*said][-LOG_ERRORS:]
        shown = [*errors, *(["..."] if errors else []), *lines[-LOG_LINES:]]
        error.add_note("\n".join(f"  {line}" for line in shown))


@functools.lru_cache
def installed(side: FarSide, package: str) -> Installed:
    """Return what an environment has of a package. Cached. Raises `ConfigError` if it has no such module."""
    code, line, errors = side.ask(INSTALLED_CODE, [package])
    where = f"{side.python} on the far side of {side.shown}" if side.prefix else side.python
    if code == NO_SUCH_MODULE:
        raise ConfigError(f"launch.python: no {package} in {where}: install it there, or name another interpreter")
    if code:
        reason = headline(readable(errors)) or f"exit code {code}"
        raise ConfigError(f"launch.python: {where} cannot look for {package}: {reason}")
    return msgspec.json.decode(line, type=Installed)


def check_port(port: int) -> int:
    """Return the port if it is free. Raises `ConfigError` if another program listens on it."""
    if not is_free(port):
        raise ConfigError(f"launch.port={port}: taken by another program; give another one, or none for a free one")
    return port


def free_port() -> int:
    """Return a loopback port on which nobody listens."""
    return next(port for port in random.SystemRandom().sample(FREE_PORTS, len(FREE_PORTS)) if is_free(port))


def is_free(port: int) -> bool:
    """Return whether nobody listens on a loopback port."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # lingering connections do not count
        try:
            listener.bind((LOOPBACK, port))
        except OSError:
            return False
        return True
